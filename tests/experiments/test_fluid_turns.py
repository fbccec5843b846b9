"""The fluid model's jobs in the simulation that knows turns."""

import numpy as np
import pytest

from experiments.measure import fluid, fluid_turns
from experiments.measure import two_jobs_simulated as scenes


@pytest.mark.parametrize("name", ["two", "periods_near"])
def test_without_control_both_simulations_agree(name):
  scene = scenes.SCENES[name]._replace(steps=60, first=1)
  drawn = scenes.stacked([fluid.scene(seed, list(scene.periods), list(scene.fractions),
                                      steps=scene.steps, buckets=8, **scene.more)
                          for seed in range(2)])
  found = fluid_turns.history(drawn, scene.periods, (), None, scene.steps).step_time
  other = scenes.history(scene, scenes.CONTROLS["none"], 2).step_time
  # The quicker job has done all its steps, the other one those that fit in.
  known = np.isfinite(found)
  assert known[:, 0].all() and known.mean() > 0.9
  np.testing.assert_allclose(np.asarray(found)[known], np.asarray(other)[known], rtol=2e-4)


def test_steps_that_a_job_did_not_get_to_do_not_count():
  scene = scenes.SCENES["periods"]
  time = np.full((3, 2, scene.steps), 1.2)
  time[:, 1] = 1.3 * 1.1
  time[:, 1, 300:] = np.nan
  held = np.where(np.isnan(time), np.nan, 0.0)
  found = scenes.figure(scene, fluid.History(time, held, held, {}))
  assert found["by_job"] == pytest.approx([1.2, 1.1]) and found["cv"] == pytest.approx(0, abs=1e-9)
  assert found["delay"] == found["delayed_share"] == 0


def test_who_does_not_obey_holds_nothing_and_the_other_one_does():
  scene = scenes.SCENES["two_one_paced"]._replace(steps=160)
  found = scenes.history(scene, scenes.CONTROLS["turns_message"], 2)
  held = np.nan_to_num(np.asarray(found.delay)).sum(axis=2)
  assert (held[:, 1] == 0).all() and (held[:, 0] > 0).all()


def test_scenes_seen_with_noise_are_left_out():
  turns = scenes.CONTROLS["turns_bucket"]
  assert not turns.knows(scenes.SCENES["two_noise"]) and turns.knows(scenes.SCENES["two"])
  assert scenes.CONTROLS["interleave"].knows(scenes.SCENES["two_noise"])


def test_page_has_both_columns():
  cell = {"mean": 1.25, "by_job": [1.2, 1.3], "cv": 0.1, "standard_error": 0.01,
          "worst_seed": 1.3, "delay": 0.0}
  shown = {"effect": None, "interval": [None, None], "gain_shown": 0.0, "harm_shown": 0.0}
  figures = {"seeds": 4, "command": "x", "date": "d", "machine": {}, "leaving": {
      "until_disengaged": [1], "until_last_delay": [1]},
      "evidence": {"steps": 10, "two": shown}, "cells": [
          {"scene": "two", "control": name, **cell} for name in ("none", "turns_message")]}
  text = "\n".join(scenes.page(figures | scenes.measured.circumstances("x")))
  assert "| turns_message | turns_bucket |" in text
  assert "1.200, 1.300" in text
