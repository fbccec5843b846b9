"""Jobs on one link that they share equally, in the fluid model: `take_turns`, by message and by
bucket, beside `interleave_jobs` and what there is without control.

    python -m experiments.measure.two_jobs_turns                                 # about a minute

The scenes, starts and compute times are those of `experiments.measure.two_jobs_simulated`, which
knows delays at the start of a step alone; holds before collectives are simulated by
`jaxpace.simulation.turns`. A figure is the mean over jobs and seeds of step time over the job's own
period alone: 1 is as if there were no other job.
"""

from __future__ import annotations

import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl import app, flags

import jaxpace
from experiments.lib import measured
from experiments.measure import fluid
from experiments.measure import two_jobs_simulated as scenes
from jaxpace.simulation import turns

SCENES = ("two", "three", "four", "periods", "infeasible", "alone")
RATIOS = (1.13, 1.3, 1.5)
TINY, BUSY, WRONG = 0.008, 4.0, 0.02
"""Listening once, as a share of the period, as in the lab; how many times as long it takes beside
another's traffic; the share of readings that tell the opposite."""
WAYS = {"none": None, "message": "message", "bucket": "bucket"}


def history(scene: scenes.Scene, by: str | None, seeds: int) -> fluid.History:
  """Runs a scene from so many starts: [seeds, jobs, steps]."""
  drawn = scenes.stacked([fluid.scene(seed, list(scene.periods), list(scene.fractions),
                                      steps=scene.steps, buckets=scenes.BUCKETS, **scene.more)
                          for seed in range(seeds)])
  count = len(scene.periods)
  pacer = turns.nothing() if by is None else jaxpace.take_turns(
      by=by, window=1_000_000, slots=scenes.BUCKETS)
  # Floors are known, and each job's own: a long window keeps those the state begins with.
  states = fluid.stack([pacer.init(1) for _ in range(count)])
  if by is not None:
    floors = jnp.asarray([[fraction * period / scenes.BUCKETS] * scenes.BUCKETS for period, fraction
                          in zip(scene.periods, scene.fractions, strict=True)], jnp.float32)
    keys = np.random.default_rng(7).integers(0, 2**32, count, np.uint32)
    states = states._replace(floor=states.floor._replace(floor=floors), key=jnp.asarray(keys))
  jobs = turns.Drawn(
      ready=jnp.broadcast_to(drawn.compute[..., None], drawn.work.shape), work=drawn.work,
      start=drawn.start,
      speeds=jnp.broadcast_to(1 / jnp.arange(1, count + 1, dtype=jnp.float32), (seeds, count)),
      tiny=jnp.broadcast_to(TINY * jnp.asarray(scene.periods, jnp.float32), (seeds, count)),
      obeys=jnp.ones((seeds, count), bool))
  run = jax.jit(turns.simulator(pacer, scene.steps))
  found = run(jax.random.key(0), jobs, turns.Ear(BUSY, 0.2, WRONG), states)
  return fluid.History(found.step_time, found.held, found.sent, found.info)


def asked_for() -> dict[str, scenes.Scene]:
  """Scenes of the table, and two jobs of more ratios of periods."""
  more = {f"ratio {ratio}": scenes.Scene(f"periods 1 and {ratio}, messages of equal length, "
                                         "2 % jitter", (1, ratio), (.4, .4 / ratio),
                                         more={"jitter": .02}) for ratio in RATIOS}
  return {name: scenes.SCENES[name] for name in SCENES} | more


def figure(scene: scenes.Scene, found: fluid.History) -> dict[str, Any]:
  """The figures of one scene, in steps that every job did."""
  alone = np.asarray(scene.periods, np.float64)[:, None]
  late = (np.asarray(found.step_time, np.float64) / alone)[:, :, scene.first:]
  by_seed = np.nanmean(late, axis=(1, 2))
  return {"mean": float(by_seed.mean()),
          "standard_error": float(by_seed.std(ddof=1) / np.sqrt(len(by_seed))),
          "by_job": np.nanmean(late, axis=(0, 2)).tolist(),
          "cv": float(np.mean(np.nanstd(late, axis=2) / np.nanmean(late, axis=2))),
          "held": float(np.nanmean((np.asarray(found.delay, np.float64) / alone)
                                   [:, :, scene.first:]))}


def measure(seeds: int) -> dict[str, Any]:
  cells, wanted = [], asked_for()
  say = measured.progress("scenes", len(wanted))
  for done, (name, scene) in enumerate(wanted.items()):
    for way, by in WAYS.items():
      cells.append({"scene": name, "control": way, **figure(scene, history(scene, by, seeds))})
    found = scenes.history(scene, scenes.CONTROLS["interleave"], seeds)
    cells.append({"scene": name, "control": "interleave", **figure(scene, found)})
    say(done + 1)
  return {"seeds": seeds, "tiny": TINY, "busy": BUSY, "wrong": WRONG, "cells": cells}


def page(figures: dict[str, Any]) -> list[str]:
  lines = measured.introduction("Jobs that share a link equally and take turns, in the fluid model",
                                figures)
  lines += [
      "A simulation: jobs compute, then send 8 buckets over one link that the senders share "
      "equally at every instant, without",
      "loss. Listening once takes "
      f"{figures['tiny']:g} of a period, {figures['busy']:g} times as long beside another's "
      f"traffic; {100 * figures['wrong']:g} % of",
      "the readings tell the opposite. Floors are given. Step time over the job's own period "
      f"alone, mean over jobs and {figures['seeds']} seeds,",
      "steps 51 to 400: so `take_turns`, which measures for 48 steps and tries for 64, has its "
      "beginning counted, too.", ""]
  by = {(cell["scene"], cell["control"]): cell for cell in figures["cells"]}
  lines += measured.table(
      ["scene", "none", "`take_turns`, by message", "by bucket", "`interleave_jobs`",
       "by message, each job", "CV: none", "by message", "`interleave_jobs`"],
      [[scene.about, *[f"{by[name, control]['mean']:.3f}" for control in
                       ("none", "message", "bucket", "interleave")],
        ", ".join(f"{value:.3f}" for value in by[name, "message"]["by_job"]),
        *[f"{by[name, control]['cv']:.3f}" for control in ("none", "message", "interleave")]]
       for name, scene in asked_for().items()])
  return lines


def main(argv: list[str]) -> None:
  out = pathlib.Path(FLAGS.out)
  figures = {**measured.circumstances("experiments.measure.two_jobs_turns"),
             **measure(FLAGS.seeds)}
  measured.write(figures, page(figures), out)


FLAGS = flags.FLAGS

if __name__ == "__main__":
  flags.DEFINE_integer("seeds", 12, "Random starts of each scene.", lower_bound=2)
  flags.DEFINE_string("out", "docs/measurements/two_jobs_turns.json",
                      "JSON file; a page is written beside it.")
  app.run(main)
