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

import functools
from typing import NamedTuple

import numpy as np

from jaxpace.diagnose.limits import COSTLY, FEWEST, MOST, PART, SHOWS, UNEXPLAINED
from jaxpace.diagnose.totals import lower_median

# What the stream of alarms looks at: a signal for each rank's lateness, and the job's own.
#
# S = R + 6 signals: each rank's lateness, then waiting, transfers, gaps, waiting and transfers once
# more, pauses.

LATE, WAITING, TRANSFER, GAP = "late_rank", "waiting", "transfer", "gap"
_LARGE_WAITING, _LARGE_TRANSFER, _PAUSE = "large_waiting", "large_transfer", "pause"
JOB = (WAITING, TRANSFER, GAP, _LARGE_WAITING, _LARGE_TRANSFER, _PAUSE)
"""The job's signals, after the ranks'."""
_TOLD_AS = {_LARGE_WAITING: WAITING, _LARGE_TRANSFER: TRANSFER, _PAUSE: GAP}
"""Two views of one thing: the first of them is reported when it begins, the last when it ends."""

# Fitted on the fault lab's runs of seeds 0 to 2; measurements/stream_lab_seed4 is what they are
# worth on others.
LARGE = UNEXPLAINED / 2
"""Half of what is found sooner where it is large: noise with a heavy tail hides 5 % for long, and
20 % not at all. And half of what gaps between steps must take that no measured cause explains,
where causes are measured: the report has them as a finding from there on."""
PAUSE_CAP = 2.0
"""Share of the step that a pause with a cause adds at most: it may make up for 25 steps and
more."""
_CAP = 0.15
_CAPS = {GAP: 0.4, _LARGE_WAITING: 0.6, _LARGE_TRANSFER: 0.6, _PAUSE: PAUSE_CAP}
"""Share of the step that one step adds at most; gaps are long and rare where they are a fault at
all."""
_LEAST, _LARGE_LEAST = 0.45, 2.5
"""Least threshold: no two steps by themselves reach it; nor do four, where each adds more."""
LAST = 24
"""Steps that are looked back on to tell what lasts from what passes by."""
_NEED = {LATE: 18, WAITING: 18, _LARGE_WAITING: 18, TRANSFER: 20, _LARGE_TRANSFER: 20, GAP: 24,
         _PAUSE: 0}
"""Of them, steps that must have been high; pauses with a cause are rare and long, and have a rule
of their own."""


class NewSteps(NamedTuple):
  """New steps, the oldest first. R ranks, k steps; seconds; NaN where not known."""

  number: np.ndarray  # [k] int64 step numbers
  arrival: np.ndarray  # [R, k] undelayed arrival, all collectives of the step together
  transfer: np.ndarray  # [k] all collectives together
  gap: np.ndarray  # [R, k] from the step before
  step: np.ndarray  # [k] mean over ranks of exit to exit
  pause: np.ndarray | None = None
  """[k] of the process with most: garbage collection, data and checkpoints together; None: not
  measured."""


class Rules(NamedTuple):
  """What is asked of each of S signals; shares of the step."""

  cap: np.ndarray  # [S] what one step adds at most
  allowance: np.ndarray  # [S] by which it may exceed its usual level for good
  least: np.ndarray  # [S] lowest threshold
  high: np.ndarray  # [S] above the median: such a step is high
  need: np.ndarray  # [S] high ones of the last `LAST` steps that an alarm takes
  strikes: np.ndarray  # [S] raised steps that do instead: gaps, where no causes are measured
  fades: np.ndarray  # [S] bool, a quiet spell means that nothing has begun


@functools.lru_cache(maxsize=16)
def rules(signals: int, causes: bool) -> Rules:
  """The rules for so many signals; `causes`: whether pauses are measured."""
  ranks = signals - len(JOB)
  names = (LATE,) * ranks + JOB
  large = {_LARGE_WAITING, _LARGE_TRANSFER} | ({GAP} if causes else set())
  rare = {_PAUSE} | (set() if causes else {GAP})
  allowance = np.array([LARGE if name in large else SHOWS for name in names])
  return Rules(np.array([_CAPS.get(name, _CAP) for name in names]), allowance,
               np.array([_LARGE_LEAST if name in large and name in _CAPS else _LEAST
                         for name in names]),
               np.where(np.array(names) == GAP, allowance, SHOWS),
               np.array([_NEED[name] for name in names]),
               np.array([FEWEST if name in rare - {_PAUSE} else np.inf for name in names]),
               np.array([name not in rare for name in names]))


def signals(steps: NewSteps, joined: np.ndarray) -> np.ndarray:
  """[S, k] every rank's arrival after the lower median of all, earliness, transfer, mean gap,
  pauses; seconds.

  Earliness is that for work, mean over the ranks that wait, so that two ranks wait as long as many:
  gaps have a signal of their own. Waiting and transfers are looked at twice.

  Args:
    steps: the steps.
    joined: [R] ranks of different numbers never meet, and aren't compared.
  """
  lateness, early = _by_part(steps, joined)
  gaps = np.isfinite(steps.gap)
  gap = np.where(gaps, steps.gap, 0.0).sum(axis=0) / np.maximum(gaps.sum(axis=0), 1)
  pause = np.full(len(gap), np.nan) if steps.pause is None else steps.pause
  return np.concatenate([lateness,
                         np.stack([early, steps.transfer, gap, early, steps.transfer, pause])])


def _by_part(steps: NewSteps, joined: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
  """[R, k] arrival after the lower median of the ranks that each meets, and [k] earliness for work,
  mean over all ranks that wait."""
  lateness = np.full(steps.arrival.shape, np.nan)
  early, waiting = np.zeros(steps.arrival.shape[1]), np.zeros(steps.arrival.shape[1])
  for number in np.unique(joined):
    own = np.flatnonzero(joined == number)
    lateness[own], part = _lateness(steps.arrival[own], steps.gap[own])
    those = np.maximum(np.isfinite(steps.arrival[own]).sum(axis=0) - 1, 0)  # the ranks that wait
    early += np.nan_to_num(part) * those
    waiting += those
  return (lateness, np.where(np.isfinite(steps.arrival).any(axis=0), early / np.maximum(waiting, 1),
                             np.nan))


def _lateness(all_arrival: np.ndarray, gap: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
  """[R, k] arrival after the lower median, and [k] earliness for work, of ranks that all meet."""
  valid = np.isfinite(all_arrival)
  number = np.maximum(valid.sum(axis=0), 1)
  some = valid.any(axis=0)
  # Of two ranks the other one is what a rank is compared with: intermittently they are late and
  # early.
  lateness = all_arrival - (lower_median(all_arrival) if len(valid) > 2 else all_arrival[::-1])
  work = all_arrival - np.where(np.isfinite(gap), np.minimum(gap, all_arrival), 0.0)
  last = np.where(some, np.where(valid, work, -np.inf).max(axis=0), np.nan)
  return (lateness,
          np.where(some, np.where(valid, last - work, 0.0).sum(axis=0) / np.maximum(number - 1, 1),
                   np.nan))


def kind(signal: int, ranks: int) -> str:
  """What a signal is reported as."""
  if signal < ranks:
    return LATE
  name = JOB[signal - ranks]
  return _TOLD_AS.get(name, name)


@functools.lru_cache(maxsize=64)
def views(signals: int, told_as: str) -> tuple[int, ...]:
  """The job's signals that are reported as this kind."""
  ranks = signals - len(JOB)
  return tuple(signal for signal in range(ranks, signals) if kind(signal, ranks) == told_as)


RATE = 1e-6
"""False alarms of one signal per step, at most, as far as its past shows."""
LEARN = 60
"""Steps before the first alarm."""
_TOGETHER = (1, 4, 16)
_WIDER = 1.15
"""Times the θ of sums demands: it is measured on few steps."""
_FEW = 6.0
"""θ / v is less by as many times v / n, where it is known from n steps only."""
_SURE, _SURE_BELOW = 0.6, 3.0
"""A sum that is enough where next to all of the last steps were high: 24 of them, each 2.5 % above
the allowance; if v is below this: what wanders stays high by chance."""
_HIGHEST = 200.0
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
  threshold = np.maximum(threshold, far)
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
    # At the highest θ that is reported the mean may be below 1: then it stays.
    step = np.where((beyond > 0) & (slope > 0), beyond / np.where(slope > 0, slope, 1.0), 0.0)
    theta = np.maximum(theta - step, 0.0)
    if (step <= _CLOSE * theta).all():
      break
  return np.maximum(theta, 1 / _HIGHEST)


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
# it.

_LATE_SURE = 5.0
"""Standard errors of the median, at least: one in a million, and neighbouring steps may be
alike."""


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
  for rank in np.flatnonzero(known & (middle >= COSTLY)).tolist():
    own = past[rank, :int(seen[rank])].astype(np.float64) / levels.step_time
    own = own[np.isfinite(own)]
    if not own.size or (own > SHOWS).mean() < MOST:
      continue
    deviation = float(np.median(np.abs(own - middle[rank]))) / 0.6745
    wander = float(wandering(own[None], np.ones((1, own.size), bool))[0])
    error = 1.25 * deviation * np.sqrt(wander / own.size)
    if (middle[rank] >= _LATE_SURE * error
        and np.median(own[:int(PART * own.size)]) >= MOST * middle[rank]):
      found.append(rank)
  return found
