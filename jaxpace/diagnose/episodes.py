"""When a rank is late: from which block to which, for good or for a while."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from jaxpace.diagnose.limits import CONFIDENCE, EFFECT, TWICE
from jaxpace.diagnose.selected_steps import mean_known, merged, ratio, slices

# Set looking at the fault lab's runs of seeds 0 to 3; measurements/fault_lab_seed4 is what they are
# worth on others.
FEWEST_STEPS = 30
"""A rank that is late for fewer steps than these in a row, and in time before and after, isn't
persistently late: work that wanders from rank to rank stays on each for as long."""


class Episode(NamedTuple):
  """Neighbouring blocks in which one rank is late."""

  rank: int
  begin: int  # first block
  end: int  # one past the last
  steps: int
  lateness: float  # seconds after the typical rank, mean
  confidence: float
  persistence: float  # share of the blocks in which it was late by half of `EFFECT` or more

  def late(self, step_time: float) -> bool:
    """Whether it is surely late there, and by enough to matter."""
    return self.lateness >= EFFECT * step_time and self.confidence >= CONFIDENCE


class Blocks(NamedTuple):
  """Arrivals by block. R ranks, B blocks."""

  # [R, B] mean arrival less the mean over ranks, s; NaN where the rank is not there
  arrival: np.ndarray
  steps: np.ndarray  # [R, B] steps behind each
  eligible: np.ndarray  # [R] ranks that are judged at all
  step_time: float
  # [R, B] `arrival` with single blocks cut that stick out; what ranks are judged by
  usual: np.ndarray
  joined: np.ndarray  # [R] ranks of different numbers never meet and aren't compared

  def mean(self, begin: int, end: int) -> np.ndarray:
    """[R] mean of `usual` over the steps of some blocks; NaN where a rank was not there."""
    values, weights = self.usual[:, begin:end], self.steps[:, begin:end]
    total = np.where(weights > 0, values, 0.0) * weights
    return ratio(total.sum(axis=1), weights.sum(axis=1))

  def typical(self, begin: int, end: int, rank: int) -> np.ndarray:
    """Of the ranks that meet a rank, those between the lower quartile and the lower median of mean
    arrival: half may be late without a shift.

    Args:
      rank: that they are to be compared with.
    """
    mean = self.mean(begin, end)
    known = np.flatnonzero(self.eligible & np.isfinite(mean) & (self.joined == self.joined[rank]))
    order = known[np.argsort(mean[known], kind="stable")]
    return order[(len(order) + 1) // 4:(len(order) - 1) // 2 + 1]

  def test(self, ranks: Sequence[int], begin: int, end: int, tests: int) -> list[Episode]:
    """Tests ranks over some blocks against the typical one, Bonferroni over `tests`.

    Blocks carry the noise, autocorrelated or not: one pause, however long, makes one block late,
    which is nothing persistent.
    """
    values, weights = self.usual[:, begin:end], self.steps[:, begin:end]
    overall = self.mean(begin, end)
    result, part = [], None
    for rank in ranks:
      if part != self.joined[rank]:
        part = int(self.joined[rank])
        typical = self.typical(begin, end, rank)
        level = mean_known(values[typical], axis=0)
      differences = merged(values[rank] - level, weights[rank])
      known = differences[np.isfinite(differences)]
      result.append(Episode(
          rank, begin, end, int(weights[rank].sum()),
          float(overall[rank] - overall[typical].mean()) if typical.size else 0.0,
          confidence(known, tests), float((known >= EFFECT / 2 * self.step_time).mean())
          if known.size else 0.0))
    return result


def find_episodes(blocks: Blocks, steps: int) -> list[Episode]:
  """Finds who is late when.

  Between its own change-points a rank is late or not; neighbouring stretches in which it is late by
  about as much are one episode. A rank that is late over the whole run, though not in stretches of
  it that can be separated, is late throughout.
  """
  size, ranks = blocks.arrival.shape[1], np.flatnonzero(blocks.eligible)
  whole = dict(zip(ranks.tolist(), blocks.test(ranks.tolist(), 0, size, len(ranks)), strict=True))
  found: list[Episode] = []
  for rank, changes in zip(ranks.tolist(), change_points(blocks.arrival[ranks]), strict=True):
    edges = [0, *changes, size]
    spans = list(zip(edges[:-1], edges[1:], strict=True)) if changes else []
    tested = [blocks.test([rank], *span, len(ranks) * len(spans))[0] for span in spans]
    late = [i for i, test in enumerate(tested) if test.late(blocks.step_time)]
    stretches = _as_late(tested, _grown(late, tested, blocks.step_time))
    if not stretches and whole[rank].late(blocks.step_time):
      stretches = [(0, size)]
    own = [blocks.test([rank], begin, end, len(ranks))[0] for begin, end in stretches]
    found += [e for e in own if e.end - e.begin >= min(SHORTEST, size)
              and e.steps >= min(FEWEST_STEPS, steps)]
  return found


def _as_late(tested: Sequence[Episode], late: Sequence[int]) -> list[tuple[int, int]]:
  """Late stretches, those that follow on each other as one unless a rank is much later in one of
  them: then something began or ended there."""
  found: list[tuple[int, int]] = []
  steps = 0
  for i in late:
    begin, end = tested[i].begin, tested[i].end
    less, more = sorted([tested[i - 1].lateness, tested[i].lateness])
    if found and found[-1][1] == begin and (more < TWICE * less or steps < FEWEST_STEPS):
      begin = found.pop()[0]
    else:
      steps = 0
    steps += tested[i].steps
    found.append((begin, end))
  return found


def joined(spans: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
  """Rising spans, those that follow on each other as one.

  >>> joined([(0, 2), (2, 5), (7, 8)])
  [(0, 5), (7, 8)]
  """
  found: list[tuple[int, int]] = []
  for begin, end in spans:
    if found and found[-1][1] == begin:
      begin = found.pop()[0]
    found.append((begin, end))
  return found


def _grown(late: Sequence[int], tested: Sequence[Episode], step_time: float) -> list[int]:
  """The late stretches with their neighbours that are late by half as much, but too short to be
  sure of.

  Such as the one that holds the block in which the level changed.
  """
  grown = set(late)
  for i in late:
    for step in (-1, 1):
      at = i + step
      while 0 <= at < len(tested) and at not in grown and tested[at].lateness >= max(
          0.5 * tested[i].lateness, EFFECT * step_time):
        grown.add(at)
        at += step
  return sorted(grown)


def confidence(values: np.ndarray, tests: int = 1) -> float:
  """One-sided confidence that the mean of `values` is above 0, by Student's t, Bonferroni over
  `tests`."""
  values = values[np.isfinite(values)]
  if len(values) < 3:
    return 0.0
  # Times are whole nanoseconds: a spread below that is rounding, and an exactly constant lateness
  # is certain.
  error = max(float(values.std(ddof=1)) / math.sqrt(len(values)), 1e-10)
  return min(max(1 - tests * (1 - student_cdf(float(values.mean()) / error, len(values) - 1)), 0.0),
             0.9999)


def binomial_tail(least: int, number: int, probability: float) -> float:
  """Probability that at least so many of a number of trials succeed (binomial).

  >>> round(binomial_tail(2, 3, 0.5), 12), binomial_tail(0, 3, 0.5)
  (0.5, 1.0)
  """
  if not 0 < probability < 1:
    return float(probability >= 1 or least <= 0)
  term = math.exp(math.lgamma(number + 1) - math.lgamma(least + 1) - math.lgamma(number - least + 1)
                  + least * math.log(probability) + (number - least) * math.log1p(-probability))
  total = 0.0
  for successes in range(least, number + 1):
    total += term
    term *= (number - successes) / (successes + 1) * probability / (1 - probability)
  return min(1.0, total)


def student_cdf(t: float, n: int) -> float:
  """Distribution function of Student's t with `n` degrees of freedom.

  A finite series for whole `n`: Abramowitz and Stegun, 26.7.3 and 26.7.4.

  >>> round(student_cdf(2.015048, 5), 6)
  0.95
  """
  theta = math.atan(t / math.sqrt(n))
  sine, cosine = math.sin(theta), math.cos(theta)
  term, series = (cosine, 0.0) if n % 2 else (1.0, 0.0)
  for i in range(3 if n % 2 else 2, n + 1, 2):
    series += term
    term *= cosine * cosine * (i - 1) / i
  central = 2 / math.pi * (theta + sine * series) if n % 2 else sine * series
  return 0.5 + central / 2


# Where the level of a series changes: change-points by optimal partitioning, against noise measured
# on the series.
#
# Exact least squares over all partitions (Jackson et al. 2005, An algorithm for optimal
# partitioning of data on an interval; PELT, Killick et al. 2012, finds the same partitions), for
# many series at once. A further change-point has to lower the sum of squares by `penalty` long-run
# variances of the noise. The variance is taken from differences of neighbouring means over 1, 2, 4,
# ... blocks, whichever says most: noise that wanders is then no change of level, and a change of
# level, which few of the differences see, is no noise.

# docs/measurements/change_alarms.md has what they do; the rest chosen by hand.
SHORTEST = 4
"""Blocks between two change-points, at least: what is over sooner is a pause, not a change."""
_OUTLIER = 4.0


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
  penalty = 2 * math.log(max(tests or number, 1) * blocks / (1 - CONFIDENCE))
  for of in slices(number, blocks):
    part = _tame(_filled(series[of]))
    noise = long_run_deviation(part)
    # Where even the largest sensible step is lost in noise there is nothing to look for.
    some = np.flatnonzero(np.ptp(part, axis=1) > 0)
    if some.size:
      scaled = (part[some] / np.maximum(noise[some],
                                        1e-9 * np.abs(part[some]).max(axis=1) + 1e-300)[:, None])
      for i, points in zip(some, _partition(scaled, penalty), strict=True):
        found[of.start + i] = points
  return found


def long_run_deviation(series: np.ndarray) -> np.ndarray:
  """[S] standard deviation that one block would have, were blocks independent and means over many
  as noisy as they are.
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
