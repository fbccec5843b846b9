"""When a rank is late: from which block to which, for good or for a while."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from jaxpace.diagnosis.changes import SHORTEST
from jaxpace.diagnosis.selected_steps import merged

# Set looking at the fault lab's runs of seeds 0 to 3; measurements/fault_lab_seed4 is what they are
# worth on others.
EFFECT = 0.02
"""A rank is late if it arrives at least this share of the mean step after the typical rank ..."""
CONFIDENCE = 0.99
"""... with at least this confidence, all ranks tested together."""
FEWEST_STEPS = 30
"""A rank that is late for fewer steps than these in a row, and in time before and after, isn't
persistently late."""

class Episode(NamedTuple):
  """Neighbouring blocks in which one rank is late."""

  rank: int
  begin: int  # first block
  end: int  # one past the last
  steps: int
  lateness: float  # seconds after the typical rank, mean
  confidence: float
  persistence: float  # share of the blocks in which it was late by half of `EFFECT` or more


class Tested(NamedTuple):
  """How late one rank is over some blocks."""

  lateness: float
  confidence: float
  persistence: float

  def late(self, step_time: float) -> bool:
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
  # [R] ranks of different numbers never meet and aren't compared; None: all may be
  joined: np.ndarray | None = None

  def mean(self, begin: int, end: int) -> np.ndarray:
    """[R] mean of `usual` over the steps of some blocks; NaN where a rank was not there."""
    values, weights = self.usual[:, begin:end], self.steps[:, begin:end]
    total = np.where(weights > 0, values, 0.0) * weights
    number = weights.sum(axis=1)
    return np.divide(total.sum(axis=1), number, out=np.full(len(values), np.nan), where=number > 0)

  def typical(self, begin: int, end: int, rank: int | None = None) -> np.ndarray:
    """The ranks between the lower quartile and the lower median of mean arrival: half may be late
    without a shift.

    Args:
      begin: first block.
      end: one past the last.
      rank: that they are to be compared with: of ranks that never meet it, none are; None: of all
        parts of the job.
    """
    if self.joined is not None and rank is None:
      parts = [self.typical(begin, end, int(np.flatnonzero(self.joined == number)[0]))
               for number in np.unique(self.joined)]
      return np.concatenate(parts)
    mean = self.mean(begin, end)
    known = np.flatnonzero(self.eligible & np.isfinite(mean))
    if self.joined is not None:
      known = known[self.joined[known] == self.joined[rank]]
    order = known[np.argsort(mean[known], kind="stable")]
    return order[(len(order) + 1) // 4:(len(order) - 1) // 2 + 1] if len(order) else order

  def test(self, ranks: Sequence[int], begin: int, end: int, tests: int) -> list[Tested]:
    """Tests ranks against the typical one, Bonferroni over `tests`.

    Blocks carry the noise, autocorrelated or not: one pause, however long, makes one block late,
    which is nothing persistent.
    """
    values, weights = self.usual[:, begin:end], self.steps[:, begin:end]
    overall = self.mean(begin, end)
    result, part = [], None
    for rank in ranks:
      if part is None or self.joined is not None and self.joined[rank] != part:
        part = 0 if self.joined is None else int(self.joined[rank])
        typical = self.typical(begin, end, rank)
        level = mean_known(values[typical]) if typical.size else np.full(values.shape[1], np.nan)
      differences = merged(values[rank] - level, weights[rank])
      known = differences[np.isfinite(differences)]
      result.append(Tested(
          float(overall[rank] - overall[typical].mean()) if typical.size else 0.0,
          confidence(known, tests), float((known >= EFFECT / 2 * self.step_time).mean())
          if known.size else 0.0))
    return result


def find_episodes(blocks: Blocks, changes: Sequence[Sequence[int]], steps: int) -> list[Episode]:
  """Finds who is late when.

  Between its own change-points a rank is late or not; neighbouring stretches in which it is late
  are one episode. A rank that is late over the whole run, though not in stretches of it that can be
  told apart, is late throughout.

  Args:
    blocks: arrivals.
    changes: blocks at which each rank's arrival changes its level.
    steps: counted steps.
  """
  size, ranks = blocks.arrival.shape[1], np.flatnonzero(blocks.eligible)
  whole = dict(zip(ranks.tolist(), blocks.test(ranks.tolist(), 0, size, len(ranks)), strict=True))
  found: list[Episode] = []
  for rank in ranks.tolist():
    edges = [0, *changes[rank], size]
    spans = list(zip(edges[:-1], edges[1:], strict=True)) if changes[rank] else []
    tested = [blocks.test([rank], *span, len(ranks) * len(spans))[0] for span in spans]
    late = [i for i, test in enumerate(tested) if test.late(blocks.step_time)]
    joined: list[list[int]] = []
    for begin, end in (spans[i] for i in _grown(late, tested, blocks.step_time)):
      if joined and joined[-1][1] == begin:
        joined[-1][1] = end
      else:
        joined.append([begin, end])
    if not joined and whole[rank].late(blocks.step_time):
      joined = [[0, size]]
    for begin, end in joined:
      number = int(blocks.steps[rank, begin:end].sum())
      test = blocks.test([rank], begin, end, len(ranks))[0]
      if end - begin >= min(SHORTEST, size) and number >= min(FEWEST_STEPS, steps):
        found.append(Episode(rank, begin, end, number, *test))
  return found


def _grown(late: Sequence[int], tested: Sequence[Tested], step_time: float) -> list[int]:
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


def mean_known(values: np.ndarray) -> np.ndarray:
  """[B] mean over rows, NaN where none is known."""
  known = np.isfinite(values)
  number = known.sum(axis=0)
  return np.divide(np.where(known, values, 0.0).sum(axis=0), number,
                   out=np.full(values.shape[1], np.nan), where=number > 0)


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
