"""Checkpoints and restarts: what a job takes when its nodes fail now and then.

A segment is the work from one checkpoint to the next, the checkpoint included. A failure throws the
job back to the last checkpoint; it restarts and tries the segment again. Failures come at a
constant rate, and none strikes during a restart: then the expected time of a segment is (1 / rate +
restart) (exp(rate (work + checkpoint)) - 1), Daly, "A higher order estimate of the optimum
checkpoint interval for restart dumps" (2006).
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np


class Failures(NamedTuple):
  """How a job fails and recovers."""

  rate: float  # failures a second, of the whole job: nodes / MTBF of one
  every: int  # steps from one checkpoint to the next
  checkpoint: float  # s that a checkpoint takes
  restart: float  # s from a failure to the first step after it


class Survived(NamedTuple):
  """A run with failures. Seconds; G segments."""

  elapsed: float
  work: float  # of it, steps that lasted
  checkpoints: float  # of it, checkpoints that were completed
  lost: float  # of it, work and checkpoints that failures threw away
  restarts: float  # of it, restarting
  failures: int
  segments: np.ndarray  # [G] s, each segment until it was done


def survive(step_times: np.ndarray, failures: Failures, seed: int) -> Survived:
  """Plays a run's steps with failures.

  A segment that is tried again takes as long as the first time: the steps are the same.

  Args:
    step_times: [K] s.
    failures: rate, interval, costs.
    seed: of the failures.
  """
  steps = np.asarray(step_times, np.float64)
  begins = np.arange(0, len(steps), failures.every)
  work = np.add.reduceat(steps, begins) if len(steps) else np.zeros(0)
  random = np.random.default_rng(seed)
  need = work + failures.checkpoint
  # Attempts that fail before the one that doesn't: geometric, since failures forget. How long each:
  # exponential, cut.
  chance = -np.expm1(-failures.rate * need)
  count = (random.geometric(np.clip(1 - chance, 1e-12, 1)) - 1 if failures.rate > 0
           else np.zeros(len(need), np.int64))
  which = np.repeat(np.arange(len(need)), count)
  until = (-np.log1p(-random.random(len(which)) * chance[which]) / failures.rate if len(which)
           else np.zeros(0))
  wasted = np.bincount(which, until, minlength=len(need))
  segments = need + wasted + count * failures.restart
  return Survived(float(segments.sum()), float(work.sum()), len(need) * failures.checkpoint,
                  float(wasted.sum()), float(count.sum()) * failures.restart, int(count.sum()),
                  segments)


def expected(work: float, failures: Failures) -> float:
  """Expected seconds of a segment of `work` seconds (Daly 2006, equation 13 without its
  approximations).

  >>> round(expected(3600.0, Failures(rate=1 / 86400, every=1, checkpoint=60.0, restart=300.0)), 1)
  3751.6
  """
  return ((1 / failures.rate + failures.restart)
          * math.expm1(failures.rate * (work + failures.checkpoint)))


def best_interval(checkpoint: float, mtbf: float) -> float:
  """Seconds of work between checkpoints that cost least, to first order: sqrt(2 C MTBF) (Young
  1974).

  >>> best_interval(50.0, 10_000.0)
  1000.0
  """
  return math.sqrt(2 * checkpoint * mtbf)
