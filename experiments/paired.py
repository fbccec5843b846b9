"""Paired, interleaved timing of alternatives in one run, and what it is worth: medians and intervals, never one number.

These figures are for noisy machines: the alternatives take turns in short blocks, in an order drawn anew each
round, and only ratios and differences within a round are used.
"""

from __future__ import annotations

import dataclasses
import math
import random
import time
from collections.abc import Callable, Mapping

import numpy as np


@dataclasses.dataclass(frozen=True)
class Estimate:
  """A median with its 95 % bootstrap interval."""

  median: float
  low: float
  high: float

  def scaled(self, factor: float) -> Estimate:
    return Estimate(self.median * factor, self.low * factor, self.high * factor)

  def to_json(self) -> list[float]:
    """[median, low, high], six significant digits."""
    return [float(f"{value:.6g}") for value in (self.median, self.low, self.high)]


def estimate(values: np.ndarray, seed: int = 0) -> Estimate:
  """Median of values [n] and the percentile bootstrap's 95 % interval of it."""
  values = np.asarray(values, np.float64)
  rng = np.random.default_rng(seed)
  medians = np.median(rng.choice(values, (2000, len(values))), axis=1)
  low, high = np.percentile(medians, [2.5, 97.5])
  return Estimate(float(np.median(values)), float(low), float(high))


def ratio_of_means(values: np.ndarray, base: np.ndarray, seed: int = 0) -> Estimate:
  """mean(values) / mean(base) with its 95 % bootstrap interval over rounds: [rounds], [rounds] of the same rounds."""
  rounds = np.random.default_rng(seed).integers(0, len(base), (2000, len(base)))
  low, high = np.percentile(values[rounds].mean(axis=1) / base[rounds].mean(axis=1), [2.5, 97.5])
  return Estimate(float(values.mean() / base.mean()), float(low), float(high))


def rounds_needed(found: Estimate, rounds: int, margin: float) -> int:
  """Rounds with which four runs in five would show that what has no effect is no worse than `margin`.

  The interval's upper end must stay below the margin: 1.96 + 0.84 standard errors within it, so a half-width of 0.7 of
  it; widths go with the root of the rounds.

  Args:
    found: in the unit of `margin`, from `rounds` rounds.
    rounds: those it came from.
    margin: above no effect.
  """
  half = (found.high - found.low) / 2
  return math.ceil(rounds * (half / (1.96 / (1.96 + 0.84) * margin)) ** 2)


def interleave(blocks: Mapping[str, Callable[[], float]], rounds: int, seed: int = 0,
               progress: Callable[[int], None] | None = None) -> dict[str, np.ndarray]:
  """Runs every block once a round, in random order, and collects what they return.

  Args:
    blocks: by name; each returns its own figure (seconds a step, say).
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
