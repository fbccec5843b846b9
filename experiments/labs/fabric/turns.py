"""Jobs of any periods on one trunk, over real TCP: what it costs them to share, and what taking
turns gives back.

    python -m experiments.labs.fabric.turns                                  # some 25 minutes
    python -m experiments.labs.fabric.turns --ratios=1.13 --runs=2 --out=/tmp/turns.json
    python -m experiments.labs.fabric.turns --ratios=1.13:1.3 --compute_ms=72     # three jobs
    python -m experiments.labs.fabric.turns --ratios=1.13 --runs=0 --leaves=0 --guarded=a
    python -m experiments.labs.fabric.turns --merge=/tmp/turns.json               # measures nothing

For each ratio of periods, and each of so many random starts: all jobs without control (twice: the
A/A), all taking turns, the first alone of them taking turns, and other arms that are asked for, in
random order, from the same offsets and with the same compute times; and one job alone on the trunk,
without control and with. At last all jobs but the first leave. With `--guarded` one long run in
which some jobs take turns under the guard, between two of a quarter its length without control.
Writes docs/measurements/turns_tcp.json and .md after every start, and adds to what is there: starts
of the same settings (congestion control, compute, steps, ...) go together. Needs root, see
experiments/labs/fabric/lab.py.
"""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import random
import sys
import tempfile
import time
from collections.abc import Iterable
from typing import Any

import numpy as np
from absl import app, flags
from ml_collections import config_flags

from experiments.labs.fabric import jobs, timeline
from experiments.labs.fabric.lab import Lab
from experiments.labs.fabric.machine import LabError
from experiments.labs.fabric.topology import ConfigError
from experiments.labs.fabric.trainer import COPIED_STEPS, Run, Work
from experiments.labs.fabric.turns_figures import (
  ARMS,
  at_ratio,
  merge,
  of_guarded,
  of_leave,
  of_run,
  pacers,
  page,
  part_like,
  summary,
)
from experiments.lib import measured
from jaxpace.trace.reader import read_run

_CONFIG = config_flags.DEFINE_config_file("config", "configs/fabric.py", "The lab.",
                                          lock_config=True)
_ratios = flags.DEFINE_list("ratios", ["1.0", "1.13", "1.3"],
                            "Period of the second job, as a multiple of the first's; 1.13:1.3 for "
                            "three jobs.")
_arms = flags.DEFINE_list("arms", ["none", "again", "both", "one"],
                          f"Of {', '.join(ARMS)}; none and again are always run.")
_runs = flags.DEFINE_integer("runs", 10, "Random starts of each ratio.", lower_bound=0)
_steps = flags.DEFINE_integer("steps", 130, "Of each run of jobs side by side.", lower_bound=40)
_settle = flags.DEFINE_integer("settle", 65, "Steps at the start that don't count.", lower_bound=0)
_alone = flags.DEFINE_integer("alone_steps", 40, "Of each run of one job.", lower_bound=20)
_buckets = flags.DEFINE_integer("buckets", 8, "Of the gradient.", lower_bound=1)
_gradient = flags.DEFINE_float("gradient_kb", 300, "All buckets together, KB.", lower_bound=1)
_compute = flags.DEFINE_float("compute_ms", 36, "Of the first job's steps.", lower_bound=1)
_learn = flags.DEFINE_integer("learn", 24,
                              "Of take_turns: steps over which the cost of sharing is measured.")
_trial = flags.DEFINE_integer("trial", 24, "Of take_turns: steps of its trial.")
_congestion = flags.DEFINE_string("congestion", "cubic", "TCP congestion control.")
_seed = flags.DEFINE_integer("seed", 0, "Of starts and compute times; goes on with each start.")
_leaves = flags.DEFINE_integer("leaves", 1, "How often, at last, all jobs but the first leave.",
                               lower_bound=0)
_keep = flags.DEFINE_string("keep", None,
                            "Empty directory that all runs are kept in; else nowhere.")
_guarded = flags.DEFINE_list("guarded", [],
                             "Jobs (a, b, ...) that take turns under the guard in one long run.")
_guarded_steps = flags.DEFINE_integer("guarded_steps", 3000, "Of that run.", lower_bound=400)
_merge = flags.DEFINE_list("merge", [], "Files of this program that are added to --out; nothing is "
                                        "measured.")
_out = flags.DEFINE_string("out", "docs/measurements/turns_tcp.json",
                           "File the figures are written to.")

_GRACE_NS = 700_000_000
_AFTER = 70  # steps of the job that stays


class Bench:
  """Jobs that are ready, and where their runs are recorded."""

  def __init__(self, ready: dict[str, jobs.TrainingJob], root: pathlib.Path):
    self.jobs, self.root, self._count = ready, root, 0
    self.places: dict[str, pathlib.Path] = {}
    """Of the last run, by job."""

  def run(self, pacers: dict[str, str], steps: dict[str, int], seed: int, offset: float = 0.0
          ) -> list[timeline.Timeline]:
    """Runs jobs side by side, `offset` s from one start to the next; a timeline for each."""
    self._count += 1
    self.places = {job: self.root / f"{self._count}-{job}" for job in pacers}
    start = time.monotonic_ns() + _GRACE_NS
    for number, (job, pacer) in enumerate(pacers.items()):
      self.jobs[job].begin(Run(str(self.places[job]), steps[job], pacer,
                               start + round(1e9 * offset * number), seed))
    for job in pacers:
      self.jobs[job].finish(timeout=60 + 1.0 * steps[job])
    return [timeline.read(place) for place in self.places.values()]


def _steps_of(slowest: int, names: Iterable[str], ratios: list[float]) -> dict[str, int]:
  """Steps of each job, which last as long as so many of the slowest one."""
  return {name: round(slowest * max(ratios) / ratio)
          for name, ratio in zip(names, ratios, strict=True)}


def _start(bench: Bench, ratios: list[float], seed: int, period: float, alone_ms: dict[str, float]
           ) -> dict[str, Any]:
  """One random start, all arms from it."""
  draw = random.Random(seed)
  names = list(bench.jobs)
  offset = draw.random() * period
  found: dict[str, Any] = {"offset_ms": round(1e3 * offset, 3), "seed": seed,
                           "load_average": round(os.getloadavg()[0], 2)}
  steps = _steps_of(_steps.value, names, ratios)
  arms = [arm for arm in ARMS if arm in {"none", "again", *_arms.value}]
  for arm in draw.sample(arms, len(arms)):
    found[arm] = of_run(bench.run(dict(zip(names, pacers(arm, len(names)), strict=True)), steps,
                                  seed, offset), _settle.value)
  found["alone"] = {pacer: of_run(bench.run({names[0]: pacer}, {names[0]: _alone.value}, seed), 4)
                    for pacer in draw.sample(["none", "turns"], 2)}
  found["alone_of"] = [alone_ms[name] for name in names]
  return found


def _under_the_guard(bench: Bench, ratios: list[float], alone_ms: dict[str, float]
                     ) -> dict[str, Any]:
  """One long run in which some jobs take turns under the guard, between two without control."""
  names, obey = list(bench.jobs), _guarded.value
  steps = _steps_of(_guarded_steps.value, names, ratios)
  load = round(os.getloadavg()[0], 2)

  def run(seed: int, parts: int, obeying: Iterable[str]) -> list[timeline.Timeline]:
    return bench.run({name: "guarded" if name in obeying else "none" for name in names},
                     {name: count // parts for name, count in steps.items()}, seed)

  before = of_run(run(_seed.value, 4, ()), _settle.value)
  lines = run(_seed.value, 1, obey)
  columns = {name: read_run(bench.places[name]).guard for name in obey}
  after = of_run(run(_seed.value + 1, 4, ()), _settle.value)
  return {"obey": obey, "steps": steps, "seed": _seed.value, "load_average": load,
          "alone_of": [alone_ms[name] for name in names], "none": [before, after],
          **of_guarded(lines, columns, _settle.value)}


def _prepare(ready: dict[str, jobs.TrainingJob], pacer: str,
             settings: dict[str, dict[str, Any]]) -> None:
  """Has all jobs compile their steps with a pacer, side by side."""
  for name, job in ready.items():
    job.begin_to_prepare(pacer, settings[name])
  for job in ready.values():
    job.prepared()


def _measure(ratio: str, figures: dict[str, Any], part: dict[str, Any], out: pathlib.Path) -> None:
  config = _CONFIG.value.copy_and_resolve_references()
  ratios = [1.0, *map(float, ratio.split(":"))]
  letters = "abcdef"[:len(ratios)]
  with config.unlocked():
    config.congestion = _congestion.value
    config.racks = tuple(tuple(f"{letter}{rack}" for letter in letters) for rack in range(2))
    for letter in letters:
      config.jobs[letter] = (f"{letter}0", f"{letter}1")
  kept = (tempfile.TemporaryDirectory() if _keep.value is None
          else contextlib.nullcontext(f"{_keep.value}/{ratio.replace(':', '-')}"))
  with kept as root, Lab(config) as lab:
    pathlib.Path(root).mkdir(parents=True, exist_ok=True)
    transfer = 8 * _gradient.value / config.trunk_mbit  # ms
    computes = [each * (_compute.value + transfer) - transfer for each in ratios]
    ready: dict[str, jobs.TrainingJob] = {}
    try:
      for name, compute in zip(letters, computes, strict=True):
        ready[name] = jobs.TrainingJob(
            lab, name, Work(compute, config.jitter, _gradient.value, _buckets.value),
            pathlib.Path(root))
      _prepare(ready, "none", {name: {} for name in letters})
      bench = Bench(ready, pathlib.Path(root))
      alone_ms = _prepare_alone(bench)
      print(f"{ratio}: alone {alone_ms}", file=sys.stderr, flush=True)
      here = at_ratio(part, ratio)
      for _ in range(_runs.value):
        seed = _seed.value + len(here["starts"])
        here["starts"].append(_start(bench, ratios, seed, 1e-3 * alone_ms["a"], alone_ms))
        here["summary"] = summary(here["starts"])
        measured.write(figures, page(figures), out)
        last = here["starts"][-1]
        print(f"{ratio}: " + ", ".join(
            f"{arm} {np.round(last[arm]['mean_ms'], 2)} cv {np.round(last[arm]['cv'], 3)}"
            for arm in ARMS if arm in last), file=sys.stderr, flush=True)
      for _ in range(_leaves.value):
        steps = _steps_of(_steps.value, letters, ratios)
        steps["a"] += _AFTER
        stays, *leave = bench.run(dict.fromkeys(letters, "turns"), steps, 77 + len(here["leaves"]))
        here["leaves"].append(of_leave(stays, max(float(line.ends[-1]) for line in leave)))
        measured.write(figures, page(figures), out)
      if _guarded.value:
        here["guarded"].append(_under_the_guard(bench, ratios, alone_ms))
        measured.write(figures, page(figures), out)
    finally:
      for job in ready.values():
        job.close()


def _prepare_alone(bench: Bench) -> dict[str, float]:
  """Runs each job alone, and compiles its steps with the floors that it has so; ms, by job."""
  alone_ms, times = {}, {}
  for name in bench.jobs:
    (line,) = bench.run({name: "none"}, {name: 2 * _alone.value}, 1)
    alone_ms[name] = of_run([line], 4)["mean_ms"][0]
    times[name] = [float(value) for value in np.median(line.transfers[4:], axis=0)]
  by_message = {"by": "message", "learn": _learn.value, "trial": _trial.value}
  settings: dict[str, dict[str, Any]] = {
      "turns": by_message, "turns:bucket": by_message | {"by": "bucket"}, "interleave": {},
      "guarded": by_message}
  asked = {pacer for arm in _arms.value for pacer in ARMS[arm]} if _runs.value else set()
  asked |= {"turns"} if _runs.value or _leaves.value else set()
  asked |= {"guarded"} if _guarded.value else set()
  for pacer in asked - {"none"}:
    _prepare(bench.jobs, pacer, {name: {"floor": times[name]} | settings[pacer]
                                 for name in bench.jobs})
  return alone_ms


def main(argv: list[str]) -> None:
  if len(argv) > 1:
    raise app.UsageError(f"Unknown arguments: {' '.join(argv[1:])}")
  out = pathlib.Path(_out.value)
  figures = measured.circumstances("experiments.labs.fabric.turns") | {"commands": [], "parts": []}
  here = {name: figures[name] for name in ("command", "date", "load_average_at_start")}
  for file in [out, *map(pathlib.Path, _merge.value)]:
    if file in map(pathlib.Path, _merge.value) or file.is_file():
      merge(figures, json.loads(file.read_text()))
  if _merge.value:
    figures |= figures["commands"][-1]
    measured.write(figures, page(figures), out)
    return
  figures["commands"].append(here)
  part: dict[str, Any] = {
      "trunk_mbit": _CONFIG.value.trunk_mbit, "congestion": _congestion.value,
      "steps": _steps.value, "settle": _settle.value, "buckets": _buckets.value,
      "gradient_kb": _gradient.value, "compute_ms": _compute.value, "learn": _learn.value,
      "trial": _trial.value, "copied_steps": COPIED_STEPS,
      "priority": "with precedence on a machine in use"
      if os.sched_getscheduler(0) != os.SCHED_OTHER
      else "without precedence"}
  try:
    for ratio in _ratios.value:
      _measure(ratio, figures, part_like(figures, part), out)
  except (ConfigError, LabError) as error:
    sys.exit(f"turns: {error}")


if __name__ == "__main__":
  app.run(main)
