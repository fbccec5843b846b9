"""Finds the onset of a fault while the job runs: sequential tests on lateness, waiting, transfers
and gaps. Pure.

Each signal is a share of the step; its own past says what is usual (`stream_levels`). In two
stages:

- *Possible*: a CUSUM (Page 1954) adds up by how much a signal exceeds its usual level and an
  allowance of 2.5 % of the step, and passes a threshold that its own past sets. What a single step
  may add is capped, so that one pause, however long, is no onset.
- *Confirmed*, and only then reported: most of the last 24 steps were high. A machine that is busy
  with something else for ten steps costs those ten steps and is over before anybody could act; a
  fault stays. What is high in half of the steps only is reported once it has lasted 96 steps. A
  quiet spell ends what was possible.

A rank that has been late since the first step is no onset: its past knows nothing else. It is
reported once enough is known of it, and what is usual for it is then to be in time.

Pauses with a cause that the processes measure themselves (garbage collection, data, checkpoints)
are rare and long, and next to nothing at other times: two of them are an onset.

The report's own rules, asked every 4 steps about the last 64, or every 10 about the last 120, tell
less: of 122 faults of the fault lab (seeds 21 and 22) that begin mid-run they name 63 and 15 within
30 steps, with 8 and 3 false alarms in 14,040 healthy steps; this names 115, with none.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from jaxpace.diagnose import stream_levels as levels
from jaxpace.diagnose.accounting import account
from jaxpace.diagnose.inconclusive import inconclusive_of
from jaxpace.diagnose.limits import NEARLY_ALL, OFTEN
from jaxpace.diagnose.selected_steps import mean_known
from jaxpace.diagnose.step_times import busy
from jaxpace.diagnose.stream_levels import (
  GAP,
  LAST,
  LATE,
  TRANSFER,
  WAITING,
  Levels,
  NewSteps,
  Rules,
  late_from_start,
)
from jaxpace.diagnose.totals import undelayed
from jaxpace.runs.run import Run
from jaxpace.runs.step_causes import PAUSES

__all__ = ["GAP", "LATE", "TRANSFER", "WAITING", "Alarm", "NewSteps", "StreamState", "follow",
           "init", "update"]

# Fitted on the fault lab's runs of seeds 0 to 2; measurements/stream_lab_seed4 is what they are
# worth on others.
_MEMORY = 512
_REFRESH = 40
_LONG = 4 * LAST
"""Steps after which half of the last being high confirms."""
_STILL = 2
"""High steps of the latter half of those looked back on, at most, in a quiet spell."""
_TWICE = 2
"""Pauses with a cause that an onset takes; it is over after 80 steps without."""


class Alarm(NamedTuple):
  """A fault that began, or was over."""

  kind: str  # LATE, WAITING (intermittently late ranks), TRANSFER or GAP
  rank: int | None  # of LATE
  step: int  # at which it was found
  onset: int  # at which it began, about
  share: float  # of the usual step, mean since the onset
  over: bool  # it is over
  throughout: bool = False  # it has been so in all steps looked at; `onset` is the first of them

  def sentence(self) -> str:
    """What a person reads."""
    what = {LATE: f"rank {self.rank} is late",
            WAITING: "ranks wait for late ones that change from step to step",
            TRANSFER: "transfers are slow", GAP: "ranks pause between steps"}[self.kind]
    if self.over:
      return f"Step {self.step}: no longer so: {what}."
    by = f"Step {self.step}: {what}, by {100 * self.share:.0f} % of the step"
    if self.throughout:
      return f"{by}, in all steps looked at, from step {self.onset} on."
    return f"{by}, since about step {self.onset}."


class StreamSums(NamedTuple):
  """What adds up while something may have begun; S = R + 6 signals."""

  total: np.ndarray  # [S] CUSUM upwards, or downwards while active
  since: np.ndarray  # [S] step at which the sum last was 0
  # [S] what the signal exceeded its usual level by since then, added up, shares of the step
  excess: np.ndarray
  steps: np.ndarray  # [S] steps since then
  raised: np.ndarray  # [S] of them, those in which it exceeded the allowance
  recent: np.ndarray  # [S] uint64, a bit for each of the last 64 steps: whether it was high
  active: np.ndarray  # [S] bool, alarmed and not over


class StreamState(NamedTuple):
  """What is carried."""

  past: np.ndarray  # [S, M] float32, the last usual values, seconds; NaN where there are fewer
  seen: np.ndarray  # [S] int64 values that ever went in
  times: np.ndarray  # [M] float32 step times
  levels: Levels
  sums: StreamSums
  until: int  # last step taken in; -1 before the first
  fresh: int  # steps since levels were learnt
  first: int = -1  # first step taken in; -1 before that


def init(ranks: int) -> StreamState:
  """State before the first step of a job of `ranks` ranks."""
  number = ranks + len(levels.JOB)
  nothing, none = np.zeros(number), np.zeros(number, np.int64)
  return StreamState(np.full((number, _MEMORY), np.nan, np.float32), none,
                     np.full(_MEMORY, np.nan, np.float32), levels.unknown(number),
                     StreamSums(nothing, none - 1, nothing, none, none, np.zeros(number, np.uint64),
                                np.zeros(number, bool)), -1, 0)


def update(state: StreamState, steps: NewSteps, joined: np.ndarray
           ) -> tuple[StreamState, tuple[Alarm, ...]]:
  """Takes new steps in.

  Args:
    state: as `init` or the last `update` returned it.
    steps: steps after those taken in before; earlier ones are left out.
    joined: [R] ranks of different numbers never meet, and nobody waits for the other ones.

  Returns:
    The new state, and what began or was over in these steps, in their order.
  """
  new = np.flatnonzero(steps.number > state.until)
  values = levels.signals(steps, joined)
  rule = levels.rules(len(state.seen), steps.pause is not None)
  past, seen, times = state.past.copy(), state.seen.copy(), state.times.copy()
  usual, sums, until, fresh, first = state.levels, state.sums, state.until, state.fresh, state.first
  alarms: list[Alarm] = []
  rows = np.arange(len(seen))
  for at in new.tolist():
    until, now = int(steps.number[at]), values[:, at]
    first = until if first < 0 else first
    known = np.isfinite(now) & bool(np.isfinite(steps.step[at]))
    ready = known & np.isfinite(usual.threshold)
    if ready.any():
      sums, reported = _advance(sums, now, ready, usual, rule, until)
      alarms += reported
    # What is on its way to an alarm, or beyond one, is not what is usual.
    calm = known & ~sums.active & (sums.total < 0.5 * usual.threshold)
    past[rows[calm], seen[calm] % _MEMORY] = now[calm]
    seen = seen + calm
    if calm[-len(levels.JOB):].any():
      times[int(seen.max()) % _MEMORY] = steps.step[at]
    fresh += 1
    if (fresh >= _REFRESH
        or (not np.isfinite(usual.threshold).any() and int(seen.max()) >= levels.LEARN)):
      usual = levels.learn(past, seen, times, usual, rule)
      fresh = 0
      late = [rank for rank in late_from_start(past, seen, usual, len(seen) - len(levels.JOB))
              if not sums.active[rank]]
      if late:
        alarms += [Alarm(LATE, rank, until, first, float(usual.middle[rank] / usual.step_time),
                         False, True)
                   for rank in late]
        past, usual, sums = _told_late(past, usual, sums, late)
  return StreamState(
      past=past, seen=seen, times=times, levels=usual, sums=sums, until=until, fresh=fresh,
      first=first), tuple(alarms)


def _told_late(past: np.ndarray, usual: Levels, sums: StreamSums,
               late: list[int]) -> tuple[np.ndarray, Levels, StreamSums]:
  """What is usual for ranks that have always been late becomes to be in time, as noisy as they
  are."""
  past[late] -= usual.middle[late, None].astype(past.dtype)
  level, middle, total, active = (x.copy()
                                  for x in (usual.usual, usual.middle, sums.total, sums.active))
  level[late] -= middle[late]
  middle[late], total[late], active[late] = 0.0, 0.0, True
  return past, usual._replace(usual=level, middle=middle), sums._replace(total=total, active=active)


def follow(state: StreamState, run: Run) -> tuple[StreamState, tuple[Alarm, ...]]:
  """Takes in the steps of a run, or of a window of one, that were not taken in before."""
  first = int(np.searchsorted(run.steps, state.until, side="right"))
  if not run.collectives or first >= len(run.steps):
    return state, ()
  work = busy(run, slice(first, len(run.steps)))
  split = account(work)
  mean = mean_known(work.step, axis=0)
  columns = [values for name, values in run.host_causes.columns.items() if name in PAUSES]
  pause = (np.nansum(np.stack(columns)[..., first:], axis=0, dtype=np.float64).max(axis=0)
           if columns else None)
  arrival = undelayed(work).sum(axis=0)
  # nobody is reported late by timestamps that may say nothing of it
  if inconclusive_of(run, work):
    arrival = np.full_like(arrival, np.nan)
  return update(state, NewSteps(run.steps[first:], arrival, split.transfer.sum(axis=0),
                                work.runtime, mean, pause), work.meetings.joined)


def _advance(sums: StreamSums, now: np.ndarray, ready: np.ndarray, usual: Levels, rule: Rules,
             step: int) -> tuple[StreamSums, list[Alarm]]:
  """Takes one step of [S] seconds in; `ready`: those that are known now and have a past."""
  active = sums.active
  share = (now - usual.usual) / usual.step_time
  more = np.where(active, rule.allowance - share, share - rule.allowance)
  total = np.where(ready, np.maximum(sums.total + np.clip(more, -rule.cap, rule.cap), 0.0),
                   sums.total)
  excess, number = sums.excess + np.where(ready, share, 0.0), sums.steps + ready
  raised = sums.raised + (ready & (more > 0))
  high = ~active & (now - usual.middle > rule.high * usual.step_time)
  recent = np.where(ready, (sums.recent << np.uint64(1)) | high, sums.recent)
  count = _high(recent, LAST)
  quiet = (ready & ~active & rule.fades & (number >= LAST // 2)
           & (_high(recent, LAST // 2) <= _STILL))
  total = np.where(quiet, 0.0, total)
  over = ready & (total >= np.where((count >= LAST - 1) & ~active, usual.sure, usual.threshold))
  over &= active | (count >= rule.need) | ((number >= _LONG) & (count >= LAST // 2)) | (
      (raised >= rule.strikes) & (number >= LAST // 2))
  over[-1] &= total[-1] >= levels.PAUSE_CAP if active[-1] else raised[-1] >= _TWICE
  alarms: list[Alarm] = []
  if over.any():
    often = raised >= NEARLY_ALL * number
    # of few steps, intermittently late ranks may well be late in all; more so once they were
    # reported
    steady = often & (number >= LAST // 2 * (1 + _any(active, WAITING)))
    passed, reported = _passed(over, total, usual.threshold, active, steady,
                           often & (number >= OFTEN) | steady)
    share = excess / np.maximum(number, 1)
    alarms = [_alarm(signal, step, int(sums.since[signal]), bool(active[signal]),
                     float(share[signal]), len(now))
              for signal in reported]
    # A sum that has passed starts anew, the other way.
    active = active.copy()
    active[passed] = ~active[passed]
    total[passed] = 0.0
  anew = ready & (total <= 0)
  return StreamSums(total, np.where(anew, step, sums.since), np.where(anew, 0.0, excess),
                    np.where(anew, 0, number), np.where(anew, 0, raised), recent, active), alarms


def _passed(over: np.ndarray, sums: np.ndarray, threshold: np.ndarray, active: np.ndarray,
            steady: np.ndarray, perhaps: np.ndarray) -> tuple[list[int], list[int]]:
  """Signals that change sides, and those of them that are reported.

  A rank is late if it is so in most steps, or for long: where ranks take turns, each is late now
  and then. Waiting that a late rank explains is not reported; while a rank's sum is well on its
  way, it waits for that.
  """
  ranks = len(sums) - len(levels.JOB)
  over = over.copy()
  over[:ranks] &= steady[:ranks]
  passed = np.flatnonzero(over).tolist()
  waits = levels.views(len(sums), WAITING)
  waiting = [signal for signal in passed if signal in waits and not active[signal]]
  if waiting and (perhaps[:ranks] & (sums[:ranks] >= 0.5 * threshold[:ranks])).any() and not (
      active[:ranks] | over[:ranks]).any():
    passed = [signal for signal in passed if signal not in waiting]
    waiting = []
  reported = []
  for signal in passed:
    same = [other for other in levels.views(len(sums), levels.kind(signal, ranks))
            if other != signal]
    # Another view of it has been reported, or is reported now; at its end, another view of it goes
    # on.
    if not any(active[other] and other not in passed or other in reported for other in same):
      reported.append(signal)
  if (active[:ranks] | over[:ranks]).any():
    reported = [signal for signal in reported if signal not in waiting]
  return passed, reported


def _high(recent: np.ndarray, steps: int) -> np.ndarray:
  """[S] how many of the last so many steps were high."""
  return np.asarray(np.bitwise_count(recent & np.uint64((1 << steps) - 1)))


def _any(active: np.ndarray, kind: str) -> bool:
  """Whether any view of `kind` is active."""
  return bool(active[list(levels.views(len(active), kind))].any())


def _alarm(signal: int, step: int, since: int, over: bool, share: float, number: int) -> Alarm:
  ranks = number - len(levels.JOB)
  return Alarm(levels.kind(signal, ranks), signal if signal < ranks else None, step, since + 1,
               share, over)
