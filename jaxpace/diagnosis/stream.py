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
LARGE = 0.1
"""Half of what is found sooner where it is large: noise with a heavy tail hides 5 % for long, and 20 % not at all. And
half of what gaps between steps must take that no measured cause explains, where causes are measured: the report has
them as a finding from there on."""
RATE = 1e-6
"""False alarms of one signal a step, at most, as far as its past tells."""
LEARN = 60
"""Steps before the first alarm."""
_MEMORY = 512
_REFRESH = 40
_CAP, _GAP_CAP, _LARGE_CAP, _PAUSE_CAP = 0.15, 0.4, 0.6, 2.0
"""Share of the step that one step adds at most; gaps are long and rare where they are a fault at all, and pauses with
a cause may make up for 25 steps and more: that cap is 5 % of 40 steps."""
_TWICE = 2
"""Pauses with a cause that an onset takes; it is over after 80 steps without."""
_LEAST, _LARGE_LEAST = 0.45, 2.5
"""Least threshold: a fault of 5 % of the step is found within 18 steps, and no two steps by themselves reach it; nor do
four, where each adds more: one of 50 % of the step is found within 7."""
_STEADY, _FAR = 0.75, 2.5
"""A rank is told late if it is so in this part of the steps since the onset, or its sum is that many times as high."""
_FEWEST = 12
"""Steps in which a rank must be late to be told so; of three, ranks by turns may well be late in all. Twice as many
where ranks by turns were told already."""
_NEAR = 3.0
"""Ranks whose sums are alike within this factor may be taking turns."""
_PERHAPS = 5
"""Steps in which a rank must have been late for waiting not to be told yet: of two by turns one is late in any few.
Before as many have passed waiting isn't told, as it can't be known whether it is for one rank."""
_TOGETHER = (1, 4, 16)
"""θ is also that of sums over as many neighbouring steps: what wanders is no onset."""
_WIDER = 1.15
"""Times the measured θ demands: it is measured on few steps."""
LATE, WAITING, TRANSFER, GAP = "late_rank", "waiting", "transfer", "gap"
_LARGE_WAITING, _LARGE_TRANSFER, _PAUSE = "large_waiting", "large_transfer", "pause"
_JOB = (WAITING, TRANSFER, GAP, _LARGE_WAITING, _LARGE_TRANSFER, _PAUSE)
_TOLD_AS = {_LARGE_WAITING: WAITING, _LARGE_TRANSFER: TRANSFER, _PAUSE: GAP}
"""Two views of one thing: the first of them is told when it begins, the last when it ends."""
_CAPS = {GAP: _GAP_CAP, _LARGE_WAITING: _LARGE_CAP, _LARGE_TRANSFER: _LARGE_CAP, _PAUSE: _PAUSE_CAP}


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
  """What is carried. S = R + 6 signals: each rank's lateness, then those of `_JOB`."""

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
  allowance = _allowances(len(seen), steps.pause is not None)
  for at in new.tolist():
    until, now = int(steps.number[at]), values[:, at]
    known = np.isfinite(now) & np.isfinite(steps.step[at])
    ready = known & np.isfinite(threshold)
    if ready.any():
      share = (now - usual) / step_time
      more = np.where(active, allowance - share, share - allowance)
      sums = np.where(ready, np.maximum(sums + np.clip(more, -cap, cap), 0.0), sums)
      sums = np.minimum(sums, np.where(np.isfinite(threshold), 2 * _FAR * threshold, np.inf))
      excess, number, raised = excess + np.where(ready, share, 0.0), number + ready, raised + (ready & (more > 0))
      often = raised >= _STEADY * number
      steady = _steady(often & (number >= _FEWEST * (1 + _active(active, WAITING))), sums, threshold, active)
      over = ready & (sums >= threshold)
      over[_views(len(over), WAITING)] &= (number > _PERHAPS)[_views(len(over), WAITING)]
      over[-1] &= sums[-1] >= _PAUSE_CAP if active[-1] else raised[-1] >= _TWICE
      passed, told = _passed(over, sums, threshold, active, steady, often & (number >= _PERHAPS) | steady)
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
      usual, threshold, step_time = _thresholds(past, seen, times, state.usual, allowance)
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
  """[S, k] every rank's arrival after the lower median of all, earliness, transfer, mean gap, pauses; seconds.

  Earliness is that for work, mean over the ranks that wait, so that two ranks wait as long as many: gaps have a signal
  of their own. Waiting and transfers are looked at twice.
  """
  valid = np.isfinite(steps.arrival)
  number = np.maximum(valid.sum(axis=0), 1)
  some = valid.any(axis=0)
  arrival = np.where(valid, steps.arrival, np.inf)
  order = np.sort(arrival, axis=0)
  middle = np.take_along_axis(order, ((number - 1) // 2)[None], axis=0)[0]
  middle = np.where(some, middle, np.nan)
  # Of two ranks the other one is what a rank is compared with: by turns they are late and early.
  lateness = steps.arrival - (middle if len(valid) > 2 else steps.arrival[::-1])
  work = steps.arrival - np.where(np.isfinite(steps.gap), np.minimum(steps.gap, steps.arrival), 0.0)
  last = np.where(some, np.where(valid, work, -np.inf).max(axis=0), np.nan)
  early = np.where(some, np.where(valid, last - work, 0.0).sum(axis=0) / np.maximum(number - 1, 1), np.nan)
  gaps = np.isfinite(steps.gap)
  gap = np.where(gaps, steps.gap, 0.0).sum(axis=0) / np.maximum(gaps.sum(axis=0), 1)
  pause = np.full(len(gap), np.nan) if steps.pause is None else steps.pause
  return np.concatenate([lateness, np.stack([early, steps.transfer, gap, early, steps.transfer, pause])])


def _steady(often: np.ndarray, sums: np.ndarray, threshold: np.ndarray, active: np.ndarray) -> np.ndarray:
  """[S] signals that are raised in most steps; or far beyond their threshold, ranks so where few others nearly are.

  Where ranks take turns several of them gather sums, none in most steps; once that is told, a rank is named for it only
  if no other is anywhere near.
  """
  ranks = len(sums) - len(_JOB)
  far = sums >= _FAR * threshold
  turns = _active(active, WAITING)
  for rank in np.flatnonzero(far[:ranks] & ~often[:ranks] & ~active[:ranks]).tolist():
    near = np.maximum(0.5, sums[rank] / threshold[rank] / _NEAR) * threshold[:ranks]
    rivals = int((~often[:ranks] & ~active[:ranks] & (sums[:ranks] >= near)).sum()) - 1
    far[rank] = rivals < min(2, ranks / 2) and (not turns or rivals == 0 and sums[rank] >= 1.9 * _FAR * threshold[rank])
  return often | far


def _passed(over: np.ndarray, sums: np.ndarray, threshold: np.ndarray, active: np.ndarray,
            steady: np.ndarray, perhaps: np.ndarray) -> tuple[list[int], list[int]]:
  """Signals that change sides, and those of them that are told.

  A rank is late if it is so in most steps, or for long: where ranks take turns, each is late now and then. Waiting that
  a late rank explains is not told; while a rank's sum is well on its way, it waits for that.
  """
  ranks = len(sums) - len(_JOB)
  over = over.copy()
  over[:ranks] &= steady[:ranks]
  passed = np.flatnonzero(over).tolist()
  waiting = [signal for signal in passed if signal in _views(len(sums), WAITING) and not active[signal]]
  if waiting and (perhaps[:ranks] & (sums[:ranks] >= 0.5 * threshold[:ranks])).any() and not (
      active[:ranks] | over[:ranks]).any():
    passed = [signal for signal in passed if signal not in waiting]
    waiting = []
  told = []
  for signal in passed:
    same = [other for other in _views(len(sums), _kind(signal, ranks)) if other != signal]
    # Another view of it has been told, or is told now; at its end, another view of it goes on.
    if not any(active[other] and other not in passed or other in told for other in same):
      told.append(signal)
  if (active[:ranks] | over[:ranks]).any():
    told = [signal for signal in told if signal not in waiting]
  return passed, told


def _kind(signal: int, ranks: int) -> str:
  """What a signal is told as."""
  if signal < ranks:
    return LATE
  name = _JOB[signal - ranks]
  return _TOLD_AS.get(name, name)


def _views(signals: int, kind: str) -> list[int]:
  """The job's signals that are told as `kind`."""
  ranks = signals - len(_JOB)
  return [signal for signal in range(ranks, signals) if _kind(signal, ranks) == kind]


def _active(active: np.ndarray, kind: str) -> bool:
  """Whether any view of `kind` is active."""
  return bool(active[_views(len(active), kind)].any())


def _alarm(signal: int, step: int, since: np.ndarray, active: np.ndarray, share: np.ndarray) -> Alarm:
  ranks = len(since) - len(_JOB)
  rank = signal if signal < ranks else None
  return Alarm(_kind(signal, ranks), rank, step, int(since[signal]) + 1, float(share[signal]), bool(active[signal]))


def _thresholds(past: np.ndarray, seen: np.ndarray, times: np.ndarray, before: Sequence[float] | np.ndarray,
                allowance: np.ndarray) -> tuple[np.ndarray, np.ndarray, float]:
  """Usual level, threshold and step time from the past."""
  known = np.isfinite(times)
  step_time = float(np.median(times[known])) if known.any() else float("nan")
  ready = seen >= LEARN
  usual, threshold = np.asarray(before, np.float64).copy(), np.full(len(seen), np.inf)
  if not ready.any() or not step_time > 0:
    return usual, threshold, step_time
  own, cap = past[ready].astype(np.float64), _caps(len(seen))[ready, None]
  usual[ready] = _level(own / step_time, cap) * step_time
  y = np.clip((own - usual[ready, None]) / step_time, -cap, cap) - allowance[ready, None]
  theta = np.full(len(own), np.inf)
  for width in _TOGETHER:
    sums = y.reshape(len(y), -1, width).sum(axis=2)
    there = np.isfinite(sums)
    enough = there.sum(axis=1) >= 3
    theta = np.where(enough, np.minimum(theta, _root(np.where(there, sums, 0.0), there)), theta)
  least = np.where(cap[:, 0] > _CAP, np.where(allowance[ready] > ALLOWANCE, _LARGE_LEAST, _LEAST), _LEAST)
  threshold[ready] = np.maximum(_WIDER * -np.log(RATE) / theta, least)
  return usual, threshold, step_time


def _level(values: np.ndarray, cap: np.ndarray) -> np.ndarray:
  """[S] about which what exceeds it, capped, adds up to 0; from the median on."""
  level = np.nanmedian(values, axis=1)
  for _ in range(12):
    level = level + np.nanmean(np.clip(values - level[:, None], -cap, cap), axis=1)
  return level


def _caps(signals: int) -> np.ndarray:
  """[S] what one step may add to each signal's sum."""
  return np.array([_CAP] * (signals - len(_JOB)) + [_CAPS.get(name, _CAP) for name in _JOB])


def _allowances(signals: int, causes: bool) -> np.ndarray:
  """[S] shares of the step by which each signal may exceed its usual level for good; `causes`: pauses are measured."""
  large = {_LARGE_WAITING, _LARGE_TRANSFER} | ({GAP} if causes else set())
  return np.array([ALLOWANCE] * (signals - len(_JOB)) + [LARGE if name in large else ALLOWANCE for name in _JOB])


def _root(y: np.ndarray, there: np.ndarray) -> np.ndarray:
  """[S] largest θ up to 200 with mean exp(θ y) ≤ 1; by bisection."""
  number = np.maximum(there.sum(axis=1), 1)
  low, high = np.zeros(len(y)), np.full(len(y), 200.0)
  for _ in range(30):
    middle = (low + high) / 2
    mean = np.where(there, np.exp(np.minimum(middle[:, None] * y, 50.0)), 0.0).sum(axis=1) / number
    low, high = np.where(mean <= 1, middle, low), np.where(mean <= 1, high, middle)
  return np.maximum(low, 1e-3)
