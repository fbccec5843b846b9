"""Who is late, persistently or by turns, and how sure that is.

Lateness is told by undelayed arrival: how long a rank was busy since it left the last collective itself. Entry
against a common exit would blame the neighbour that a slow host lets out late.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from jaxpace.diagnosis.counted import Counted
from jaxpace.diagnosis.totals import Totals

EFFECT = 0.02
"""A rank is late if it arrives at least this share of the mean step after the typical rank ..."""
CONFIDENCE = 0.99
"""... with at least this confidence, all ranks tested together ..."""
PERSISTENCE = 0.5
"""... and by half that share at least in this many of the blocks of neighbouring steps."""


HIDDEN = 0.25
"""A rank whose lateness is less than this part of the latest one's hides behind it: it is not named beside it."""


class Lateness(NamedTuple):
  """How late each rank is. R ranks, C collectives; seconds; NaN for a rank that is not judged."""

  mean: np.ndarray  # [R] mean arrival less the typical rank's
  confidence: np.ndarray  # [R] that the rank is later than the typical one at all, all ranks tested together
  persistence: np.ndarray  # [R] share of the blocks in which it was late by half of `EFFECT` or more
  late: np.ndarray  # ranks that are persistently late, latest first
  hidden: np.ndarray  # ranks that are persistently late as well, but by much less than the latest
  typical: np.ndarray  # the ranks the others are compared with
  persistent: np.ndarray  # [C] max over ranks of mean A, less mean A
  random: np.ndarray  # [C] mean over steps of max A, less max over ranks of mean A
  random_confidence: float  # that `random` is not the work of a few blocks
  waiting_confidence: float  # the same of `persistent` + `random`


def find_late(totals: Totals, counted: Counted, step_time: float) -> Lateness:
  """Tests every rank against the typical one, by means of blocks of neighbouring steps.

  The typical rank is the mean of the ranks between the lower quartile and the lower median of mean arrival: half
  the ranks may be late without shifting it. Blocks carry the noise, autocorrelated or not: one pause, however
  long, makes one block late, which is nothing persistent.

  Args:
    totals: the run, added up.
    counted: the steps that count.
    step_time: mean step, seconds.

  Returns:
    The lateness of every rank. `persistent` + `random` is the mean earliness of each collective, exactly.
  """
  ranks = len(totals.present)
  eligible = totals.present >= max(1, counted.size / 2)
  number = np.maximum(totals.present, 1)
  by_collective = totals.lateness.sum(axis=2) / number  # [C, R]
  persistent = np.where(eligible, by_collective, -np.inf).max(axis=1)
  worst = np.where(eligible, by_collective, -np.inf).argmax(axis=1)
  earliness = np.array([np.nanmean(row) if np.isfinite(row).any() else 0.0 for row in totals.earliness])
  persistent = np.where(np.isfinite(persistent), np.clip(persistent, 0.0, earliness), 0.0)

  total = by_collective.sum(axis=0)
  order = np.flatnonzero(eligible)[np.argsort(total[eligible], kind="stable")]
  typical = order[(len(order) + 1) // 4:(len(order) - 1) // 2 + 1] if len(order) else order
  if len(order) < 2:
    nothing = np.full(ranks, np.nan)
    mean = np.where(eligible, 0.0, np.nan)
    nobody = np.empty(0, np.int64)
    return Lateness(mean, nothing, nothing, nobody, nobody, order, persistent, earliness - persistent, 0.0, 0.0)
  with np.errstate(invalid="ignore", divide="ignore"):
    by_block = totals.lateness.sum(axis=0) / np.where(totals.block_steps > 0, totals.block_steps, np.nan)  # [R, B]
  known = np.isfinite(by_block[typical])
  level = np.where(known, by_block[typical], 0.0).sum(axis=0) / np.maximum(known.sum(axis=0), 1)
  level = np.where(known.any(axis=0), level, np.nan)
  mean = np.where(eligible, total - total[typical].mean(), np.nan)
  differences = by_block - level
  confidence = np.array([_confidence(row, ranks) for row in differences])
  number_known = np.maximum(np.isfinite(differences).sum(axis=1), 1)
  persistence = (differences >= EFFECT / 2 * step_time).sum(axis=1) / number_known
  late = np.flatnonzero(eligible & (np.nan_to_num(mean) >= EFFECT * step_time) & (confidence >= CONFIDENCE)
                        & (persistence >= PERSISTENCE))
  late = late[np.argsort(-mean[late], kind="stable")]
  named = mean[late] >= HIDDEN * mean[late].max(initial=0.0)

  waiting = _block_means(totals, counted)
  turns = waiting - sum(
      _ratio(totals.lateness[c, worst[c]], totals.block_steps[worst[c]]) for c in range(len(worst)))
  return Lateness(mean, confidence, persistence, late[named], late[~named], typical, persistent, earliness - persistent,
                  _confidence(turns, 1), _confidence(waiting, 1))


def _block_means(totals: Totals, counted: Counted) -> np.ndarray:
  """[B] mean earliness, of neighbouring steps."""
  whole = totals.earliness.sum(axis=0)
  use = np.isfinite(whole) & (counted.block >= 0)
  block = counted.block[use]
  return _ratio(np.bincount(block, whole[use], counted.blocks), np.bincount(block, minlength=counted.blocks))


def _ratio(total: np.ndarray, number: np.ndarray) -> np.ndarray:
  return np.divide(total, number, out=np.full(len(total), np.nan), where=number > 0)


def _confidence(values: np.ndarray, tests: int) -> float:
  """One-sided confidence that the mean of `values` is above 0, by Student's t, Bonferroni over `tests`."""
  values = values[np.isfinite(values)]
  if len(values) < 3:
    return 0.0
  # Times are whole nanoseconds: a spread below that is rounding, and an exactly constant lateness is certain.
  error = max(float(values.std(ddof=1)) / math.sqrt(len(values)), 1e-10)
  return min(max(1 - tests * (1 - student_cdf(float(values.mean()) / error, len(values) - 1)), 0.0), 0.9999)


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
