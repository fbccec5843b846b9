"""Finds the onset of a fault while the job runs: what lateness, waiting, transfers and gaps were in
the last steps, against what is usual. Pure.

Each signal is a share of the step, and its own past says what is usual. Something has begun if most
of the last 24 steps, or half of the last 96, are by 2.5 % of the step above the usual one, and
above what most of any 24 steps of the past reach: the mean of that over windows of the past and
five of its standard deviations, so that noise that wanders, or has a heavy tail, asks for more. One
pause, however long, is no onset. A machine that is busy with something else for ten steps costs
those ten steps and is over before anybody could act; a fault stays.

A rank that has been late since the first step is no onset: its past knows nothing else. It is
reported once enough is known of it, and what is usual for it is then to be in time.

Pauses with a cause that the processes measure themselves (garbage collection, data, checkpoints)
are rare and long, and next to nothing at other times: two of them are an onset, as are two of most
of a step where all that lies between steps is measured as one. Where no causes are measured three
long gaps are, unless as many come by chance in that job.

The report's own rules, asked every 4 steps about the last 64, or every 10 about the last 120, tell
less: of 122 faults of the fault lab (seeds 21 and 22) that begin mid-run they name 63 and 15 within
30 steps, with 8 and 3 false alarms in 14,040 healthy steps; a stream that goes by each signal's own
past (CUSUMs then) named 115, with none.
"""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

import numpy as np

from jaxpace.diagnose.accounting import account
from jaxpace.diagnose.episodes import binomial_tail
from jaxpace.diagnose.inconclusive import inconclusive_of
from jaxpace.diagnose.lateness import split_series
from jaxpace.diagnose.limits import COSTLY, FEWEST, MOST, NEARLY_ALL, PART, SHOWS, UNEXPLAINED
from jaxpace.diagnose.phases import on_purpose, pauses_in
from jaxpace.diagnose.selected_steps import mean_known
from jaxpace.diagnose.step_times import busy
from jaxpace.diagnose.totals import lower_median
from jaxpace.diagnose.words.names import percent
from jaxpace.runs.run import Run

# What the stream of alarms looks at: each rank's lateness, and the job's own signals.

LATE, WAITING, TRANSFER, GAP = "late_rank", "waiting", "transfer", "gap"
_JOB = (WAITING, TRANSFER, GAP, GAP)
"""What the job's signals, after the ranks', are reported as: the last one is pauses with a
cause."""

# Set looking at synthetic jobs of 2 and 8 ranks; docs/how_sure.md says what that is worth.
LEARN = 60
"""Steps before the first alarm."""
_LAST, _LONG = 24, 96
"""Steps that are looked back on to tell what lasts from what passes by."""
_PAST, _REFRESH = 512, 40
"""Usual steps that are kept, and steps after which they are looked at again."""
_NEED = {LATE: 18, WAITING: 18, TRANSFER: 20, GAP: 24}
"""Of the last 24 steps, those that count as most."""
_SURE, _FEW = 5.0, 3.0
"""Standard deviations: one in a million. Of few windows they are too small: more by 3 windows a
number of them."""
_TWICE = 2
"""Pauses with a cause that an onset takes."""
_CAP, _PAUSE_CAP = 0.4, 2.0
"""Shares of the step that a rare gap or pause counts for at most; a pause makes up for many
steps."""
_RATE = 1e-6
"""Of steps in which as many of the last were struck by chance."""


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
  between: bool = False
  """Whether `pause` is all that a process does between two steps."""


class Alarm(NamedTuple):
  """A fault that began, or was over."""

  kind: str  # LATE, WAITING (intermittently late ranks), TRANSFER or GAP
  rank: int | None  # of LATE
  step: int  # at which it was found
  onset: int  # at which it began, about
  share: float  # of the usual step, mean since the onset, or median where that is more
  over: bool  # it is over
  throughout: bool = False  # it has been so in all steps looked at; `onset` is the first of them

  def sentence(self) -> str:
    """What a person reads."""
    what, over = {
        LATE: (f"rank {self.rank} is late", f"rank {self.rank} is in time again"),
        WAITING: ("ranks wait for late ones that change from step to step",
                  "ranks no longer wait for late ones that change"),
        TRANSFER: ("transfers are slow", "transfers are as quick as usual again"),
        GAP: ("ranks pause between steps", "ranks no longer pause between steps")}[self.kind]
    if self.over:
      return f"Step {self.step}: {over}."
    by = f"Step {self.step}: {what}, by {percent(self.share)} of the step"
    if self.throughout:
      return f"{by}, in all steps looked at, from step {self.onset} on."
    return f"{by}, since about step {self.onset}."


class Rules(NamedTuple):
  """What is asked of each of S signals; shares of the step."""

  high: np.ndarray  # [S] above the median: such a step is high
  lowest: np.ndarray  # [S] of the last 24 steps in their order of size, that which must be high
  rare: dict[int, tuple[int, float]]
  """Signals of which a few long steps are an onset: how many, and what each counts at most."""


class StreamState(NamedTuple):
  """What is carried. S = R + 5 signals: each rank's lateness; the job's waiting, transfers, gaps
  and pauses; and the step itself."""

  last: np.ndarray  # [S, 96] s, the last steps, the newest last
  numbers: np.ndarray  # [96] of these steps
  past: np.ndarray  # [S, 512] s, usual steps before, NaN where there are fewer
  seen: np.ndarray  # [S] int64 values that ever went into it
  # What is usual, s; NaN while it is not known:
  middle: np.ndarray  # [S] median
  beyond: np.ndarray  # [2, S] what most of 24 steps, and half of 96, must exceed
  often: np.ndarray  # [S] part of the steps that are high
  step_time: float  # median
  active: np.ndarray  # [S] bool, alarmed and not over
  taken: int  # steps taken in
  until: int  # number of the last one; -1 before the first
  first: int  # of the first one


def init(ranks: int) -> StreamState:
  """State before the first step of a job of `ranks` ranks."""
  size = ranks + len(_JOB) + 1
  unknown = np.full(size, np.nan)
  return StreamState(
      np.full((size, _LONG), np.nan), np.zeros(_LONG, np.int64), np.full((size, _PAST), np.nan),
      np.zeros(size, np.int64), unknown, np.full((2, size), np.nan), unknown, float("nan"),
      np.zeros(size, bool), 0, -1, -1)


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
  values = signals(steps, joined)
  rule = _rules(len(values), steps.pause is not None, steps.between)
  state = state._replace(past=state.past.copy(), seen=state.seen.copy(),
                         active=state.active.copy())
  alarms: list[Alarm] = []
  new = np.flatnonzero(steps.number > state.until)
  last = np.concatenate([state.last, values[:, new]], axis=1)
  numbers = np.concatenate([state.numbers, steps.number[new]])
  for begin, at in enumerate(new.tolist(), 1):
    window = slice(begin, begin + _LONG)
    state = _take(state, numbers[window], last[:, window], rule)
    if state.step_time > 0 and np.isfinite(steps.step[at]):
      state, told = _test(state, rule)
      alarms += told
    known = state.step_time > 0
    if state.taken % _REFRESH == 0 or not known and state.taken >= LEARN:
      state, told = _learn(state, rule)
      alarms += told
  return state, tuple(alarms)


def follow(state: StreamState, run: Run) -> tuple[StreamState, tuple[Alarm, ...]]:
  """Takes in the steps of a run, or of a window of one, that were not taken in before."""
  first = int(np.searchsorted(run.steps, state.until, side="right"))
  if not run.collectives or first >= len(run.steps):
    return state, ()
  work = busy(run, slice(first, len(run.steps)))
  split = account(work)
  mean = mean_known(work.step, axis=0)
  columns = list(pauses_in(run).values())
  pause = np.sum(columns, axis=0)[:, first:].max(axis=0) if columns else None
  gap = np.maximum(work.runtime - on_purpose(run)[first:], 0.0)
  arrival = work.undelayed.sum(axis=0)
  # nobody is reported late by timestamps that may say nothing of it
  if inconclusive_of(run, work):
    arrival = np.full_like(arrival, np.nan)
  return update(state, NewSteps(run.steps[first:], arrival, split.transfer.sum(axis=0),
                                gap, mean, pause, "between" in run.host_causes.columns),
                work.meetings.joined)


# The signals, and what is asked of them.

@functools.lru_cache(maxsize=16)
def _rules(size: int, causes: bool, between: bool) -> Rules:
  """The rules for so many signals; `causes`: whether pauses are measured; `between`: with all else
  between two steps.

  Gaps that no measured cause explains must take as much as half of what the report needs.
  """
  names = (LATE,) * (size - len(_JOB) - 1) + _JOB
  high = np.array([SHOWS] * (size - 1) + [np.inf])
  rare = {size - 2: (_TWICE, _PAUSE_CAP)}
  # Where all is measured that a process does between two steps, which varies in every step, a pause
  # takes nearly all of one. Of the fault lab's seeds 25 and 26 the same faults are named with 0.6
  # to 1 of it.
  if between:
    high[-2] = NEARLY_ALL
  if causes:
    high[-3] = UNEXPLAINED / 2
  else:
    rare[size - 3] = FEWEST, _CAP
  return Rules(high, np.array([_LAST - _NEED[name] for name in names] + [0]), rare)


def signals(steps: NewSteps, joined: np.ndarray) -> np.ndarray:
  """[S, k] every rank's arrival after the lower median of all, earliness, transfer, mean gap,
  pauses, the step; seconds.

  Earliness is that for work, mean over the ranks that wait, so that two ranks wait as long as many:
  gaps have a signal of their own.
  """
  lateness = np.full(steps.arrival.shape, np.nan)
  early, waiting = np.zeros(steps.arrival.shape[1]), np.zeros(steps.arrival.shape[1])
  for number in np.unique(joined):
    own = np.flatnonzero(joined == number)
    lateness[own], part = _lateness(steps.arrival[own], steps.gap[own])
    those = np.maximum(np.isfinite(steps.arrival[own]).sum(axis=0) - 1, 0)  # the ranks that wait
    early += np.nan_to_num(part) * those
    waiting += those
  early = np.where(np.isfinite(steps.arrival).any(axis=0), early / np.maximum(waiting, 1), np.nan)
  gap = np.nan_to_num(mean_known(steps.gap, axis=0))
  pause = np.full(len(gap), np.nan) if steps.pause is None else steps.pause
  return np.concatenate([lateness, np.stack([early, steps.transfer, gap, pause, steps.step])])


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


# What is usual.

def _take(state: StreamState, numbers: np.ndarray, last: np.ndarray, rule: Rules) -> StreamState:
  """Takes one step in: [96] `numbers` and [S, 96] seconds of the last steps with it. What has left
  the last steps without an alarm becomes usual."""
  rare = list(rule.rare)
  before = state.last[:, -_LAST].copy()
  before[rare] = state.last[rare, 0]
  calm = np.flatnonzero(np.isfinite(before) & ~state.active)
  state.past[calm, state.seen[calm] % _PAST] = before[calm]
  state.seen[calm] += 1
  number = int(numbers[-1])
  return state._replace(last=last, numbers=numbers, taken=state.taken + 1, until=number,
                        first=number if state.first < 0 else state.first)


def _learn(state: StreamState, rule: Rules) -> tuple[StreamState, list[Alarm]]:
  """Learns what is usual, of the past or, while that is short, of the last steps; and tells of the
  ranks that have been late in all of them."""
  samples = np.full(state.past.shape, np.nan)
  samples[:, :_LONG] = state.last
  samples = np.where((state.seen < LEARN)[:, None], samples, state.past)
  number = np.isfinite(samples).sum(axis=1)
  if number[-1] < LEARN or not np.nanmedian(samples[-1]) > 0:
    return state, []
  step_time = float(np.nanmedian(samples[-1]))
  middle, beyond, often = state.middle.copy(), state.beyond.copy(), state.often.copy()
  late: list[int] = []
  for size in np.unique(number[number >= LEARN]).tolist():
    own = np.flatnonzero(number == size)
    values = samples[own][np.isfinite(samples[own])].reshape(len(own), size)
    level = np.median(values, axis=1)
    windows = np.sort(np.lib.stride_tricks.sliding_window_view(values, _LAST, axis=1)
                      [:, ::int(PART * _LAST)])
    most = np.take_along_axis(windows, rule.lowest[own, None, None], axis=2)[..., 0]
    strays = _SURE * most.std(axis=1) * (1 + _FEW * _LAST / size)
    ranks = own < len(number) - len(_JOB) - 1
    if ranks.any():  # a rank that seems steadier than most is so by chance
      strays[ranks] = np.maximum(strays[ranks], np.median(strays[ranks]))
    high = level + rule.high[own] * step_time
    middle[own], beyond[1, own] = level, np.maximum(high, level + strays)
    beyond[0, own] = np.maximum(high, most.mean(axis=1) + strays)
    often[own] = (values > high[:, None]).mean(axis=1)
    always = (_always_late(values / step_time, strays / step_time) & ranks
              & ~state.active[own] & (state.seen[own] <= _PAST))
    # usual for these is then to be in time, as noisy as they are
    state.past[own[always], :size] = (values - level[:, None])[always]
    state.seen[own[always]], state.active[own[always]] = size, True
    late += own[always].tolist()
  alarms = [Alarm(LATE, rank, state.until, state.first, float(middle[rank] / step_time), False,
                  True) for rank in sorted(late)]
  middle[late] = 0.0
  return state._replace(middle=middle, beyond=beyond, often=often, step_time=step_time), alarms


def _always_late(shares: np.ndarray, strays: np.ndarray) -> np.ndarray:
  """[S] whether a rank was surely late from the first of [S, n] steps on."""
  least = np.maximum(COSTLY, strays * math.sqrt(_LAST / shares.shape[1]))
  return (np.median(shares, axis=1) >= least) & ((shares > SHOWS).mean(axis=1) >= MOST)


# What has begun, and what is over.

def _test(state: StreamState, rule: Rules) -> tuple[StreamState, list[Alarm]]:
  """Tests the last steps of all signals."""
  active, ranks = state.active, len(state.last) - len(_JOB) - 1
  high = state.last[:, ::-1] - state.middle[:, None] > (rule.high * state.step_time)[:, None]
  soon = high[:, :_LAST].sum(axis=1)
  # In most steps nothing can begin, for lack of high ones, and nothing end.
  could = high[:, 0] & (soon >= np.minimum(_LAST - rule.lowest, _LAST // 2))
  if not (active.any() or could.any() or high[list(rule.rare)].any()):
    return state, []
  values = np.nan_to_num(state.last[:, ::-1], nan=-np.inf)
  most = np.take_along_axis(np.sort(values[:, :_LAST]), rule.lowest[:, None], axis=1)[:, 0]
  half = np.partition(values, _LONG // 2, axis=1)[:, _LONG // 2]
  begins = (most > state.beyond[0]) | (half > state.beyond[1]) & (soon >= _LAST // 2)
  begins &= high[:, 0]
  ends = soon <= PART * _LAST
  for signal, (need, cap) in rule.rare.items():
    above = (values[signal] - state.middle[signal]) / state.step_time
    begins[signal] = _struck(np.clip(above, 0.0, cap), high[signal], need,
                             float(state.often[signal]))
    ends[signal] = not high[signal].any()
  begins &= ~active
  ends &= active & np.isfinite(values[:, 0])
  # Waiting that a late rank explains is not reported; while one may be found, it waits for that.
  named = bool((active | begins)[:ranks].any())
  if not named and (high[:ranks, :_LAST // 2].mean(axis=1) >= NEARLY_ALL).any():
    begins[ranks] = False
  changed = begins | ends
  reported = changed.copy()
  reported[ranks] &= not named
  reported[-3] &= not (active[-2] and not ends[-2])  # pauses have been reported, and go on
  alarms = [_alarm(state, signal, values[signal], high[signal], rule)
            for signal in np.flatnonzero(reported).tolist()]
  return state._replace(active=active ^ changed), alarms


def _struck(above: np.ndarray, high: np.ndarray, need: int, often: float) -> bool:
  """Whether a few steps of the last ones, the newest first, were long, and more than by chance.

  Args:
    above: [k] shares of the step by which they were above the usual one, capped.
    high: [k] bool, those that were long.
    need: how many it takes at least.
    often: part of the usual steps that are long.
  """
  mean = above.cumsum() / np.arange(1, len(above) + 1)
  for number, at in enumerate(np.flatnonzero(high).tolist(), 1):
    if (number >= need and mean[at] >= SHOWS
        and binomial_tail(number, at + 1, often) <= _RATE):
      return True
  return False


def _alarm(state: StreamState, signal: int, values: np.ndarray, high: np.ndarray, rule: Rules
           ) -> Alarm:
  """What is reported of a signal whose last steps, the newest first, changed their level."""
  numbers = state.numbers[::-1]
  known = np.isfinite(values)
  if signal in rule.rare:
    onset = int(numbers[high.nonzero()[0].max(initial=0)])
  else:
    onset = split_series(values[::-1], state.numbers, int(numbers[_LAST // 2]))
  ranks = len(state.last) - len(_JOB) - 1
  since = values[known & (numbers >= onset)]
  # A rank that waits for another one's pause is early by all of it, in that one step.
  level = max(since.mean(), np.median(since))
  share = (level - state.middle[signal]) / state.step_time
  return Alarm(LATE if signal < ranks else _JOB[signal - ranks], signal if signal < ranks else None,
               state.until, onset, float(share), bool(state.active[signal]))
