"""Paired, interleaved timing of alternatives in one run, and what it is worth: intervals, never one
number.

These figures are for noisy machines: the alternatives take turns in short blocks, in an order drawn
anew each round, and only ratios and differences within a round are used.

Intervals are 95 % and Student's, over rounds: a percentile bootstrap over 3 to 12 of them holds the
truth in 73 to 94 % of the cases (docs/measurements/intervals.md).
"""

from __future__ import annotations

import dataclasses
import math
import random
import time
from collections.abc import Callable, Mapping

import numpy as np
from scipy import stats

METHOD = "student"
"""What the intervals of a file are, as `measured.circumstances` writes it down. Without: a
percentile bootstrap."""


@dataclasses.dataclass(frozen=True)
class Estimate:
  """A figure with its 95 % interval."""

  value: float
  low: float
  high: float
  rounds: int = 0
  """That it comes from; 0 where that isn't known."""

  def to_json(self) -> list[float]:
    """[value, low, high], six significant digits."""
    return [float(f"{value:.6g}") for value in (self.value, self.low, self.high)]


def estimate(values: np.ndarray) -> Estimate:
  """Mean of values [n], one a round, and Student's interval of it; from one round the interval is
  without end."""
  values = np.asarray(values, np.float64)
  return _student(float(values.mean()), values)


def median_of_many(values: np.ndarray) -> Estimate:
  """Median of values [n] and its interval, whatever they are distributed like: two of the values
  themselves.

  For many values that are no rounds (steps), a few of which are pauses that decide a mean. Of fewer
  than 6 values no two enclose the median in 95 % of the cases: the interval is without end.
  """
  values = np.sort(np.asarray(values, np.float64))
  if len(values) < 6:
    return Estimate(float(np.median(values)), -math.inf, math.inf, len(values))
  below = int(stats.binom.ppf(0.025, len(values), 0.5)) - 1
  # The interval from value `below` to the one as far from the other end misses with 2 P(fewer than
  # `below` + 1 below).
  below = max(below, 0)
  return Estimate(float(np.median(values)), float(values[below]), float(values[-1 - below]),
                  len(values))


def ratio_of_means(values: np.ndarray, base: np.ndarray) -> Estimate:
  """mean(values) / mean(base) with Student's interval over rounds: [rounds], [rounds] of the same
  rounds."""
  values, base = np.asarray(values, np.float64), np.asarray(base, np.float64)
  ratio = float(values.mean() / base.mean())
  # How a round moves the ratio, to first order: the means are of many steps, so rounds differ by
  # little.
  return _student(ratio, ratio + (values - ratio * base) / base.mean())


def _student(value: float, each: np.ndarray) -> Estimate:
  count = len(each)
  half = math.inf
  if count > 1 and np.isfinite(each).all():
    half = float(stats.t.ppf(0.975, count - 1) * each.std(ddof=1) / math.sqrt(count))
  return Estimate(value, value - half, value + half, count)


def rounds_needed(found: Estimate, rounds: int, margin: float) -> int:
  """Rounds with which four runs in five would show that what has no effect is no worse than
  `margin`.

  The interval's upper end must stay below the margin: 1.96 + 0.84 standard errors within it, so a
  half-width of 0.7 of it; widths go with the root of the rounds.

  Args:
    found: in the unit of `margin`, from `rounds` rounds; its width is Student's for so many.
    rounds: those it came from.
    margin: above no effect.
  """
  # Of the many rounds that it takes, the interval is a normal one.
  half = ((found.high - found.low) / 2 * (1.96 / float(stats.t.ppf(0.975, rounds - 1)) if rounds > 1
                                          else 1.0))
  return (math.ceil(rounds * (half / (1.96 / (1.96 + 0.84) * margin)) ** 2) if math.isfinite(half)
          else 0)


def interleave(blocks: Mapping[str, Callable[[], float]], rounds: int, seed: int = 0,
               progress: Callable[[int], None] | None = None) -> dict[str, np.ndarray]:
  """Runs every block once a round, in random order, and collects what they return.

  Args:
    blocks: by name; each returns its own figure (seconds per step, say).
    rounds: times each is run.
    seed: of the order.
    progress: called with the number of rounds done.

  Returns:
    [rounds] of figures by name; entry k of all of them is from the same round.
  """
  order = random.Random(seed)
  figures: dict[str, list[float]] = {name: [] for name in blocks}
  for done in range(rounds):
    for name in order.sample(list(blocks), len(blocks)):
      figures[name].append(blocks[name]())
    if progress is not None:
      progress(done + 1)
  return {name: np.asarray(values) for name, values in figures.items()}


def seconds_each(call: Callable[[], object], times: int) -> float:
  """Mean seconds of one of `times` calls."""
  start = time.perf_counter()
  for _ in range(times):
    call()
  return (time.perf_counter() - start) / times
