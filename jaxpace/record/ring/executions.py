"""From a device's ring to what it did: events, executions of a program, each time a collective ran
in one, and the sums of time.

A collective may stay open while its device computes and goes through others: one that overlaps with
the backward pass, say. Only its exposed time counts, after the last of the others that ended before
it. What lies between those is computing. So collectives are gone through in the order of their
exits.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from jaxpace.core.observed import TAG_BITS
from jaxpace.core.plan import Collective
from jaxpace.core.ring_layout import END_TAG, NUMBER, START_TAG, VALUES


class Executions(NamedTuple):
  """Executions of one program on one device that have ended, and their timestamps; n and m of
  them."""

  # [n] int64, rising: how many had started on this device before
  number: np.ndarray
  # [n] int64
  start_ns: np.ndarray
  # [n] int64
  end_ns: np.ndarray
  # [m] int64, place of the timestamp's execution in the arrays above; rising
  of: np.ndarray
  # [m] uint32, without the program's number
  tag: np.ndarray
  # [m] int64; from the tag `VALUES` on a number, no time
  ns: np.ndarray

  def picked(self, chosen: np.ndarray) -> Executions:
    """Some of them: [n] bool."""
    if chosen.all():
      return self
    kept = chosen[self.of]
    return Executions(self.number[chosen], self.start_ns[chosen], self.end_ns[chosen],
                      (np.cumsum(chosen) - 1)[self.of[kept]], self.tag[kept], self.ns[kept])


MOST_MARKS = 1 << 21
"""Timestamps of an execution that has not ended, at most: one with more is dropped."""
_NONE = np.empty(0, np.int64)
NOTHING = Executions(_NONE, _NONE, _NONE, _NONE, np.empty(0, np.uint32), _NONE)


def join(parts: list[Executions]) -> Executions:
  """Joins successive executions of one program and device."""
  if len(parts) == 1:
    return parts[0]
  offsets = np.cumsum([0, *(len(each.number) for each in parts[:-1])])
  shifted = [each._replace(of=each.of + offset)
             for each, offset in zip(parts, offsets, strict=True)]
  return Executions(*map(np.concatenate, zip(*shifted, strict=True)))


def iterations(ran: Executions, tag: int, times: int = 1) -> Executions:
  """Takes the iterations of a loop for executions: each ends where a timestamp with a tag has been
  written so many times. What follows the last one of an execution is left out.

  >>> at = np.arange(6)
  >>> ran = Executions(np.array([0]), np.array([9]), np.array([20]), 0 * at,
  ...                  np.array([2, 3, 2, 3, 2, 3], np.uint32), 10 + at)
  >>> cut = iterations(ran, 3)
  >>> cut.number.tolist(), cut.start_ns.tolist(), cut.end_ns.tolist(), cut.of.tolist()
  ([0, 1, 2], [9, 11, 13], [11, 13, 15], [0, 0, 1, 1, 2, 2])
  >>> iterations(ran, 3, 2).end_ns.tolist()
  [13]
  """
  ends = np.flatnonzero(ran.tag == tag)
  ends = ends[_count_before(ran.of[ends]) % times == times - 1]
  own, end_ns = ran.of[ends], ran.ns[ends]
  begins = np.diff(own, prepend=-1) > 0
  start_ns = np.where(begins, ran.start_ns[own], np.roll(end_ns, 1))
  of = np.searchsorted(ends, np.arange(len(ran.tag)))
  kept = np.append(own, -1)[of] == ran.of
  return Executions(np.arange(len(ends)), start_ns, end_ns, of[kept], ran.tag[kept], ran.ns[kept])


class Splitter:
  """Splits the events of one program and device as they come.

  A device ends an execution before it begins the next one, and the end timestamp waits for all
  results. So what comes between two end timestamps belongs to one execution. What comes between an
  end timestamp and the next start timestamp does too: the first collectives may wait for nothing
  but the program's arguments, and so be entered before the start timestamp is written.
  """

  def __init__(self) -> None:
    """Begins; of an execution that is under way nothing is kept."""
    self._tag, self._ns = np.empty(0, np.uint32), _NONE
    # Whether what is kept begins where an execution does.
    self._complete = True

  def lose(self) -> None:
    """Says that events are missing between what came and what comes: what has not ended is
    dropped."""
    self._tag, self._ns, self._complete = np.empty(0, np.uint32), _NONE, False

  @property
  def has_begun(self) -> bool:
    """Whether an execution has begun that has not ended."""
    return bool((self._tag == START_TAG).any())

  @property
  def under_way(self) -> Executions:
    """The execution that has begun, as if it ended with its last timestamp."""
    times = self._ns[self._tag < VALUES]
    return copy.copy(self).feed(np.array([END_TAG], np.uint32), times[-1:]) if len(times) else (
        NOTHING)

  def feed(self, tag: np.ndarray, ns: np.ndarray) -> Executions:
    """Takes events and gives the executions that they bring to an end.

    One that has not ended when the next begins is dropped.
    """
    tag, ns = np.concatenate([self._tag, tag]), np.concatenate([self._ns, ns])
    ends = np.flatnonzero(tag == END_TAG)
    ended, complete = int(ends[-1]) + 1 if ends.size else 0, self._complete
    self._tag, self._ns = tag[ended:], ns[ended:]
    self._complete = complete or ended > 0
    if len(self._tag) > MOST_MARKS:
      self.lose()
    if not ended:
      return NOTHING
    tag, ns = tag[:ended], ns[:ended]
    of = np.cumsum(tag == END_TAG) - (tag == END_TAG)
    # Where several began and one ended, the last one did.
    numbers = np.bincount(of[tag == NUMBER], minlength=len(ends))
    later, first = np.zeros(len(ends), np.int64), np.full(len(ends), -1)
    later[of[tag == NUMBER]] = np.flatnonzero(tag == NUMBER)
    uncut = numbers == 1
    uncut[0] &= complete
    kept = np.arange(len(tag)) >= np.where(uncut, 0, later)[of]
    starts = np.flatnonzero(kept & (tag == START_TAG))[::-1]
    first[of[starts]] = starts
    whole, start_ns = (numbers > 0) & (first >= 0), ns[first]
    marks = kept & whole[of] & (tag != NUMBER) & (tag != START_TAG) & (tag != END_TAG)
    timed = marks & (tag < VALUES)
    np.minimum.at(start_ns, of[timed], ns[timed])
    place = np.cumsum(whole) - 1
    return Executions(ns[later[whole]], start_ns[whole], ns[ends[whole]], place[of[marks]],
                      tag[marks], ns[marks])


class DeviceBuffer:
  """Follows one device buffer.

  A slot's `seq` says which event is in it. One that a timestamp is just writing ends what is taken,
  and is given up where it stays unfinished for long.
  """

  def __init__(self, position: int = 0, patience: int = 8):
    """Begins behind so many events; `patience` is how many calls in a row wait for one slot."""
    self.position = position
    self._patience, self._waited = patience, 0

  def take(self, slots: np.ndarray, head: Callable[[], int], *, final: bool = False
           ) -> tuple[np.ndarray, np.ndarray, int]:
    """Takes what is new. Call again until nothing comes and nothing is lost.

    Args:
      slots: [capacity] `core.ring_layout.EVENT`, the buffer's events; another thread may be writing
        them.
      head: returns how many events were begun so far.
      final: nobody writes any more, so what isn't there is lost.

    Returns:
      Tags, [n] uint32, and times, [n] int64 ns, of the next events in order and without a hole
      between them; and how many events before these were written over, or never finished.
    """
    capacity, reached = len(slots), head()
    begin = max(self.position, reached - capacity)
    count = max(reached - begin, 0)
    offsets = np.arange(count)
    copied = slots[(begin % capacity + offsets) % capacity]
    # What was begun meanwhile may have been written into slots that were just copied.
    skipped = max(0, min(count, head() - capacity - begin))
    expected = ((begin + 1) % 2**32 + offsets.astype(np.uint64)) % np.uint64(2**32)
    good = copied["seq"] == expected
    good[:skipped] = False
    if final or self._waited >= self._patience:
      # Go on at the first that is there.
      there = np.flatnonzero(good)
      skipped = int(there[0]) if there.size else count
    bad = np.flatnonzero(~good[skipped:])
    stop = skipped + (int(bad[0]) if bad.size else count - skipped)
    before, lost = self.position, (begin - self.position if count else 0) + skipped
    self.position += lost + stop - skipped
    self._waited = self._waited + 1 if self.position == before and head() > before else 0
    chosen = copied[skipped:stop]
    return chosen["tag"].astype(np.uint32), chosen["ns"].astype(np.int64), lost


class Occurrences(NamedTuple):
  """Times that collectives ran, by execution and entry; m of them."""

  # [m] int64, place of the execution
  execution: np.ndarray
  # [m] int64, index of the `Collective`
  collective: np.ndarray
  # [m] int64, how often it had run before in this execution
  iteration: np.ndarray
  # [m] int64
  enter_ns: np.ndarray
  # [m] int64, never before the entry
  exit_ns: np.ndarray


def occurrences(executions: Executions, collectives: Sequence[Collective]) -> Occurrences:
  """Matches enter and exit timestamps: the t-th with a tag is of the t-th time that its collective
  ran. One that lacks a timestamp is left out."""
  index = np.array([each.index for each in collectives], np.int64)
  tags = np.array([each.enter_tag for each in collectives], np.int64)
  # By tag: the place of the collective that it is of, -1 for none.
  most = int(tags.max(initial=-2)) + 2
  place_of = np.full(most + 1, -1)
  place_of[tags[tags >= 0]] = place_of[tags[tags >= 0] + 1] = np.flatnonzero(tags >= 0)
  at = np.flatnonzero(place_of[np.minimum(executions.tag, most)] >= 0)
  if not at.size:
    return Occurrences(_NONE, _NONE, _NONE, _NONE, _NONE)
  of, tag, ns = executions.of[at], executions.tag[at].astype(np.int64), executions.ns[at]
  iteration, place = _count_before(of << TAG_BITS | tag), place_of[tag]
  shape = len(executions.number), len(collectives), int(iteration.max()) + 1
  run, leaves = np.ravel_multi_index((of, place, iteration), shape), tag > tags[place]
  found, enter, leave = np.intersect1d(run[~leaves], run[leaves], True, return_indices=True)
  execution, place, iteration = np.unravel_index(found, shape)
  enter = ns[~leaves][enter]
  leave = np.maximum(ns[leaves][leave], enter)
  order = np.lexsort((leave, enter, execution))
  return Occurrences(execution[order], index[place[order]], iteration[order], enter[order],
                     leave[order])


def _count_before(values: np.ndarray) -> np.ndarray:
  """How many equal values stand before each."""
  order = np.argsort(values, kind="stable")
  place, before = np.arange(len(values)), np.empty(len(values), np.int64)
  fresh = np.diff(values[order], prepend=-1) > 0
  before[order] = place - np.maximum.accumulate(np.where(fresh, place, 0))
  return before


FORWARD, BACKWARD, UPDATE, COMPUTE = range(4)
PHASES = {"forward": FORWARD, "backward": BACKWARD, "update": UPDATE}
"""Any other phase is `COMPUTE`: it is unknown."""


def exposed(of: np.ndarray, enter: np.ndarray, leave: np.ndarray
            ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
  """From when to when each of m collectives was waited for: where they overlap, each instant counts
  once, for the one that ends first.

  Args:
    of: [m] the execution or step of each; those of different ones never overlap.
    enter: [m] ns.
    leave: [m] ns, not before `enter`.

  Returns:
    Their order by execution and exit, [m] places; and, in that order, when waiting began and ended,
    [m] ns each.
  """
  order = np.lexsort((enter, leave, of))
  of, enter, leave = of[order], enter[order], leave[order]
  begin = enter.copy()
  # Exits rise within an execution.
  same = of[1:] == of[:-1]
  begin[1:][same] = np.maximum(enter[1:], leave[:-1])[same]
  return order, np.minimum(begin, leave), leave


def sums(start: np.ndarray, end: np.ndarray, execution: np.ndarray, enter: np.ndarray,
         leave: np.ndarray, phase: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
  """Sums up what executions spent their time with.

  Between two collectives of the same phase, a device computes that phase; before the first one, if
  it is the forward pass's, the forward pass; after the last one, if it is the update's, the update.
  All else can't be separated and is `COMPUTE`.

  Args:
    start: [n] ns, of the executions.
    end: [n] ns.
    execution: [m] place of each occurrence's execution, rising.
    enter: [m] ns.
    leave: [m] ns.
    phase: [m] one of the four numbers.

  Returns:
    [n] ns in collectives; where several overlap, the exposed time of each. And [n, 4] ns by phase
    of what was computed; -1 where nothing is known to belong to it.
  """
  n = len(start)
  leave = np.maximum(leave, enter)
  enter = np.clip(enter, start[execution], end[execution])
  leave = np.clip(leave, enter, end[execution])
  order, begin, stop = exposed(execution, enter, leave)
  execution, phase = execution[order], phase[order]
  base = start[execution]
  begin, stop = begin - base, stop - base
  sync = np.bincount(execution, stop - begin, n).astype(np.int64)

  computed, known = np.zeros((n, 4), np.int64), np.zeros((n, 4), bool)

  def add(which: np.ndarray, kind: np.ndarray, duration: np.ndarray) -> None:
    np.add.at(computed, (which, kind), duration)
    known[which, kind] = True

  same = execution[1:] == execution[:-1]
  opens, closes = (np.flatnonzero(np.insert(~same, at, True)[:len(execution)])
                   for at in (0, len(same)))
  add(execution[opens], np.where(phase[opens] == FORWARD, FORWARD, COMPUTE), begin[opens])
  add(execution[closes], np.where(phase[closes] == UPDATE, UPDATE, COMPUTE),
      (end - start)[execution[closes]] - stop[closes])
  # Where they overlap there is nothing between them.
  inner = np.flatnonzero(same & (begin[1:] > stop[:-1]))
  add(execution[inner], np.where(phase[inner] == phase[inner + 1], phase[inner], COMPUTE),
      begin[inner + 1] - stop[inner])
  bare = np.setdiff1d(np.arange(n), execution)
  add(bare, np.full(len(bare), COMPUTE), (end - start)[bare])
  return sync, np.where(known, computed, -1)
