"""The figures of two jobs, from timelines whose truth is known; the environment of their ranks."""

from __future__ import annotations

import json

import numpy as np
import pytest

from configs import fabric
from experiments.labs.fabric import jobs, run, two_jobs_figures, two_jobs_tables
from experiments.labs.fabric.timeline import Timeline, cut, periods, together
from experiments.labs.fabric.topology import ConfigError, from_config


def line(period: float, count: int, start: float = 0.0, delays: float = 0.0) -> Timeline:
  return Timeline(np.arange(count), start + period * np.arange(1, count + 1),
                  np.full(count, delays), np.full((count, 1), 5e-3))


def test_only_steps_in_which_all_jobs_ran_count() -> None:
  long, short = together([line(0.1, 100), line(0.1, 40, start=1.05)])
  assert (short.steps[0], short.steps[-1], len(short.steps)) == (2, 39, 38)
  assert long.ends.min() >= short.ends.min() and long.ends.max() <= short.ends.max()
  assert len(long.steps) == 37  # one end fewer fits between


def test_a_gap_in_the_record_is_no_long_period() -> None:
  whole = line(0.1, 10)
  torn = Timeline(*(np.delete(values, 4, axis=0) for values in whole))
  assert periods(torn) == pytest.approx([0.1] * 7)
  assert len(cut(whole, 0.45).steps) == 6


def test_figures_of_a_run() -> None:
  rng = np.random.default_rng(3)
  lines = []
  for start in (0.0, 0.02):
    steps = np.concatenate([np.full(60, 0.080), rng.choice([0.060, 0.064], 141)])
    lines.append(Timeline(np.arange(201), start + np.cumsum(steps),
                          np.where(np.arange(201) < 60, 4e-3, 0), np.zeros((201, 1))))
  found = two_jobs_figures.of_run(lines, settle=100)
  assert found["settled_ms"] == pytest.approx(62, rel=0.01)
  assert found["settled_cv"] == pytest.approx(2 / 62, rel=0.05)
  assert found["mean_ms"] == pytest.approx((58 * 80 + 140 * 62) / 198, rel=0.01)
  assert (found["delay_ms"] == pytest.approx(4 * 58 / 199, rel=0.02)
          and found["settled_delay_ms"] == 0)
  assert (found["blocks"][0]["mean_ms"][0] == pytest.approx(80)
          and found["blocks"][1]["sd_ms"][0] == pytest.approx(0))
  with pytest.raises(ValueError, match="nothing left"):
    two_jobs_figures.of_run(lines, settle=250)


def test_figures_of_a_leave() -> None:
  stays = line(0.1, 100)
  stays.delays[:63] = 5e-3
  found = two_jobs_figures.of_leave(stays, left_at=5.05)  # steps 50 and later ended after it
  assert (found["disengaged_after"], found["held_back"], found["steps"]) == (13, 13, 50)
  assert found["held_back_ms"] == pytest.approx(65) and found["mean_ms_after"] == pytest.approx(100)
  stays.delays[:] = 0
  assert two_jobs_figures.of_leave(stays, left_at=5.05)["disengaged_after"] == 0
  stays.delays[:] = 1e-3
  assert two_jobs_figures.of_leave(stays, left_at=5.05)["mean_ms_after"] is None


def repetition(alone: float, none: float, interleave: float) -> two_jobs_figures.Figures:
  def figures(mean: float) -> two_jobs_figures.Figures:
    return {"mean_ms": mean, "settled_ms": mean, "settled_cv": 0.02, "settled_median_ms": mean,
            "delay_ms": 0.0, "settled_delay_ms": 0.0, "blocks": []}
  return {"alone_none": figures(alone), "alone_interleave": figures(alone * 1.001),
          "none": figures(none), "interleave": figures(interleave), "offset_ms": 3.0,
          "load_average": 0.1}


def test_the_share_recovered_is_of_the_mean_gap() -> None:
  found = two_jobs_figures.summary([repetition(60, 90, 66), repetition(60, 70, 62)])
  value, low, high = found["recovered"]
  assert value == pytest.approx(1 - 4 / 20) and low <= value <= high
  assert found["gap"][0] == pytest.approx(1 / 3, abs=1e-4)
  assert found["cost_alone"] == pytest.approx([0.001] * 3, abs=1e-5)
  assert two_jobs_figures.summary([repetition(60, 60, 60)])["recovered"][
      0] is None, "no gap, no share of it"


def test_the_page_says_it() -> None:
  repetitions = [repetition(60, 90, 66), repetition(60, 60.5, 60.4)]
  config = fabric.get_config()
  here = {"command": "python", "date": "2000-01-01",
          "machine": {"cores": 2, "platform": "Linux", "jax": "0.10"}, "load_average_at_start": 0.1,
          "config": json.loads(config.to_json_best_effort()), "congestion": "bbr",
          "rule": "interleave", "trunk": {"mbit": 95.0, "rtt_ms": 0.03, "loaded_rtt_ms": 9.0},
          "steps": 600, "alone_steps": 150, "settle": 200, "floor": [6e-3, 6.5e-3],
          "repetitions": repetitions, "leaves": [],
          "summary": two_jobs_figures.summary(repetitions)}
  page = "\n".join(two_jobs_tables.markdown({"by_congestion": {"default": here}}))
  assert "## TCP congestion control: default (bbr)" in page and "6.00, 6.50, measured alone" in page
  assert "| 3 | 60 | 90 | 66 | 80% | 0.1 |" in page and "| 3 | 60 | 60.5 | 60.4 | – | 0.1 |" in page


def test_the_environment_of_a_rank() -> None:
  topology = from_config(fabric.get_config())
  base = {"PATH": "/bin", "XLA_FLAGS": "--xla_force_host_platform_device_count=8 --xla_other=1",
          "SLURM_JOB_ID": "7", "JAX_COORDINATOR_PORT": "1"}
  found = jobs.environment(topology, "b", 1, base)
  assert found["JAX_COORDINATOR_ADDRESS"] == "10.0.1.2:29401"
  assert (found["JAX_NUM_PROCESSES"], found["JAX_PROCESS_ID"]) == ("2", "1")
  assert found["XLA_FLAGS"] == "--xla_other=1 --xla_force_host_platform_device_count=1"
  assert ("SLURM_JOB_ID" not in found and "JAX_COORDINATOR_PORT" not in found
          and found["PATH"] == "/bin")
  assert jobs.environment(topology, "a", 0, {})["JAX_COORDINATOR_ADDRESS"] == "10.0.1.1:29400"
  with pytest.raises(ConfigError, match="no job 'c'"):
    jobs.environment(topology, "c", 0, {})


def test_the_marks_in_a_command_are_filled_in() -> None:
  assert run.filled(["x", "--out={job}/{rank}", "{host}",
                     "{other}"], "a", 1, "a1") == ["x", "--out=a/1", "a1",
                                                   "{other}"]
