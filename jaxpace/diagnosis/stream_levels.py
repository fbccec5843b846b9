"""What is usual for a signal, and how far a CUSUM of it goes by chance: learnt from its own past.
Pure.

With y the signal less its usual level and its allowance, shares of the step, and θ > 0 the root of
E[exp(θ y)] = 1, a sum that starts at 0 ever passes h before it returns to 0 with probability at
most exp(-θ h) (Lundberg's inequality, for independent steps of any distribution): h = log(1 / rate)
/ θ. Steps are not independent. θ is also that of sums over 4 and 16 neighbours, the lowest counts;
and where neighbours are alike, with correlation ρ, n steps tell as much of the mean as n / v, v =
(1 + ρ) / (1 - ρ): a sum of Gaussian steps that wander so goes by chance as far as if θ were θ / v,
and begins anew once in v steps.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from jaxpace.diagnosis.stream_signals import ALLOWANCE, Rules

# Fitted on the fault lab's runs of seeds 0 to 2; measurements/stream_lab_seed4 is what they are
# worth on others.
RATE = 1e-6
"""False alarms of one signal a step, at most, as far as its past tells."""
LEARN = 60
"""Steps before the first alarm."""
_TOGETHER = (1, 4, 16)
_WIDER = 1.15
"""Times the θ of sums demands: it is measured on few steps."""
_WANDERS = 1.5
"""v from which on steps are taken to wander."""
_FEW = 6.0
"""θ / v is less by as many times v / n, where it is known from n steps only."""
_SURE, _SURE_BELOW = 0.6, 3.0
"""A sum that is enough where next to all of the last steps were high: 24 of them, each 2.5 % above
the allowance; if v is below this: what wanders stays high by chance."""
_HIGHEST, _LOWEST = 200.0, 1e-3
_TURNS, _CLOSE = 20, 1e-4


class Levels(NamedTuple):
  """What is usual for each of S signals."""

  usual: np.ndarray  # [S] about which its capped excesses add up to nothing, s
  middle: np.ndarray  # [S] median, s
  threshold: np.ndarray  # [S] of its CUSUM, shares of the step; inf while it is not known
  sure: np.ndarray  # [S] the same where next to all of the last steps were high
  step_time: float  # median of the usual steps, s


def unknown(signals: int) -> Levels:
  """Before anything is learnt."""
  nothing, never = np.full(signals, np.nan), np.full(signals, np.inf)
  return Levels(nothing, nothing, never, never, float("nan"))


def learn(past: np.ndarray, seen: np.ndarray, times: np.ndarray, before: Levels,
          rule: Rules) -> Levels:
  """Learns from the past.

  Args:
    past: [S, M] values, seconds, in their order but for one place; NaN where there are fewer.
    seen: [S] values that ever went in.
    times: [M] step times.
    before: what was known; it stays where too little is.
    rule: what is asked of each signal.
  """
  known = np.isfinite(times)
  step_time = float(np.median(times[known])) if known.any() else float("nan")
  ready = seen >= LEARN
  if not ready.any() or not step_time > 0:
    return before._replace(step_time=step_time)
  shares, cap = past[ready].astype(np.float64) / step_time, rule.cap[ready, None]
  there = np.isfinite(shares)
  usual, middle = level(shares, there, cap)
  y = np.where(there, np.clip(shares - usual[:, None], -cap, cap) - rule.allowance[ready, None],
               np.nan)
  root, number = chance(y, there), there.sum(axis=1)
  least = root
  for width in _TOGETHER[1:]:
    sums = y.reshape(len(y), -1, width).sum(axis=2)
    whole = np.isfinite(sums)
    least = np.where(whole.sum(axis=1) >= 3, np.minimum(least, chance(sums, whole)), least)
  wander = wandering(y, there)
  far = np.log(1 / np.minimum(RATE * wander, 0.5)) * wander / root * (1 + _FEW * wander / number)
  threshold = np.maximum(_WIDER * -np.log(RATE) / least, rule.least[ready])
  threshold = np.maximum(threshold, np.where(wander > _WANDERS, far, 0.0))
  sure = np.where(wander < _SURE_BELOW, np.minimum(threshold, _SURE), threshold)

  def learnt(so_far: np.ndarray, new: np.ndarray) -> np.ndarray:
    so_far = so_far.copy()
    so_far[ready] = new
    return so_far

  never = np.full(len(seen), np.inf)
  return Levels(learnt(before.usual, usual * step_time), learnt(before.middle, middle * step_time),
                learnt(never, threshold), learnt(never, sure), step_time)


def level(values: np.ndarray, there: np.ndarray, cap: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
  """[S] the level about which what exceeds it, capped, adds up to 0 (Huber 1964), by Newton's
  method; [S] the median.

  Args:
    values: [S, M].
    there: [S, M] bool, of which are known: one at least of each.
    cap: [S, 1].
  """
  number = there.sum(axis=1)
  order = np.sort(np.where(there, values, np.inf), axis=1)
  rows = np.arange(len(values))
  middle = (order[rows, (number - 1) // 2] + order[rows, number // 2]) / 2
  found = middle
  for _ in range(8):
    excess = np.where(there, values - found[:, None], 0.0)
    inside = (there & (np.abs(excess) < cap)).sum(axis=1)
    found = found + np.clip(excess, -cap, cap).sum(axis=1) / np.maximum(inside, number / 4)
  return found, middle


def chance(y: np.ndarray, there: np.ndarray) -> np.ndarray:
  """[S] θ with mean exp(θ y) = 1, at most 200, by Newton's method on the logarithm, which is
  convex.

  It begins at log(n) / max(y), where the mean is 1 at least, and so comes down to the root.

  Args:
    y: [S, n] whose mean is below 0.
    there: [S, n] bool, of which are known.
  """
  number = np.maximum(there.sum(axis=1), 1)
  y = np.where(there, y, 0.0)
  largest = np.maximum(y.max(axis=1), 1e-12)
  theta = np.minimum(np.log(np.maximum(number, 2)) / largest, _HIGHEST)
  for _ in range(_TURNS):
    powers = np.where(there, np.exp(theta[:, None] * y), 0.0)
    mean = powers.sum(axis=1)
    slope = (powers * y).sum(axis=1) / mean
    beyond = np.log(mean / number)
    # At the highest θ that is told the mean may be below 1: then it stays.
    step = np.where((beyond > 0) & (slope > 0), beyond / np.where(slope > 0, slope, 1.0), 0.0)
    theta = np.maximum(theta - step, 0.0)
    if (step <= _CLOSE * theta).all():
      break
  return np.maximum(theta, _LOWEST)


def wandering(y: np.ndarray, there: np.ndarray) -> np.ndarray:
  """[S] v = (1 + ρ) / (1 - ρ), ρ the correlation of neighbours: 1 at least; less the bias of few
  (Kendall 1954)."""
  number = np.maximum(there.sum(axis=1), 1)
  mean = np.where(there, y, 0.0).sum(axis=1) / number
  z = np.where(there, y - mean[:, None], 0.0)
  rho = (z[:, 1:] * z[:, :-1]).sum(axis=1) / np.maximum((z * z).sum(axis=1), 1e-30)
  rho = np.clip(rho + (1 + 3 * rho) / number, 0.0, 0.97)
  return np.asarray((1 + rho) / (1 - rho))


# Ranks late in all steps looked at: their own past knows no other level, so no onset shows against
# it. Pure.

# Fitted on the fault lab's runs of seeds 0 to 2; measurements/stream_lab_seed4 is what they are
# worth on others.
LATE_LEAST = 2 * ALLOWANCE
"""Share of the step by which the median step of such a rank is late."""
_LATE_MOST = 0.6
"""Part of the steps in which it is late by more than the allowance."""
_LATE_SURE = 5.0
"""Standard errors of the median, at least: one in a million, and neighbouring steps may be
alike."""
_BEGINNING, _HALF = 4, 0.5
"""In the first quarter of its steps it was late by half of that at least: or it became late."""


def late_from_start(past: np.ndarray, seen: np.ndarray, levels: Levels, ranks: int) -> list[int]:
  """Finds the ranks that have been late since the first step looked at.

  Args:
    past: [S, M] values of the signals, seconds, in their order as long as they are no more than M.
    seen: [S] values that ever went in.
    levels: what is usual.
    ranks: R, whose lateness are the first of the signals.
  """
  if not levels.step_time > 0:
    return []
  middle = levels.middle[:ranks] / levels.step_time
  known = (seen[:ranks] >= LEARN) & (seen[:ranks] <= past.shape[1])
  found = []
  for rank in np.flatnonzero(known & (middle >= LATE_LEAST)).tolist():
    own = past[rank, :int(seen[rank])].astype(np.float64) / levels.step_time
    own = own[np.isfinite(own)]
    if not own.size or (own > ALLOWANCE).mean() < _LATE_MOST:
      continue
    deviation = float(np.median(np.abs(own - middle[rank]))) / 0.6745
    wander = float(wandering(own[None], np.ones((1, own.size), bool))[0])
    error = 1.25 * deviation * np.sqrt(wander / own.size)
    if (middle[rank] >= _LATE_SURE * error
        and np.median(own[:own.size // _BEGINNING]) >= _HALF * middle[rank]):
      found.append(rank)
  return found
