"""Finds the onset of a fault while the job runs: sequential tests on lateness, waiting, transfers and gaps. Pure.

Each signal is a share of the step; its own past says what is usual: the level about which its capped excesses add up to
nothing (Huber 1964), so that a few long steps don't raise it. A CUSUM (Page 1954) adds up by how much a signal
exceeds its usual level and an allowance of 2.5 % of the step; it alarms where the sum passes a threshold. With y the
signal less its usual level and the allowance, and θ > 0 the root of E[exp(θ y)] = 1, a sum that starts at 0 ever passes
h before it returns to 0 with probability at most exp(-θ h) (Lundberg's inequality, for independent steps of any
distribution): h = log(1 / rate) / θ, θ from the signal's own past. What a single step may add is capped, so that one
pause, however long, is no onset. Pauses with a cause that the processes measure themselves (garbage collection, data,
checkpoints) are rare and long, and next to nothing at other times: two of them are an onset.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from jaxpace.diagnosis.accounting import account, busy
from jaxpace.diagnosis.totals import undelayed
from jaxpace.trace.run import Run

ALLOWANCE = 0.025
"""Half of what is to be found: a fault that costs 5 % of the step."""
RATE = 1e-6
"""False alarms of one signal a step, at most, as far as its past tells."""
LEARN = 60
"""Steps before the first alarm."""
_MEMORY = 512
_REFRESH = 40
_CAP, _GAP_CAP, _PAUSE_CAP = 0.15, 0.4, 2.0
"""Share of the step that one step adds at most; gaps are long and rare where they are a fault at all, and pauses with
a cause may make up for 25 steps and more: that cap is 5 % of 40 steps."""
_TWICE = 2
"""Pauses with a cause that an onset takes; it is over after 80 steps without."""
_LEAST = 0.45
"""Least threshold: a fault of 5 % of the step is found within 18 steps, and no two steps by themselves reach it."""
_STEADY, _FAR = 0.75, 2.5
"""A rank is told late if it is so in this part of the steps since the onset, or its sum is that many times as high."""
_FEWEST = 12
"""Steps in which a rank must be late to be told so; of three, ranks by turns may well be late in all."""
_NEAR = 3.0
"""Ranks whose sums are alike within this factor may be taking turns."""
_TOGETHER = (1, 4, 16)
"""θ is also that of sums over as many neighbouring steps: what wanders is no onset."""
_WIDER = 1.15
"""Times the measured θ demands: it is measured on few steps."""
LATE, WAITING, TRANSFER, GAP = "late_rank", "waiting", "transfer", "gap"
_PAUSE = "pause"  # told as GAP
_JOB = (WAITING, TRANSFER, GAP, _PAUSE)


_PAUSES = ("gc", "data", "checkpoint")
"""Columns of causes that a process measures itself."""


class Steps(NamedTuple):
  """New steps, the oldest first. R ranks, k steps; seconds; NaN where not known."""

  number: np.ndarray  # [k] int64 step numbers
  arrival: np.ndarray  # [R, k] undelayed arrival, all collectives of the step together
  transfer: np.ndarray  # [k] all collectives together
  gap: np.ndarray  # [R, k] from the step before
  step: np.ndarray  # [k] mean over ranks of exit to exit
  pause: np.ndarray | None = None
  """[k] of the process with most: garbage collection, data and checkpoints together; None: not measured."""


class Alarm(NamedTuple):
  """A fault that began, or was over."""

  kind: str  # LATE, WAITING (ranks by turns), TRANSFER or GAP
  rank: int | None  # of LATE
  step: int  # at which it was found
  onset: int  # at which it began, about
  share: float  # of the usual step, mean since the onset
  over: bool  # it is over

  def sentence(self) -> str:
    """What a person reads."""
    what = {LATE: f"rank {self.rank} is late", WAITING: "ranks wait for late ones that change from step to step",
            TRANSFER: "transfers are slow", GAP: "ranks pause between steps"}[self.kind]
    if self.over:
      return f"Step {self.step}: no longer so: {what}."
    return f"Step {self.step}: {what}, by {100 * self.share:.0f} % of the step, since about step {self.onset}."


class State(NamedTuple):
  """What is carried. S = R + 4 signals: each rank's lateness, waiting, transfer, gap, pauses."""

  past: np.ndarray  # [S, M] float32, the last usual values, seconds; NaN where there are fewer
  seen: np.ndarray  # [S] int64 values that ever went in
  usual: np.ndarray  # [S] median of the past, s
  threshold: np.ndarray  # [S] shares of the step
  step_time: float  # median of the usual steps, s
  times: np.ndarray  # [M] float32 step times
  sums: np.ndarray  # [S] CUSUM upwards, or downwards while active
  since: np.ndarray  # [S] step at which the sum last was 0
  excess: np.ndarray  # [S] what the signal exceeded its usual level by since then, added up, shares of the step
  steps: np.ndarray  # [S] steps since then
  raised: np.ndarray  # [S] of them, those in which it exceeded the allowance
  active: np.ndarray  # [S] bool, alarmed and not over
  until: int  # last step taken in; -1 before the first
  fresh: int  # steps since thresholds were made


def init(ranks: int) -> State:
  """State before the first step of a job of `ranks` ranks."""
  signals = ranks + len(_JOB)
  return State(np.full((signals, _MEMORY), np.nan, np.float32), np.zeros(signals, np.int64), np.full(signals, np.nan),
               np.full(signals, np.inf), float("nan"), np.full(_MEMORY, np.nan, np.float32), np.zeros(signals),
               np.full(signals, -1, np.int64), np.zeros(signals), np.zeros(signals, np.int64),
               np.zeros(signals, np.int64), np.zeros(signals, bool), -1, 0)


def update(state: State, steps: Steps) -> tuple[State, tuple[Alarm, ...]]:
  """Takes new steps in.

  Args:
    state: as `init` or the last `update` returned it.
    steps: steps after those taken in before; earlier ones are left out.

  Returns:
    The new state, and what began or was over in these steps, in their order.
  """
  new = np.flatnonzero(steps.number > state.until)
  values = _signals(steps)
  past, seen, times = state.past.copy(), state.seen.copy(), state.times.copy()
  sums, since, active = state.sums.copy(), state.since.copy(), state.active.copy()
  excess, number, raised = state.excess.copy(), state.steps.copy(), state.raised.copy()
  usual, threshold, step_time, fresh = state.usual, state.threshold, state.step_time, state.fresh
  alarms: list[Alarm] = []
  rows, until, cap = np.arange(len(seen)), state.until, _caps(len(seen))
  for at in new.tolist():
    until, now = int(steps.number[at]), values[:, at]
    known = np.isfinite(now) & np.isfinite(steps.step[at])
    ready = known & np.isfinite(threshold)
    if ready.any():
      share = (now - usual) / step_time
      more = np.where(active, ALLOWANCE - share, share - ALLOWANCE)
      sums = np.where(ready, np.maximum(sums + np.clip(more, -cap, cap), 0.0), sums)
      sums = np.minimum(sums, np.where(np.isfinite(threshold), 2 * _FAR * threshold, np.inf))
      excess, number, raised = excess + np.where(ready, share, 0.0), number + ready, raised + (ready & (more > 0))
      often = raised >= _STEADY * number
      steady = _steady(often & (number >= _FEWEST), sums, threshold, active)
      over = ready & (sums >= threshold)
      over[-1] &= sums[-1] >= _PAUSE_CAP if active[-1] else raised[-1] >= _TWICE
      passed, told = _passed(over, sums, threshold, active, steady, often | steady)
      for signal in told:
        alarms.append(_alarm(signal, until, since, active, excess / np.maximum(number, 1)))
      # A sum that has passed starts anew, the other way.
      active[passed] = ~active[passed]
      sums[passed] = 0.0
      anew = ready & (sums <= 0)
      since = np.where(anew, until, since)
      excess, number, raised = (np.where(anew, 0, kept) for kept in (excess, number, raised))
    # What is on its way to an alarm, or beyond one, is not what is usual.
    calm = known & ~active & (sums < 0.5 * np.where(np.isfinite(threshold), threshold, np.inf))
    past[rows[calm], seen[calm] % _MEMORY] = now[calm]
    seen = seen + calm
    if calm[-len(_JOB):].any():
      times[int(seen.max()) % _MEMORY] = steps.step[at]
    fresh += 1
    if fresh >= _REFRESH or (not np.isfinite(threshold).any() and int(seen.max()) >= LEARN):
      usual, threshold, step_time = _thresholds(past, seen, times, state.usual)
      fresh = 0
  return State(past, seen, usual, threshold, step_time, times, sums, since, excess, number, raised, active,
               until, fresh), tuple(alarms)


def follow(state: State, run: Run) -> tuple[State, tuple[Alarm, ...]]:
  """Takes in the steps of a run, or of a window of one, that were not taken in before."""
  first = int(np.searchsorted(run.steps, state.until, side="right"))
  if not run.collectives or first >= len(run.steps):
    return state, ()
  work = busy(run, slice(first, len(run.steps)))
  split = account(work)
  number = work.valid.sum(axis=0)
  mean = np.divide(np.where(work.valid, work.step, 0.0).sum(axis=0), number, out=np.full(len(number), np.nan),
                   where=number > 0)
  columns = [values for name, values in run.host_causes.columns.items() if name in _PAUSES]
  pause = np.nansum(np.stack(columns)[..., first:], axis=0, dtype=np.float64).max(axis=0) if columns else None
  return update(state, Steps(run.steps[first:], undelayed(work).sum(axis=0), split.transfer.sum(axis=0), work.runtime,
                             mean, pause))


def _signals(steps: Steps) -> np.ndarray:
  """[S, k] every rank's arrival after the lower median of all; mean earliness; transfer; mean gap; pauses. Seconds."""
  valid = np.isfinite(steps.arrival)
  number = np.maximum(valid.sum(axis=0), 1)
  some = valid.any(axis=0)
  arrival = np.where(valid, steps.arrival, np.inf)
  order = np.sort(arrival, axis=0)
  middle = np.take_along_axis(order, ((number - 1) // 2)[None], axis=0)[0]
  middle = np.where(some, middle, np.nan)
  # Of two ranks the other one is what a rank is compared with: by turns they are late and early.
  lateness = steps.arrival - (middle if len(valid) > 2 else steps.arrival[::-1])
  last = np.where(some, np.where(valid, steps.arrival, -np.inf).max(axis=0), np.nan)
  early = np.where(valid, last - steps.arrival, 0.0).sum(axis=0) / number
  gaps = np.isfinite(steps.gap)
  gap = np.where(gaps, steps.gap, 0.0).sum(axis=0) / np.maximum(gaps.sum(axis=0), 1)
  pause = np.full(len(gap), np.nan) if steps.pause is None else steps.pause
  return np.concatenate([lateness, np.stack([np.where(some, early, np.nan), steps.transfer, gap, pause])])


def _steady(often: np.ndarray, sums: np.ndarray, threshold: np.ndarray, active: np.ndarray) -> np.ndarray:
  """[S] signals that are raised in most steps; or far beyond their threshold, ranks so where few others nearly are.

  Where ranks take turns several of them gather sums, none in most steps; once that is told, no rank is named for it.
  """
  ranks = len(sums) - len(_JOB)
  far = sums >= _FAR * threshold
  for rank in np.flatnonzero(far[:ranks] & ~often[:ranks] & ~active[:ranks]).tolist():
    near = np.maximum(0.5, sums[rank] / threshold[rank] / _NEAR) * threshold[:ranks]
    rivals = int((~often[:ranks] & ~active[:ranks] & (sums[:ranks] >= near)).sum()) - 1
    far[rank] = rivals < min(2, ranks / 2) and not active[ranks + _JOB.index(WAITING)]
  return often | far


def _passed(over: np.ndarray, sums: np.ndarray, threshold: np.ndarray, active: np.ndarray,
            steady: np.ndarray, perhaps: np.ndarray) -> tuple[list[int], list[int]]:
  """Signals that change sides, and those of them that are told.

  A rank is late if it is so in most steps, or for long: where ranks take turns, each is late now and then. Waiting that
  a late rank or a pause explains is not told; while a rank's sum is well on its way, it waits for that.
  """
  ranks = len(sums) - len(_JOB)
  over = over.copy()
  gaps = ranks + np.array([_JOB.index(GAP), _JOB.index(_PAUSE)])
  over[:ranks] &= steady[:ranks]
  passed = np.flatnonzero(over).tolist()
  waiting = ranks + _JOB.index(WAITING)
  # Gaps and pauses are two views of one thing: the first of them is told when it begins, the last when it ends.
  now = [signal for signal in passed if signal in gaps]
  told = [signal for signal in passed if signal not in gaps[:1] or not (active[gaps[1]] or len(now) > 1)]
  told = [signal for signal in told if signal not in gaps[1:] or not active[gaps[0]]]
  if waiting not in passed or active[waiting]:
    return passed, told
  if active[:ranks].any() or over[:ranks].any() or active[gaps].any() or over[gaps].any():
    return passed, [signal for signal in told if signal != waiting]
  if (perhaps[:ranks] & (sums[:ranks] >= 0.5 * threshold[:ranks])).any():
    passed.remove(waiting)
    told.remove(waiting)
  return passed, told


def _alarm(signal: int, step: int, since: np.ndarray, active: np.ndarray, share: np.ndarray) -> Alarm:
  ranks = len(since) - len(_JOB)
  rank = signal if signal < ranks else None
  kind = LATE if rank is not None else _JOB[signal - ranks].replace(_PAUSE, GAP)
  return Alarm(kind, rank, step, int(since[signal]) + 1, float(share[signal]), bool(active[signal]))


def _thresholds(past: np.ndarray, seen: np.ndarray, times: np.ndarray, before: Sequence[float] | np.ndarray
                ) -> tuple[np.ndarray, np.ndarray, float]:
  """Usual level, threshold and step time from the past."""
  known = np.isfinite(times)
  step_time = float(np.median(times[known])) if known.any() else float("nan")
  ready = seen >= LEARN
  usual, threshold = np.asarray(before, np.float64).copy(), np.full(len(seen), np.inf)
  if not ready.any() or not step_time > 0:
    return usual, threshold, step_time
  own, cap = past[ready].astype(np.float64), _caps(len(seen))[ready, None]
  usual[ready] = _level(own / step_time, cap) * step_time
  y = np.clip((own - usual[ready, None]) / step_time, -cap, cap) - ALLOWANCE
  theta = np.full(len(own), np.inf)
  for width in _TOGETHER:
    sums = y.reshape(len(y), -1, width).sum(axis=2)
    there = np.isfinite(sums)
    enough = there.sum(axis=1) >= 3
    theta = np.where(enough, np.minimum(theta, _root(np.where(there, sums, 0.0), there)), theta)
  threshold[ready] = np.maximum(_WIDER * -np.log(RATE) / theta, _LEAST)
  return usual, threshold, step_time


def _level(values: np.ndarray, cap: np.ndarray) -> np.ndarray:
  """[S] about which what exceeds it, capped, adds up to 0; from the median on."""
  level = np.nanmedian(values, axis=1)
  for _ in range(12):
    level = level + np.nanmean(np.clip(values - level[:, None], -cap, cap), axis=1)
  return level


def _caps(signals: int) -> np.ndarray:
  """[S] what one step may add to each signal's sum."""
  caps = np.full(signals, _CAP)
  caps[signals - len(_JOB) + _JOB.index(GAP)] = _GAP_CAP
  caps[signals - len(_JOB) + _JOB.index(_PAUSE)] = _PAUSE_CAP
  return caps


def _root(y: np.ndarray, there: np.ndarray) -> np.ndarray:
  """[S] largest θ up to 200 with mean exp(θ y) ≤ 1; by bisection."""
  number = np.maximum(there.sum(axis=1), 1)
  low, high = np.zeros(len(y)), np.full(len(y), 200.0)
  for _ in range(30):
    middle = (low + high) / 2
    mean = np.where(there, np.exp(np.minimum(middle[:, None] * y, 50.0)), 0.0).sum(axis=1) / number
    low, high = np.where(mean <= 1, middle, low), np.where(mean <= 1, high, middle)
  return np.maximum(low, 1e-3)
