"""What the stream of alarms looks at: a signal for each rank's lateness, and the job's own. Pure.

S = R + 6 signals: each rank's lateness, then waiting, transfers, gaps, waiting and transfers once
more, pauses.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import numpy as np

LATE, WAITING, TRANSFER, GAP = "late_rank", "waiting", "transfer", "gap"
_LARGE_WAITING, _LARGE_TRANSFER, _PAUSE = "large_waiting", "large_transfer", "pause"
JOB = (WAITING, TRANSFER, GAP, _LARGE_WAITING, _LARGE_TRANSFER, _PAUSE)
"""The job's signals, after the ranks'."""
_TOLD_AS = {_LARGE_WAITING: WAITING, _LARGE_TRANSFER: TRANSFER, _PAUSE: GAP}
"""Two views of one thing: the first of them is told when it begins, the last when it ends."""

# Fitted on the fault lab's runs of seeds 0 to 2; measurements/stream_lab_seed4 is what they are
# worth on others.
ALLOWANCE = 0.025
"""Half of what is to be found: a fault that costs 5 % of the step."""
LARGE = 0.1
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
_STRIKES = 3
"""Gaps of any length that confirm, where no causes are measured."""


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
  strikes: np.ndarray  # [S] raised steps that do instead
  fades: np.ndarray  # [S] bool, a quiet spell means that nothing has begun


@functools.lru_cache(maxsize=16)
def rules(signals: int, causes: bool) -> Rules:
  """The rules for so many signals; `causes`: whether pauses are measured."""
  ranks = signals - len(JOB)
  names = (LATE,) * ranks + JOB
  large = {_LARGE_WAITING, _LARGE_TRANSFER} | ({GAP} if causes else set())
  rare = {_PAUSE} | (set() if causes else {GAP})
  allowance = np.array([LARGE if name in large else ALLOWANCE for name in names])
  return Rules(np.array([_CAPS.get(name, _CAP) for name in names]), allowance,
               np.array([_LARGE_LEAST if name in large and name in _CAPS else _LEAST
                         for name in names]),
               np.where(np.array(names) == GAP, allowance, ALLOWANCE),
               np.array([_NEED[name] for name in names]),
               np.array([_STRIKES if name in rare - {_PAUSE} else np.inf for name in names]),
               np.array([name not in rare for name in names]))


def signals(steps: NewSteps, joined: np.ndarray | None = None) -> np.ndarray:
  """[S, k] every rank's arrival after the lower median of all, earliness, transfer, mean gap,
  pauses; seconds.

  Earliness is that for work, mean over the ranks that wait, so that two ranks wait as long as many:
  gaps have a signal of their own. Waiting and transfers are looked at twice.

  Args:
    steps: the steps.
    joined: [R] ranks of different numbers never meet, and aren't compared; None: all meet.
  """
  lateness, early = (_lateness(steps.arrival, steps.gap) if joined is None
                     else _by_part(steps, joined))
  gaps = np.isfinite(steps.gap)
  gap = np.where(gaps, steps.gap, 0.0).sum(axis=0) / np.maximum(gaps.sum(axis=0), 1)
  pause = np.full(len(gap), np.nan) if steps.pause is None else steps.pause
  return np.concatenate([lateness,
                         np.stack([early, steps.transfer, gap, early, steps.transfer, pause])])


def _by_part(steps: NewSteps, joined: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
  """The same of ranks that meet: each is compared with those of its own part; earliness is the mean
  over all ranks."""
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
  arrival = np.where(valid, all_arrival, np.inf)
  order = np.sort(arrival, axis=0)
  middle = np.take_along_axis(order, ((number - 1) // 2)[None], axis=0)[0]
  middle = np.where(some, middle, np.nan)
  # Of two ranks the other one is what a rank is compared with: by turns they are late and early.
  lateness = all_arrival - (middle if len(valid) > 2 else all_arrival[::-1])
  work = all_arrival - np.where(np.isfinite(gap), np.minimum(gap, all_arrival), 0.0)
  last = np.where(some, np.where(valid, work, -np.inf).max(axis=0), np.nan)
  return (lateness,
          np.where(some, np.where(valid, last - work, 0.0).sum(axis=0) / np.maximum(number - 1, 1),
                   np.nan))


def kind(signal: int, ranks: int) -> str:
  """What a signal is told as."""
  if signal < ranks:
    return LATE
  name = JOB[signal - ranks]
  return _TOLD_AS.get(name, name)


@functools.lru_cache(maxsize=64)
def views(signals: int, told_as: str) -> tuple[int, ...]:
  """The job's signals that are told as this kind."""
  ranks = signals - len(JOB)
  return tuple(signal for signal in range(ranks, signals) if kind(signal, ranks) == told_as)
