"""Two jobs of any periods on one trunk, over real TCP: what it costs them to share, and what
`take_turns` gives back.

    python -m experiments.labs.fabric.turns                                  # some 16 minutes
    python -m experiments.labs.fabric.turns --ratios=1.13 --runs=2 --out=/tmp/turns.json

For each ratio of periods, and each of so many random starts: both jobs without control, both taking
turns, the first alone of the two taking turns, in random order, from the same offset and with the
same compute times; and one job alone on the trunk, without control and with. At last one job leaves
the other. Writes docs/measurements/turns_tcp.json and .md after every start, and adds to what is
there. Needs root, see experiments/labs/fabric/lab.py.
"""

from __future__ import annotations

import json
import os
import pathlib
import random
import sys
import tempfile
import time
from typing import Any

from absl import app, flags
from ml_collections import config_flags

from experiments.labs.fabric import jobs, timeline
from experiments.labs.fabric.lab import Lab
from experiments.labs.fabric.machine import LabError
from experiments.labs.fabric.topology import ConfigError
from experiments.labs.fabric.trainer import Run, Work
from experiments.labs.fabric.turns_figures import ARMS, of_leave, of_run, page, summary
from experiments.lib import measured

_CONFIG = config_flags.DEFINE_config_file("config", "configs/fabric.py", "The lab.",
                                          lock_config=True)
_ratios = flags.DEFINE_list("ratios", ["1.0", "1.13", "1.3"],
                            "Period of the second job, as a multiple of the first's.")
_runs = flags.DEFINE_integer("runs", 4, "Random starts of each ratio.", lower_bound=1)
_steps = flags.DEFINE_integer("steps", 160, "Of each run of two jobs.", lower_bound=40)
_settle = flags.DEFINE_integer("settle", 60, "Steps at the start that don't count.", lower_bound=0)
_alone = flags.DEFINE_integer("alone_steps", 60, "Of each run of one job.", lower_bound=20)
_buckets = flags.DEFINE_integer("buckets", 8, "Of the gradient.", lower_bound=1)
_gradient = flags.DEFINE_float("gradient_kb", 600, "All buckets together, KB.", lower_bound=1)
_compute = flags.DEFINE_float("compute_ms", 60, "Of the first job's steps.", lower_bound=1)
_learn = flags.DEFINE_integer("learn", 12,
                              "Of take_turns: steps over which the cost of sharing is measured.")
_trial = flags.DEFINE_integer("trial", 16, "Of take_turns: steps of its trial.")
_congestion = flags.DEFINE_string("congestion", "cubic", "TCP congestion control.")
_seed = flags.DEFINE_integer("seed", 0, "Of starts and compute times; goes on with each start.")
_leave = flags.DEFINE_bool("leave", True, "Whether one job leaves the other at last.")
_out = flags.DEFINE_string("out", "docs/measurements/turns_tcp.json",
                           "File the figures are written to.")

_GRACE_NS = 700_000_000
_AFTER = 70  # steps of the job that stays


class Bench:
  """Two jobs that are ready, and where their runs are recorded."""

  def __init__(self, ready: dict[str, jobs.TrainingJob], root: pathlib.Path):
    self.jobs, self.root, self._count = ready, root, 0

  def run(self, pacers: dict[str, str], steps: dict[str, int], seed: int, offset: float = 0.0
          ) -> list[timeline.Timeline]:
    """Runs jobs side by side, `offset` s from one start to the next; a timeline for each."""
    self._count += 1
    places = {job: self.root / f"{self._count}-{job}" for job in pacers}
    start = time.monotonic_ns() + _GRACE_NS
    for number, (job, pacer) in enumerate(pacers.items()):
      self.jobs[job].begin(Run(str(places[job]), steps[job], pacer,
                               start + round(1e9 * offset * number), seed))
    for job in pacers:
      self.jobs[job].finish(timeout=60 + 1.0 * steps[job])
    return [timeline.read(place) for place in places.values()]


def _start(bench: Bench, ratio: str, seed: int, period: float, works: dict[str, Work],
           alone_ms: dict[str, float]
           ) -> dict[str, Any]:
  """One random start, all arms from it."""
  draw = random.Random(seed)
  first, second = works
  offset = draw.random() * period
  found: dict[str, Any] = {"offset_ms": round(1e3 * offset, 3), "seed": seed,
                           "load_average": round(os.getloadavg()[0], 2)}
  steps = {first: round(_steps.value * float(ratio)), second: _steps.value}
  for arm in draw.sample(list(ARMS), len(ARMS)):
    found[arm] = of_run(bench.run(dict(zip(works, ARMS[arm], strict=True)), steps, seed, offset),
                        _settle.value)
  found["alone"] = {pacer: of_run(bench.run({first: pacer}, {first: _alone.value}, seed), 4)
                    for pacer in draw.sample(["none", "turns"], 2)}
  found["alone_of"] = [alone_ms[job] for job in works]
  return found


def _measure(ratio: str, figures: dict[str, Any], out: pathlib.Path) -> None:
  config = _CONFIG.value.copy_and_resolve_references()
  with config.unlocked():
    config.congestion = _congestion.value
  with tempfile.TemporaryDirectory() as root, Lab(config) as lab:
    transfer = 8 * _gradient.value / config.trunk_mbit  # ms
    names = list(lab.topology.jobs)
    other = float(ratio) * (_compute.value + transfer) - transfer
    works = {name: Work(compute, config.jitter, _gradient.value, _buckets.value)
             for name, compute in zip(names, (_compute.value, other), strict=True)}
    ready: dict[str, jobs.TrainingJob] = {}
    try:
      for name, work in works.items():
        ready[name] = jobs.TrainingJob(lab, name, work, pathlib.Path(root))
      for job in ready.values():
        job.prepare("none")
        job.prepare("turns", {"learn": _learn.value, "trial": _trial.value})
      bench = Bench(ready, pathlib.Path(root))
      alone_ms = {name: of_run(bench.run({name: "none"}, {name: _alone.value}, 1), 4)["mean_ms"][0]
                  for name in names}
      print(f"{ratio}: alone {alone_ms}", file=sys.stderr, flush=True)
      here = figures["by_ratio"].setdefault(ratio, {"starts": [], "leaves": []})
      for _ in range(_runs.value):
        seed = _seed.value + len(here["starts"])
        here["starts"].append(_start(bench, ratio, seed, 1e-3 * alone_ms[names[0]], works,
                                     alone_ms))
        here["summary"] = summary(here["starts"])
        measured.write(figures, page(figures), out)
        last = here["starts"][-1]
        print(f"{ratio}: " + ", ".join(f"{arm} {last[arm]['mean_ms']} cv {last[arm]['cv']}"
                                       for arm in ARMS),
              file=sys.stderr, flush=True)
      if _leave.value:
        steps = dict(zip(names, (_steps.value + _AFTER, _steps.value), strict=True))
        stays, leaves = bench.run(dict.fromkeys(names, "turns"), steps, 77)
        here["leaves"].append(of_leave(stays, float(leaves.ends[-1])))
        measured.write(figures, page(figures), out)
    finally:
      for job in ready.values():
        job.close()


def main(argv: list[str]) -> None:
  if len(argv) > 1:
    raise app.UsageError(f"Unknown arguments: {' '.join(argv[1:])}")
  out = pathlib.Path(_out.value)
  setting = {"trunk_mbit": _CONFIG.value.trunk_mbit, "congestion": _congestion.value,
             "steps": _steps.value, "settle": _settle.value, "buckets": _buckets.value,
             "gradient_kb": _gradient.value, "compute_ms": _compute.value, "learn": _learn.value,
             "trial": _trial.value, "priority": "with precedence on a machine in use"
             if os.sched_getscheduler(0) != os.SCHED_OTHER
             else "without precedence"}
  before: dict[str, Any] = json.loads(out.read_text()) if out.is_file() else {}
  same = all(before.get(name) == value for name, value in setting.items())
  figures = measured.circumstances("experiments.labs.fabric.turns") | setting | {
      "by_ratio": before["by_ratio"] if same else {}}
  try:
    for ratio in _ratios.value:
      _measure(ratio, figures, out)
  except (ConfigError, LabError) as error:
    sys.exit(f"turns: {error}")


if __name__ == "__main__":
  app.run(main)
