"""How long ranks are busy before each collective of a step, and what they wait in it.

All on each rank's own clock.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from jaxpace.diagnose.groups import RunGroups, run_groups
from jaxpace.diagnose.idea import busy_and_wait
from jaxpace.diagnose.limits import KEPT
from jaxpace.diagnose.selected_steps import LONGEST, slices
from jaxpace.runs.run import MISSING, Run

JUMP = 10.0
"""Seconds by which a rank's step differs from the other ranks' where its clock must have jumped:
all of them leave a collective at nearly the same time, and a step that is long on one rank is long
on all."""
_AROUND = 10
"""Steps before and after one that a rank's row is lost of, of which the nearest known one stands in
for it where the rank is known in as many of them."""


class StepTimes(NamedTuple):
  """How long each rank was busy before each collective of a step, and what it waited there.

  C collectives, R ranks, K steps; seconds; NaN where `valid` is False.
  """

  valid: np.ndarray  # [R, K] whether the rank's whole step is known
  step: np.ndarray  # [R, K] own exit to own exit
  arrival: np.ndarray  # [C, R, K] A', the applied delay included
  wait: np.ndarray  # [C, R, K] exposed wait
  compute: np.ndarray  # [R, K] of the first collective's arrival
  runtime: np.ndarray  # [R, K]
  pacing: np.ndarray  # [R, K]
  meetings: RunGroups  # who waits for whom
  # False where no collective is timestamped: then nobody waits for anybody that one could see
  synchronised: bool = True
  # [R, K] whether the rank's clock jumped, so that its step is not known; None: none
  jumped: np.ndarray | None = None
  apart_steps: bool = False  # whether the step before one is not the one before in the arrays
  in_flight: tuple[np.ndarray, np.ndarray, np.ndarray] | None = None
  """What `accounting.split` takes, where collectives overlap; None: nowhere."""

  @property
  def causes(self) -> tuple[np.ndarray, ...]:
    """[R, K] parts of the first collective's arrival, each a cause of being late."""
    return self.compute, self.runtime, self.pacing

  @property
  def undelayed(self) -> np.ndarray:
    """[C, R, K] arrivals with the rank's own delay taken out."""
    arrival = self.arrival.copy()
    arrival[0] -= self.pacing
    return arrival


_KEPT: weakref.WeakKeyDictionary[Run, dict[tuple[int, int], StepTimes]] = (
    weakref.WeakKeyDictionary())
"""Busy times of a run by first step and stop: a diagnosis goes through the run half a dozen times.
Of a run that is larger than fits the first chunks are kept."""


def chunks(run: Run) -> Iterator[slice]:
  """Slices of the step axis of a size that is quick to work on."""
  return slices(len(run.steps), run.ranks * max(1, len(run.collectives)))


def counted(run: Run, mask: np.ndarray) -> Iterator[tuple[slice, StepTimes]]:
  """The chunks that hold steps of `mask`, [K] bool, and what ranks do in these: of the other steps
  nothing is valid."""
  for part in chunks(run):
    if mask[part].any():
      work = busy(run, part)
      yield part, work._replace(valid=work.valid & mask[part])


def busy(run: Run, part: slice) -> StepTimes:
  """Measures arrivals and waits of the steps in `part`.

  A rank's step is known if the rank's row of that step and of the step before belong to the same,
  newest attempt and all times are there. Where single steps of a rank are lost that others have,
  its nearest known step stands in for them: without the late rank's rows per step would be long for
  nobody. Where collectives overlap, only the exposed part counts:
  entries and exits never run backwards on a rank. A gap or delay that is not known counts as 0
  (then it is compute).

  Returns:
    Arrays that can't be written to: the next who asks for the same steps gets them, too.
  """
  kept = _KEPT.setdefault(run, {})
  key = part.start, part.stop
  found = kept.get(key)
  if found is None:
    found = _with_lost_steps(run, part, _busy(run, part))
    for values in _arrays(found):
      values.flags.writeable = False
    if sum(values.nbytes for work in (found, *kept.values()) for values in _arrays(work)
           ) <= KEPT:
      kept[key] = found
  return found


def _arrays(work: StepTimes) -> list[np.ndarray]:
  return [values for values in (*work, *(work.in_flight or ())) if isinstance(values, np.ndarray)]


def _busy(run: Run, part: slice) -> StepTimes:
  size = part.stop - part.start
  # each step by itself: where it begins is known from elsewhere
  alone = run.previous_exit is not None
  before = part if alone else slice(max(part.start - 1, 0), part.stop)
  lead = part.start - before.start  # 0 for the first chunk: its first step has no step before
  newest = run.attempt[:, before].max(axis=0)
  current = (run.attempt[:, before] == newest) & (newest >= 0)
  timestamps = _timestamps(run, before)
  found = run_groups(run)
  apart = [grouped.of_rank == grouped.size for grouped in found.grouped]
  timestamps = [_in_part(*of) for of in zip(timestamps, apart, strict=True)]
  for (enter, leave, attempt), outside in zip(timestamps, apart, strict=True):
    there = (enter != MISSING) & (leave != MISSING) & (attempt == newest)
    there |= outside[:, None]  # a rank that takes no part has no timestamps there
    # nor has anybody where a loop took fewer turns, or a branch was not taken
    if alone:
      there |= (attempt < 0).all(axis=0)
    current &= there
  last_exit = np.maximum.reduce([leave for _, leave, _ in timestamps])
  current &= last_exit != MISSING
  valid, first = np.zeros((run.ranks, size), bool), np.zeros((run.ranks, size), np.int64)
  if run.previous_exit is not None:
    known = run.previous_exit[:, part] != MISSING
    valid |= current & known
    first[known] = run.previous_exit[:, part][known]
  else:
    adjacent = np.diff(run.steps[before]) == 1
    adjacent &= newest[1:] == newest[:-1]
    valid[:, 1 - lead:] = current[:, 1:] & current[:, :-1] & adjacent
    first[:, 1 - lead:] = last_exit[:, :-1]
  previous = first
  arrivals: list[np.ndarray] = []
  waits: list[np.ndarray] = []
  overlapping = False
  for enter, leave, _ in timestamps:
    arrival, wait, end = busy_and_wait(enter[:, lead:], leave[:, lead:], previous)
    if arrivals and not overlapping:
      early = valid & (enter[:, lead:] < previous)
      overlapping = bool(early.any()) and bool((early & (enter[:, lead:] != MISSING)).any())
    arrivals.append(_seconds(arrival, valid))
    waits.append(_seconds(wait, valid))
    previous = end
  arrival, wait, step = np.stack(arrivals), np.stack(waits), _seconds(previous - first, valid)
  jumped = _jumped(step, valid, found.joined) if run.collectives else None
  if jumped is not None:
    valid &= ~jumped
    for values in (step, *arrival, *wait):
      values[jumped] = np.nan
  in_flight = _in_flight(timestamps, lead, first, valid) if overlapping else None
  _begin_with_their_first(arrival, np.array(apart))
  pacing = np.clip(_known(run, "delay_applied", part, valid), 0.0, arrival[0])
  pacing += _held(run, before, lead, arrival, pacing)
  runtime = np.clip(_known(run, "gap", part, valid), 0.0, arrival[0] - pacing)
  work = StepTimes(
      valid=valid, step=step, arrival=arrival, wait=wait, compute=arrival[0] - pacing - runtime,
      runtime=runtime, pacing=pacing, meetings=found, synchronised=bool(run.collectives),
      jumped=jumped, apart_steps=alone, in_flight=in_flight)
  return work


def _with_lost_steps(run: Run, part: slice, work: StepTimes) -> StepTimes:
  """The same, with what a rank did in its nearest known step where single ones of it are lost."""
  if run.ranks < 2 or not _lost(work).any():
    return work
  begin = max(part.start - _AROUND, 0)
  wide = _busy(run, slice(begin, min(part.stop + _AROUND, len(run.steps))))
  valid, size = wide.valid, wide.valid.shape[1]
  at = np.arange(size)
  known = np.cumsum(np.pad(valid, ((0, 0), (_AROUND + 1, _AROUND))), axis=1)
  before = np.maximum.accumulate(np.where(valid, at, -1), axis=1)
  after = np.minimum.accumulate(np.where(valid, at, size)[:, ::-1], axis=1)[:, ::-1]
  lost = (_lost(wide) & (known[:, 2 * _AROUND + 1:] - known[:, :size] >= _AROUND)
          & (before >= 0) & (after < size) & (after - before <= _AROUND))
  nearest = np.where(lost, np.where(at - before <= after - at, before, after), at)
  nearest = nearest[:, part.start - begin:][:, :work.valid.shape[1]]

  def taken(values: np.ndarray) -> np.ndarray:
    return np.take_along_axis(values, nearest if values.ndim == 2 else nearest[None], axis=-1)

  rows: dict[str, Any] = {name: taken(values) for name, values in wide._asdict().items()
                          if isinstance(values, np.ndarray) and name != "jumped"}
  if wide.in_flight is not None:
    first, enter, leave = map(taken, wide.in_flight)
    rows["in_flight"] = first, enter, leave
  return work._replace(**rows)


def _lost(work: StepTimes) -> np.ndarray:
  """[R, K] ranks that are not known in a step that others are known in."""
  lost = ~work.valid & work.valid.any(axis=0)
  return lost if work.jumped is None else lost & ~work.jumped


def _held(run: Run, before: slice, lead: int, arrival: np.ndarray, pacing: np.ndarray
          ) -> np.ndarray | float:
  """What was held before collectives, [R, K] s, all of it part of the first one's arrival
  afterwards.

  Before a later one it is part of that one's arrival, from which it is moved there.
  """
  total: np.ndarray | float = 0.0
  for c, collective in enumerate(run.collectives):
    if collective.held is None:
      continue
    held = collective.held.held_ns[:, before][:, lead:]
    most = arrival[c] - pacing if c == 0 else arrival[c]
    seconds = np.clip(np.where(held == MISSING, 0, held) * 1e-9, 0.0, most)
    if c:
      arrival[c] -= seconds
      arrival[0] += seconds
    total = total + seconds
  return total


def _in_flight(timestamps: Sequence[tuple[np.ndarray, np.ndarray, np.ndarray]], lead: int,
               first: np.ndarray, valid: np.ndarray
               ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
  enters, leaves = [], []
  for enter, leave, _ in timestamps:
    enters.append(np.where(valid, np.maximum(enter[:, lead:], first), first))
    leaves.append(np.where(valid, np.maximum(leave[:, lead:], enters[-1]), first))
  return first, np.stack(enters), np.stack(leaves)


def _in_part(times: tuple[np.ndarray, np.ndarray, np.ndarray], apart: np.ndarray
             ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
  """Timestamps without those of the ranks that take no part in the collective."""
  if not apart.any():
    return times
  enter, leave, attempt = times
  return np.where(apart[:, None], MISSING, enter), np.where(apart[:, None], MISSING, leave), attempt


def _begin_with_their_first(arrival: np.ndarray, outside: np.ndarray) -> None:
  """Moves what ranks do before their first collective to the step's first one, where they take no
  part in that: where they are outside, [C, R] bool."""
  for rank in np.flatnonzero(outside[0]).tolist():
    first = int((~outside[:, rank]).argmax())
    if first:
      arrival[[0, first], rank] = arrival[[first, 0], rank]


def _jumped(step: np.ndarray, valid: np.ndarray,
            joined: np.ndarray) -> np.ndarray | None:
  """[R, K] ranks whose step differs so much from the others' that only their clock can have jumped;
  None: nobody's."""
  jumped = np.zeros(valid.shape, bool)
  for number in np.unique(joined):
    own = joined == number
    high = np.where(valid[own], step[own], -np.inf).max(axis=0)
    low = np.where(valid[own], step[own], np.inf).min(axis=0)
    odd = np.flatnonzero((high - low > JUMP) & np.isfinite(high) | (high > LONGEST) | (low < 0))
    if odd.size:
      at = np.ix_(own, odd)
      middle = np.nanmedian(step[at], axis=0)
      jumped[at] = valid[at] & ((np.abs(step[at] - middle) > JUMP) | (step[at] > LONGEST)
                                | (step[at] < 0))
  return jumped if jumped.any() else None


def _timestamps(run: Run, part: slice) -> list[tuple[np.ndarray, np.ndarray, np.ndarray]]:
  """Entry, exit and attempt of each collective; a step without any ends where the program does."""
  if run.collectives:
    return [(c.enter_ns[:, part], c.exit_ns[:, part], c.attempt[:, part]) for c in run.collectives]
  if run.end_ns is None:
    raise ValueError(
        "The run holds neither collectives nor step ends: there is nothing to account for.")
  return [(run.end_ns[:, part], run.end_ns[:, part], run.attempt[:, part])]


def _seconds(nanoseconds: np.ndarray, valid: np.ndarray) -> np.ndarray:
  return np.where(valid, nanoseconds * 1e-9, np.nan)


def _known(run: Run, name: str, part: slice, valid: np.ndarray) -> np.ndarray:
  """Seconds of a column, 0 where it is null, NaN where the step is not known."""
  if name not in run.durations:
    return np.where(valid, 0.0, np.nan)
  return np.where(valid, np.nan_to_num(run.durations[name][:, part].astype(np.float64), nan=0.0),
                  np.nan)
