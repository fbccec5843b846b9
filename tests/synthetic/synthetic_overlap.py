"""Synthetic runs of a job that computes while it sends: what is exposed and hidden is known.

Each rank's backward pass makes one bucket after the other and goes on without waiting. The buckets
go over one channel in their order, each once all ranks have entered it; when the last one is over
the next step begins. Ranks leave a bucket together.
"""

from __future__ import annotations

import dataclasses
import pathlib
from typing import NamedTuple

import numpy as np

from tests.synthetic.synthetic_groups import write_timestamps

_NS = 1e9


@dataclasses.dataclass(frozen=True)
class OverlappingJob:
  """What the ranks do. Durations in seconds."""

  ranks: int = 4
  steps: int = 60
  buckets: int = 4
  forward: float = 10e-3
  backward: float = 20e-3
  transfer: float = 7e-3
  """Of each bucket."""
  tail: float = 0.0
  """What is computed behind the last bucket's entry, needed by none."""
  noise: float = 0.0
  """Standard deviation of forward and backward, as a share of themselves."""
  seed: int = 0


class OverlapTruth(NamedTuple):
  """The job as it really was. B buckets, R ranks, K steps; int64 ns."""

  enter: np.ndarray  # [B, R, K]
  exit: np.ndarray  # [B, R, K]
  exposed: np.ndarray  # [R, K] nothing is computed, and a bucket is under way
  hidden: np.ndarray  # [R, K] something is computed, and a bucket is under way


def simulate(job: OverlappingJob) -> OverlapTruth:
  """Plays the job."""
  random = np.random.default_rng(job.seed)
  shape = job.buckets, job.ranks, job.steps
  enter, leave = np.empty(shape, np.int64), np.empty(shape, np.int64)
  exposed, hidden = np.empty(shape[1:], np.int64), np.empty(shape[1:], np.int64)
  transfer, now = round(job.transfer * _NS), 0
  for k in range(job.steps):
    slower = np.maximum(1 + job.noise * random.standard_normal(job.ranks), 0.1)
    done = np.arange(1, job.buckets + 1)[:, None] / job.buckets
    begin = now
    enter[..., k] = begin + np.rint((job.forward + job.backward * done) * slower * _NS)
    for b in range(job.buckets):
      now = max(now, int(enter[b, :, k].max())) + transfer
      leave[b, :, k] = now
    stop = np.minimum(enter[-1, :, k] + round(job.tail * _NS), now)
    exposed[:, k] = now - stop
    for r in range(job.ranks):
      hidden[r, k] = _covered(enter[:, r, k], leave[:, r, k], int(stop[r]))
  return OverlapTruth(enter, leave, exposed, hidden)


def _covered(enter: np.ndarray, leave: np.ndarray, stop: int) -> int:
  """How much of the time up to `stop` lies within any of the stretches."""
  covered, reached = 0, 0
  for begin, end in sorted(zip(enter.tolist(), leave.tolist(), strict=True)):
    begin, end = max(begin, reached), min(end, stop)
    covered += max(end - begin, 0)
    reached = max(reached, end)
  return covered


def write(directory: str | pathlib.Path, job: OverlappingJob) -> OverlapTruth:
  """Writes the job as a process for each rank would have recorded it; returns the truth."""
  truth = simulate(job)
  write_timestamps(directory, truth.enter, truth.exit,
                   collectives=[{"name": f"bucket {b}"} for b in range(job.buckets)])
  return truth
