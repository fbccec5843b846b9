"""Two jobs on one trunk, over real TCP: what it costs them to collide, and what `interleave_jobs`
gives back.

    python -m experiments.labs.fabric.two_jobs                          # 10 pairs of 600 steps, cubic: about 22 minutes
    python -m experiments.labs.fabric.two_jobs --congestion=cubic,reno,default
    python -m experiments.labs.fabric.two_jobs --rule=random --out=docs/measurements/two_jobs_random.json
    python -m experiments.labs.fabric.two_jobs --runs=2 --steps=150 --settle=50 --leaves=1 --out=/tmp/two_jobs.json

Each repetition draws a start offset between the jobs, and runs, in random order: both jobs without
control, both with `interleave_jobs`, from the same offset and with the same compute times; one job
alone, without and with. Then, some times, a job leaves the other. Writes
docs/measurements/two_jobs.json and .md after every repetition: a run that is killed keeps what it
has measured. Needs root, see experiments/labs/fabric/lab.py.
"""  # noqa: E501

from __future__ import annotations

import json
import os
import pathlib
import random
import sys
import tempfile
import time
from typing import Any

import numpy as np
from absl import app, flags
from ml_collections import config_flags

from experiments.labs.fabric import jobs, timeline, two_jobs_figures, two_jobs_tables
from experiments.labs.fabric.lab import Lab
from experiments.labs.fabric.machine import LabError
from experiments.labs.fabric.topology import ConfigError
from experiments.labs.fabric.trainer import Run, Work
from experiments.lib import measured

_CONFIG = config_flags.DEFINE_config_file("config", "configs/fabric.py",
                                          "The lab and the work of a step.", lock_config=True)
_runs = flags.DEFINE_integer("runs", 10, "Repetitions, each with a start offset of its own.",
                             lower_bound=1)
_steps = flags.DEFINE_integer("steps", 600, "Steps of each run of two jobs.", lower_bound=20)
_alone = flags.DEFINE_integer("alone_steps", 0,
                              "Steps of each run of one job; 0: a quarter of --steps.",
                              lower_bound=0)
_settle = flags.DEFINE_integer("settle", 200, "Steps at the start that don't count as settled.",
                               lower_bound=0)
_leaves = flags.DEFINE_integer("leaves", 3, "Runs in which one job leaves the other.",
                               lower_bound=0)
_congestion = flags.DEFINE_list("congestion", "cubic",
                                "TCP congestion controls, one after the other; `default` is the "
                                "kernel's own.")
_floor = flags.DEFINE_enum("floor", "measured", ["measured", "learned"],
                           "The buckets' own times, for interleave_jobs: measured on the quiet "
                           "trunk before, or none.")
_rule = flags.DEFINE_enum("rule", "interleave", ["interleave", "random"],
                          "The control that is compared with none; `random` is for comparison, "
                          "give it an --out.")
_out = flags.DEFINE_string("out", "docs/measurements/two_jobs.json",
                           "File the figures are written to.")

_GRACE_NS = 1_000_000_000  # from the request to the start: every rank must be waiting by then
_STAY_STEPS = 150  # of the job that stays, after the other has left


class Bench:
  """Two jobs that are ready, and where their runs are recorded."""

  def __init__(self, lab: Lab, ready: dict[str, jobs.TrainingJob], root: pathlib.Path):
    self.lab, self.jobs, self.root = lab, ready, root
    self._count = 0

  def run(self, pacer: str, steps: dict[str, int], seed: int,
          offset: float = 0.0) -> list[timeline.Timeline]:
    """Runs jobs side by side.

    Args:
      pacer: of all of them.
      steps: of each job that takes part, in the order of their starts.
      seed: of the compute times.
      offset: s from one job's start to the next one's.

    Returns:
      A timeline for each.
    """
    self._count += 1
    places = {job: self.root / f"{self._count}-{job}" for job in steps}
    start = time.monotonic_ns() + _GRACE_NS
    for number, (job, count) in enumerate(steps.items()):
      self.jobs[job].begin(Run(str(places[job]), count, pacer, start + round(1e9 * offset * number),
                               seed))
    for job, count in steps.items():
      self.jobs[job].finish(timeout=60 + 1.0 * count)
    return [timeline.read(place) for place in places.values()]


def repeat(bench: Bench, number: int, seed: int, period: float) -> dict[str, Any]:
  """One repetition: the same start offset and compute times with and without control, in random
  order.

  Args:
    bench: the two jobs.
    number: of the repetition; even ones run the first job alone, odd ones the second.
    seed: of this repetition.
    period: s, of a job alone; the offset is drawn from it.
  """
  draw = random.Random(seed)
  offset = draw.random() * period
  first, second = bench.jobs
  both, alone = ({first: _steps.value, second: _steps.value},
                 {(first, second)[number % 2]: _alone_steps()})
  plans = {"none": ("none", both), "interleave": (_rule.value, both), "alone_none": ("none", alone),
           "alone_interleave": (_rule.value, alone)}
  order = draw.sample(list(plans), len(plans))
  found: dict[str, Any] = {"offset_ms": round(1e3 * offset, 3), "order": order, "seed": seed,
                           "load_average": round(os.getloadavg()[0], 2)}
  for kind in order:
    pacer, steps = plans[kind]
    lines = bench.run(pacer, steps, seed, offset)
    found[kind] = two_jobs_figures.of_run(lines, _settle.value if len(steps) > 1 else 0)
  return found


def leave(bench: Bench, seed: int, period: float) -> dict[str, Any]:
  """Both jobs are paced; then the second one ends."""
  first, second = bench.jobs
  before = max(_steps.value // 2, 20)
  stays, leaves = bench.run(_rule.value, {first: before + _STAY_STEPS, second: before}, seed,
                            random.Random(seed).random() * period)
  return two_jobs_figures.of_leave(stays, float(leaves.ends[-1]))


def _alone_steps() -> int:
  return _alone.value or max(_steps.value // 4, 20)


def _measure(congestion: str, figures: dict[str, Any], out: pathlib.Path) -> None:
  """All repetitions with one congestion control, written to `out` after each."""
  config = _CONFIG.value.copy_and_resolve_references()
  with config.unlocked():
    config.congestion = "" if congestion == "default" else congestion
  work = Work(config.compute_ms, config.jitter, config.gradient_kb, config.buckets)
  with tempfile.TemporaryDirectory() as root, Lab(config) as lab:
    if len(lab.topology.jobs) != 2:
      raise ConfigError(
          f"This experiment is about two jobs; the config has {len(lab.topology.jobs)}.")
    hosts = jobs.hosts_of(lab.topology, next(iter(lab.topology.jobs)))
    path = lab.measure(hosts[0], hosts[-1])
    with jobs.training(lab, list(lab.topology.jobs), work, pathlib.Path(root)) as ready:
      bench = Bench(lab, ready, pathlib.Path(root))
      first = bench.run("none", {next(iter(ready)): _alone_steps()}, config.seed)
      period = 1e-3 * two_jobs_figures.of_run(first, 0)["mean_ms"]
      floor = [round(float(value), 6) for value in np.median(first[0].transfers, axis=0)]
      for job in ready.values():
        job.prepare(_rule.value, {"floor": floor} if _floor.value == "measured" else {})
      here: dict[str, Any] = {
          **measured.circumstances("experiments.labs.fabric.two_jobs"),
          "config": json.loads(config.to_json_best_effort()),
          "congestion": path.congestion, "trunk": vars(path), "plan": ready[next(iter(ready))].plan,
          "rule": _rule.value, "steps": _steps.value, "alone_steps": _alone_steps(),
          "settle": _settle.value, "floor": floor if _floor.value == "measured" else None,
          "repetitions": [], "leaves": []}
      figures.setdefault("by_congestion", {})[congestion] = here
      for number in range(_runs.value):
        before = lab.counters()
        seed = 1000 * config.seed + number
        repetition = repeat(bench, number, seed, period)
        dropped = {name: selected["drops"] - before[name]["drops"]
                   for name, selected in lab.counters().items()}
        repetition["drops"] = {name: count for name, count in dropped.items() if count}
        here["repetitions"].append(repetition)
        here["summary"] = two_jobs_figures.summary(here["repetitions"])
        _write(figures, out)
        _tell(f"{congestion}: {number + 1} of {_runs.value}", repetition)
      for number in range(_leaves.value):
        here["leaves"].append(leave(bench, 500 + 1000 * config.seed + number, period))
        _write(figures, out)
        print(f"{congestion}: one job left, the other was held back for "
              f"{here['leaves'][-1]['disengaged_after']} more steps", file=sys.stderr, flush=True)


def _write(figures: dict[str, Any], out: pathlib.Path) -> None:
  """Writes the figures whole or not at all: whatever kills the program, what was measured is
  kept."""
  out.parent.mkdir(parents=True, exist_ok=True)
  for path, text in ((out, json.dumps(figures, indent=1)),
                     (out.with_suffix(".md"),
                      "\n".join(two_jobs_tables.markdown(figures)).rstrip("\n"))):
    new = path.with_name(path.name + ".new")
    new.write_text(text + "\n")
    new.replace(path)


def _tell(what: str, repetition: dict[str, Any]) -> None:
  kinds = ("alone_none", "alone_interleave", "none", "interleave")
  print(f"{what}: " + ", ".join(f"{kind} {repetition[kind]['mean_ms']:.2f}" for kind in kinds)
        + " ms",
        file=sys.stderr, flush=True)


def main(argv: list[str]) -> None:
  if len(argv) > 1:
    raise app.UsageError(f"Unknown arguments: {' '.join(argv[1:])}")
  if _settle.value + 20 > _steps.value:
    raise app.UsageError(
        f"--settle={_settle.value} leaves too little of --steps={_steps.value}: leave 20 at least.")
  out = pathlib.Path(_out.value)
  figures: dict[str, Any] = json.loads(out.read_text()) if out.exists() else {}
  try:
    for congestion in _congestion.value:
      _measure(congestion, figures, out)
  except (ConfigError, LabError) as error:
    sys.exit(f"two_jobs: {error}")
  print(f"Written to {out} and {out.with_suffix('.md')}.")


if __name__ == "__main__":
  app.run(main)
