"""Where the level of a series changes: change-points by optimal partitioning, against noise
measured on the series.

Exact least squares over all partitions (Jackson et al. 2005, An algorithm for optimal partitioning
of data on an interval; PELT, Killick et al. 2012, finds the same partitions), for many series at
once. A further change-point has to lower the sum of squares by `penalty` long-run variances of the
noise. The variance is taken from differences of neighbouring means over 1, 2, 4, ... blocks,
whichever says most: noise that wanders is then no change of level, and a change of level, which few
of the differences see, is no noise.
"""

from __future__ import annotations

import math

import numpy as np

# docs/measurements/change_alarms.md has what they do; the rest chosen by hand.
FALSE_ALARM = 0.01
"""Chance that a job of quiet ranks gets any change-point at all, for Gaussian noise; measured in
tests."""
SHORTEST = 4
"""Blocks between two change-points, at least: what is over sooner is a pause, not a change."""
_OUTLIER = 4.0
_AT_A_TIME = 256


def change_points(series: np.ndarray, tests: int | None = None) -> list[list[int]]:
  """Finds where each series' level changes.

  Args:
    series: [S, B] means over blocks of neighbouring steps; NaN, where a series has no data, is
      filled from its left.
    tests: series looked at together, if these are not all.

  Returns:
    For every series the first blocks of its new levels, rising; empty where it stays.
  """
  number, blocks = series.shape
  found: list[list[int]] = [[] for _ in range(number)]
  if blocks < 2 * SHORTEST:
    return found
  penalty = 2 * math.log(max(tests or number, 1) * blocks / FALSE_ALARM)
  for begin in range(0, number, _AT_A_TIME):
    part = _tame(_filled(series[begin:begin + _AT_A_TIME]))
    noise = long_run_deviation(part)
    # Where even the largest sensible step is lost in noise there is nothing to look for.
    some = np.flatnonzero(np.ptp(part, axis=1) > 0)
    if some.size:
      scaled = (part[some] / np.maximum(noise[some],
                                        1e-9 * np.abs(part[some]).max(axis=1) + 1e-300)[:, None])
      for i, points in zip(some, _partition(scaled, penalty), strict=True):
        found[begin + i] = points
  return found


def long_run_deviation(series: np.ndarray) -> np.ndarray:
  """[S] standard deviation that one block would have, were blocks independent and means over many
  as noisy as they are.

  Args:
    series: [S, B].
  """
  blocks, width, most = series.shape[1], 1, np.zeros(len(series))
  while blocks // width >= 12 or width == 1:
    usable = blocks // width * width
    means = series[:, :usable].reshape(len(series), -1, width).mean(axis=2)
    # Few differences may all be small by chance.
    most = np.maximum(most,
                      _deviation(means) * math.sqrt(width) * (1 + 2 / math.sqrt(means.shape[1])))
    width *= 2
  return most


def without_outages(series: np.ndarray) -> np.ndarray:
  """[S, B] with single blocks cut that stick out of their neighbourhood; NaN stays.

  A second in which a host stood still is a hundred times what a late rank adds to a block, and one
  block of it would hide that rank from any test by the spread of its blocks.

  Args:
    series: [S, B].
  """
  known = np.isfinite(series)
  return (np.where(known, _tame(_filled(series)), np.nan) if series.shape[1] >= 2 * SHORTEST
          else series)


def _deviation(series: np.ndarray) -> np.ndarray:
  """[S] standard deviation of independent values around a level that changes now and then."""
  steps = np.diff(series, axis=1)
  # 0.6745: the median of |normal|; a difference of two values has twice the variance of one.
  return (np.median(np.abs(steps - np.median(steps, axis=1, keepdims=True)), axis=1) / 0.6745
          / math.sqrt(2))


def _filled(series: np.ndarray) -> np.ndarray:
  """Without NaN: the last known value goes on, the first known one before that; 0 where nothing is
  known."""
  known = np.isfinite(series)
  if known.all():
    return series
  at = np.maximum.accumulate(np.where(known, np.arange(series.shape[1]), -1), axis=1)
  first = known.argmax(axis=1)
  filled = np.take_along_axis(series, np.where(at < 0, first[:, None], at), axis=1)
  return np.where(np.isfinite(filled), filled, 0.0)


def _tame(series: np.ndarray) -> np.ndarray:
  """Cuts single blocks that stick out of their neighbourhood: a pause, however long, is no
  level."""
  padded = np.pad(series, ((0, 0), (2, 2)), mode="edge")
  around = np.median(np.lib.stride_tricks.sliding_window_view(padded, 5, axis=1), axis=2)
  bound = _OUTLIER * _deviation(series)[:, None]
  return np.clip(series, around - bound, around + bound)


def _partition(series: np.ndarray, penalty: float) -> list[list[int]]:
  """Best partitions of [S, B] series of unit variance: least squared deviation from means, plus a
  price a piece."""
  number, blocks = series.shape
  series = series - series.mean(axis=1, keepdims=True)
  zero = np.zeros((number, 1))
  total = np.concatenate([zero, np.cumsum(series, axis=1)], axis=1)
  square = np.concatenate([zero, np.cumsum(series**2, axis=1)], axis=1)
  best = np.full((number, blocks + 1), np.inf)
  best[:, 0] = -penalty
  came = np.zeros((number, blocks + 1), np.int64)
  for end in range(SHORTEST, blocks + 1):
    begin = np.arange(0, end - SHORTEST + 1)
    rest = (square[:, end, None] - square[:, begin]
            - (total[:, end, None] - total[:, begin])**2 / (end - begin))
    cost = best[:, begin] + rest + penalty
    came[:, end] = cost.argmin(axis=1)
    best[:, end] = cost.min(axis=1)
  result = []
  for row in range(number):
    points, at = [], int(came[row, blocks])
    while at > 0:
      points.append(at)
      at = int(came[row, at])
    result.append(points[::-1])
  return result
