"""How TCP shares a trunk between two jobs: who loses how much, by how far the one is ahead of the
other.

    python -m experiments.labs.fabric.attraction                       # cubic, bbr and reno: about four minutes

No control: two jobs start at given offsets, and entry and exit of every step's collectives say how
the offset goes on (all hosts of a lab share one monotonic clock; nothing outside of experiments may
compare two jobs' clocks). Where two steps overlap the change of the lead is the follower's
communication time less the leader's. Under equal sharing it is 0. The fluid model that is fitted
gives a sender of which the share s of its collective is sent the weight 1 + b (1 - s): those that
have just begun get more. Writes docs/measurements/attraction.json and .md.
"""  # noqa: E501

from __future__ import annotations

import json
import pathlib
import sys
import tempfile
import time
from typing import Any, NamedTuple

import numpy as np
from absl import app, flags
from ml_collections import config_flags

from experiments.labs.fabric import jobs
from experiments.labs.fabric.lab import Lab
from experiments.labs.fabric.machine import LabError
from experiments.labs.fabric.topology import ConfigError
from experiments.labs.fabric.trainer import Run, Work
from experiments.lib import measured
from jaxpace.trace.reader import read_run
from jaxpace.trace.run import MISSING

FLAGS = flags.FLAGS

_FIRST = 2  # steps at the start that don't count
_START_NS = 1_000_000_000
_SLICES = 500  # of a collective, in the model


class Stretch(NamedTuple):
  """When one job sent, in each of its steps."""

  begin: np.ndarray  # [K] float64 s, all ranks have entered the first collective
  end: np.ndarray  # [K] float64 s, the last one's end, mean over ranks


def read(directory: str | pathlib.Path) -> Stretch:
  """Reads when a recorded job sent."""
  run = read_run(directory)
  enter, leave = run.collectives[0].enter_ns, run.collectives[-1].exit_ns
  known = np.all((enter != MISSING) & (leave != MISSING), axis=0)
  return Stretch(1e-9 * enter[:, known].max(axis=0).astype(np.float64),
                 1e-9 * leave[:, known].mean(axis=0).astype(np.float64))


def meetings(one: Stretch, other: Stretch) -> np.ndarray:
  """Steps of two jobs that overlap.

  Returns:
    [N, 3] s: by how much the leader began before the follower, how long the leader's collectives
    took, and the follower's.
  """
  found = []
  for leader, follower in ((one, other), (other, one)):
    for k in range(_FIRST, len(leader.begin)):
      at = int(np.searchsorted(follower.begin, leader.begin[k]))
      if _FIRST <= at < len(follower.begin) and follower.begin[at] < leader.end[k]:
        found.append((follower.begin[at] - leader.begin[k], leader.end[k] - leader.begin[k],
                      follower.end[at] - follower.begin[at]))
  return np.asarray(found, np.float64).reshape(-1, 3)


def shared(lead: np.ndarray, work: float, weight: float) -> tuple[np.ndarray, np.ndarray]:
  """The model: how long the leader's and the follower's collectives take.

  Args:
    lead: [N] s.
    work: s, a collective on a quiet link.
    weight: b of 1 + b (1 - share sent).
  """
  sent = np.stack([np.minimum(lead / work, 1.0), np.zeros_like(lead)])
  took = np.stack([np.minimum(lead, work), np.zeros_like(lead)])
  for _ in range(2 * _SLICES + 1):
    sending = sent < 1
    weights = np.where(sending, 1 + weight * (1 - sent), 0.0)
    sent = sent + np.divide(weights, np.maximum(weights.sum(axis=0), 1e-9)) / _SLICES
    took = took + sending * (work / _SLICES)
  return took[0], took[1]


def fit(met: np.ndarray, work: float) -> tuple[float, float]:
  """The weight b with which the model's change of the lead is nearest to what was measured, in
  absolute value.

  Args:
    met: [N, 3] of `meetings`.
    work: s, a collective on a quiet link.

  Returns:
    b, and the mean absolute error of the change of the lead, s.
  """
  use = met[met[:, 0] < work]
  change = use[:, 2] - use[:, 1]
  bins = np.minimum((8 * use[:, 0] / work).astype(int), 7)
  # Every lead counts alike: jobs spend nearly all their steps in step with each other.
  counts = np.bincount(bins, minlength=8)
  each = 1.0 / counts[bins]
  tried = np.arange(0.0, 3.01, 0.05)
  errors = []
  for b in tried:
    first, second = shared(use[:, 0], work, float(b))
    errors.append(float((each * np.abs(second - first - change)).sum() / each.sum()))
  best = int(np.argmin(errors))
  return float(tried[best]), errors[best]


def by_lead(met: np.ndarray, work: float, weight: float) -> list[dict[str, float]]:
  """Means of what was measured, and the model's, in eighths of a collective."""
  rows = []
  for eighth in range(8):
    use = met[(met[:, 0] >= eighth * work / 8) & (met[:, 0] < (eighth + 1) * work / 8)]
    if len(use):
      first, second = shared(use[:, 0], work, weight)
      rows.append({"steps": len(use), "lead_ms": 1e3 * float(use[:, 0].mean()),
                   "leader_ms": 1e3 * float(use[:, 1].mean()),
                   "follower_ms": 1e3 * float(use[:, 2].mean()),
                   "change_ms": 1e3 * float((use[:, 2] - use[:, 1]).mean()),
                   "model_ms": 1e3 * float((second - first).mean())})
  return rows


def measure(algorithm: str) -> dict[str, Any]:
  """All runs with one congestion control."""
  config = FLAGS.config.copy_and_resolve_references()
  with config.unlocked():
    config.congestion = algorithm
  work = Work(config.compute_ms, config.jitter, config.gradient_kb, config.buckets)
  with tempfile.TemporaryDirectory() as root, Lab(config) as lab:
    if len(lab.topology.jobs) != 2:
      raise ConfigError(
          f"This experiment is about two jobs; the config has {len(lab.topology.jobs)}.")
    with jobs.training(lab, list(lab.topology.jobs), work, pathlib.Path(root)) as ready:

      def run(name: str, offset: float, seed: int, who: list[str]) -> list[Stretch]:
        start = time.monotonic_ns() + _START_NS
        for number, job in enumerate(who):
          at = start + round(1e9 * offset * number)
          ready[job].begin(Run(f"{root}/{name}-{job}", FLAGS.steps, "none", at, seed))
        for job in who:
          ready[job].finish(timeout=60 + 1.0 * FLAGS.steps)
        return [read(f"{root}/{name}-{job}") for job in who]

      names = list(ready)
      alone, = run("alone", 0.0, 0, names[:1])
      quiet, period = (float(np.median(alone.end - alone.begin)),
                       float(np.median(np.diff(alone.end))))
      met, ends = [], []
      for number, share in enumerate(float(value) for value in FLAGS.offsets):
        both = run(str(number), share * period, number + 1, names)
        met.append(meetings(*both))
        ends.append({"offset_ms": 1e3 * share * period,
                     "lead_ms": [round(1e3 * float(v), 2) for v in met[-1][:, 0]]})
      every = np.concatenate(met)
      b, error = fit(every, quiet)
      return {"collective_ms": 1e3 * quiet, "period_ms": 1e3 * period, "weight": b,
              "error_ms": 1e3 * error, "by_lead": by_lead(every, quiet, b), "runs": ends}


def page(figures: dict[str, Any]) -> list[str]:
  lines = measured.introduction("How TCP shares a trunk between two jobs", figures)
  lines += [
      "Two jobs without control on the lab's trunk, from several start offsets; means over the "
      "steps in which",
      "they overlap, by how much earlier the leader began to send. Equal sharing would not change "
      "the lead.", ""]
  for name, here in figures["by_congestion"].items():
    lines += [f"## {name}", "", f"A collective alone takes {here['collective_ms']:.1f} ms of a "
                                f"period of {here['period_ms']:.1f} ms. Nearest model: weight 1 + "
                                f"{here['weight']:.2f} (1 - share sent), mean absolute error of "
                                f"the change of the lead {here['error_ms']:.1f} ms.", ""]
    lines += measured.table(
        ["lead, ms", "steps", "leader's collectives, ms", "follower's, ms",
         "change of the lead, ms", "model's, ms"],
        [[round(row[key], 1) for key in ("lead_ms", "steps", "leader_ms", "follower_ms",
                                         "change_ms", "model_ms")]
         for row in here["by_lead"]])
  return lines


def main(argv: list[str]) -> None:
  if len(argv) > 1:
    raise app.UsageError(f"Unknown arguments: {' '.join(argv[1:])}")
  figures: dict[str, Any] = {**measured.circumstances("experiments.labs.fabric.attraction"),
                             "config": json.loads(FLAGS.config.to_json_best_effort()),
                             "by_congestion": {}}
  try:
    for algorithm in FLAGS.congestion:
      figures["by_congestion"][algorithm] = measure(algorithm)
      print(f"{algorithm}: weight {figures['by_congestion'][algorithm]['weight']:.2f}",
            file=sys.stderr, flush=True)
  except (ConfigError, LabError) as error:
    sys.exit(f"attraction: {error}")
  measured.write(figures, page(figures), pathlib.Path(FLAGS.out))


if __name__ == "__main__":
  config_flags.DEFINE_config_file("config", "configs/fabric.py", "The lab and the work of a step.",
                                  lock_config=True)
  flags.DEFINE_list("congestion", "cubic,bbr,reno", "TCP congestion controls, one after the other.")
  flags.DEFINE_list("offsets", "0.1,0.25,0.4,0.5,0.75", "Start offsets, as shares of a period.")
  flags.DEFINE_integer("steps", 120, "Steps of each run.", lower_bound=20)
  flags.DEFINE_string("out", "docs/measurements/attraction.json",
                      "File the figures are written to.")
  app.run(main)
