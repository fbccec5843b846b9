"""Follows the ring of this process while programs write to it, keeps the executions that have
ended, with their order.

JAX does not say which program it dispatches: arguments, the mesh in context, the precision and more
choose it. But a device runs what is dispatched in order. Where events are lost, the numbers that
executions carry and the counts of those that have started say how many are missing.
"""

from __future__ import annotations

import bisect
import collections
import copy
import math
from collections.abc import Callable, Container, Mapping, Sequence
from typing import Any

import numpy as np

from jaxpace.core.detail import every, is_detailed
from jaxpace.core.observed import TAG_BITS
from jaxpace.core.ring_layout import NUMBER, VALUES
from jaxpace.observation.clocks import host_ring
from jaxpace.record.ring.executions import (
  NOTHING,
  DeviceBuffer,
  Executions,
  Splitter,
  iterations,
  join,
)

# Which steps are written in detail: one in so many, and what is unusual.

SLOW = 1.5
"""A step that takes so many times the running median opens the table for the next ones."""
AROUND = 4
"""Steps that are written in detail after a slow one."""
_MEDIAN_OF = 64
_LEAST = 8
_SHARE = 0.1
"""Of all steps, those written in detail because of slow ones."""
FIRST = 64
"""Steps at the beginning of a recording, and of each loop of the program, that are written in
detail, so that a short one can be judged."""


class Detail:
  """Chooses steps: those that all ranks draw, the first ones, and those around slow ones."""

  def __init__(self, asked: int | str = "auto"):
    """Begins; `asked` is of how many steps one is written in detail, or "auto"."""
    self.asked, self.every = asked, asked if isinstance(asked, int) else 1
    self._recent: collections.deque[float] = collections.deque(maxlen=_MEDIAN_OF)
    self._until = -1
    self._began, self._last = 0, -2
    self._spent, self._seen = 0.0, 0

  def settle(self, rows: int, ranks: int) -> dict[str, Any]:
    """Says for `run.json` which steps are written in detail, where these have so many rows of
    collectives: every process comes to the same, from the programs alone."""
    if self.asked == "auto" and (stretch := every(rows, ranks)) > self.every:
      self.every = stretch
    return {"every": self.every, "asked": self.asked}

  def choose(self, steps: np.ndarray, seconds: np.ndarray) -> np.ndarray:
    """[n] bool: which steps to write in detail.

    Args:
      steps: [n] numbers, rising.
      seconds: [n] how long each took from the end of the one before; NaN where not known.
    """
    if self.every <= 1:
      return np.ones(len(steps), bool)
    chosen = is_detailed(steps, self.every) | (steps <= self._until)
    begins = np.diff(steps, prepend=self._last) != 1
    place = np.maximum.accumulate(np.where(begins, np.arange(len(steps)), -1))
    began = np.where(place < 0, self._began, steps[place])
    chosen |= steps < began + FIRST
    if len(steps):
      self._began, self._last = int(began[-1]), int(steps[-1])
    known = seconds[np.isfinite(seconds)]
    recent = np.concatenate([np.array(self._recent), known])[-_MEDIAN_OF:]
    usual = float(np.median(recent)) if len(recent) >= _LEAST else np.inf
    for at in np.flatnonzero(seconds > SLOW * usual).tolist():
      # A job that is always unusual has its share, and no more.
      if self._spent <= _LEAST + _SHARE * (self._seen + at):
        self._until = int(steps[at]) + AROUND
        chosen |= (steps >= steps[at]) & (steps <= self._until)
        self._spent += 1 + AROUND
    self._seen += len(steps)
    self._recent.extend(known.tolist())
    return chosen


MOST_MARKS = 1 << 22
"""Timestamps of one program and device that wait for a `record` call, at most; the oldest are
dropped."""
_MANY, _MUCH = 20, 0.4
"""Iterations, and the fraction of a program's time that they take, from which on a loop is
training. The first one counts like the others: what comes before the loop is in it."""
_OWN = np.uint32((1 << TAG_BITS) - 1)


class Collector:
  """The executions of programs on this process's devices, in the order in which they began. Belongs
  to one thread."""

  def __init__(self, before: bool = False):
    """Begins with what is written from now on; with `before`, with what the ring still holds."""
    self._ring = host_ring.current()
    self.ranks = self._ring.ranks
    held = self._ring.layout.capacity if before else 0
    self._heads_then = self._ring.heads().tolist()
    self._buffers = [DeviceBuffer(max(0, head - held)) for head in self._heads_then]
    self._splitters: dict[tuple[int, int], Splitter] = {}
    self._ended: dict[tuple[int, int], list[Executions]] = {}
    self._passed: dict[tuple[int, int], int] = {}
    self._latest = [0] * len(self._buffers)
    # ns of the last event before each loss of some.
    self._gaps: list[int] = []
    # By program, how many executions have a place in the order, and when the last of them began.
    self._settled: dict[int, int] = {}
    self._last_began: dict[int, int] = {}

  @property
  def devices(self) -> list[int]:
    """`jax.Device.id` of each device buffer."""
    return [int(device) for device in self._ring.blocks["device"]]

  @property
  def buffers(self) -> int:
    """Devices of this process."""
    return len(self._buffers)

  @property
  def anything(self) -> bool:
    """Whether anything was written since it began."""
    return bool(host_ring.current().heads().tolist() != self._heads_then)

  @property
  def unread(self) -> float:
    """What was written and not read, as a fraction of the ring, of the device buffer with most."""
    heads = host_ring.current().heads()
    return float(max(head - buffer.position for head, buffer in zip(
        heads.tolist(), self._buffers, strict=True)) / self._ring.layout.capacity)

  def collect(self, programs: Callable[[], Container[int]]) -> None:
    """Reads what is new.

    Args:
      programs: returns the numbers of the programs to read. It is asked after their timestamps were
        read: a program may be compiled and run for the first time meanwhile.
    """
    host_ring.current()
    # Before what is read: a start that was counted and does not come is lost.
    started = {key: host_ring.executions(*key) for key in self._splitters}
    for buffer, follower in enumerate(self._buffers):
      slots, blocks = self._ring.events[buffer], self._ring.blocks
      since: dict[int, int] | None = None

      def head(blocks: np.ndarray = blocks, buffer: int = buffer) -> int:
        return int(blocks["head"][buffer])

      # What is written meanwhile is for the next time.
      end = head()
      while follower.position < end:
        tag, ns, lost = follower.take(slots, head)
        if lost:
          self._gaps.append(self._latest[buffer])
          since = {}
          for (own, _), splitter in self._splitters.items():
            if own == buffer:
              splitter.lose()
        if not len(ns) and not lost:
          break
        if len(ns):
          if since is not None:
            _first_numbers(ns, tag, since)
          self._split(buffer, ns, tag, programs())
      if since is not None:
        for (own, program), count in started.items():
          if own == buffer:
            self._pass(buffer, program, min(count, since.get(program, count)))

  def copied(self) -> Collector:
    """The same as far as it was read, so that what is taken out of it stays here."""
    other = copy.copy(self)
    other._ended = {key: list(kept) for key, kept in self._ended.items()}
    other._passed = dict(self._passed)
    return other

  def skip(self, buffers: Mapping[int, Sequence[int]]) -> None:
    """Counts what has run so far as over, and gives it no place in the order; what of it comes all
    the same is read. `buffers` as for `settle`, of the programs that are known by now."""
    for number, of in buffers.items():
      for buffer in of:
        self._passed[buffer, number] = host_ring.executions(buffer, number)
      self._settled[number] = self._ended_on_all(number, of)

  def passed(self, buffer: int, program: int) -> int:
    """Executions of a program that are over on a device buffer's device, lost ones counted."""
    return self._passed.get((buffer, program), 0)

  def settle(self, buffers: Mapping[int, Sequence[int]]) -> list[tuple[int, int]]:
    """Returns what has ended on all devices since the last call: program and number of each
    execution, in the order in which they began."""
    fresh: list[tuple[int, int, int]] = []
    for number, of in buffers.items():
      begin, end = self._settled.get(number, 0), self._ended_on_all(number, of)
      self._settled[number] = end
      if end > begin:
        fresh += zip(self._times(number, of, begin, end), [number] * (end - begin),
                     range(begin, end), strict=True)
    return [(number, at) for _, number, at in sorted(fresh)]

  def _ended_on_all(self, number: int, buffers: Sequence[int]) -> int:
    return min((self.passed(buffer, number) for buffer in buffers), default=0)

  def _times(self, number: int, buffers: Sequence[int], begin: int, end: int) -> list[int]:
    """When executions began, on the last device; of lost ones, when events were lost."""
    began = np.max([self._began(buffer, number, begin, end) for buffer in buffers], axis=0)
    gaps, latest, times = sorted(self._gaps), self._last_began.get(number, 0), []
    for ns in began.tolist():
      if not ns:
        at = bisect.bisect_left(gaps, latest)
        ns = gaps[at] if at < len(gaps) else latest
      latest = max(latest, ns)
      times.append(latest)
    self._last_began[number] = latest
    return times

  def _began(self, buffer: int, program: int, begin: int, end: int) -> np.ndarray:
    """[end - begin] int64 ns at which executions with these numbers began; 0 where lost, or
    taken."""
    found = np.zeros(end - begin, np.int64)
    for each in self._ended.get((buffer, program), ()):
      first, last = np.searchsorted(each.number, [begin, end])
      found[each.number[first:last] - begin] = each.start_ns[first:last]
    return found

  def seconds(self, program: int) -> float:
    """Time of a program's executions that were not taken, on the device that took longest. The
    first one, which warms up, counts like the median."""
    return max(self._seconds(buffer, program) for buffer in range(self.buffers))

  def _seconds(self, buffer: int, program: int) -> float:
    ran = join(self._ended.get((buffer, program), [NOTHING]))
    took = ran.end_ns - ran.start_ns
    return (float(took[1:].sum()) + float(np.median(took))) * 1e-9 if len(took) else 0.0

  def spent(self, program: int) -> float:
    """Time of a program's executions, one under way included, on the device that took longest."""
    return max(int((ran.end_ns - ran.start_ns).sum()) for buffer in range(self.buffers)
               for ran in [self._with_under_way(buffer, program)]) * 1e-9

  @property
  def under_way(self) -> set[int]:
    """Programs that have begun an execution since their last one ended."""
    return {program for (_, program), splitter in self._splitters.items() if splitter.has_begun}

  def _with_under_way(self, buffer: int, program: int) -> Executions:
    kept = self._ended.get((buffer, program), [])
    splitter = self._splitters.get((buffer, program))
    return join([*kept, NOTHING if splitter is None else splitter.under_way])

  def iterate(self, program: int, tag: int, times: int, other: int) -> int:
    """Takes the iterations of a program's loop, each of which ends where a timestamp with a tag has
    been written so many times, for executions of another program; those of one that is under way,
    too.

    Returns:
      How many there are on all its devices; 0, and nothing is taken, where the loop has few, or
      takes little of the program's time.
    """
    cut = {}
    for buffer in range(self.buffers):
      ran = self._with_under_way(buffer, program)
      if len(ran.number):
        cut[buffer] = iterations(ran, tag, times)
        if not _is_much(cut[buffer], ran):
          return 0
    for buffer, each in cut.items():
      self._ended[buffer, other] = [each]
      self._pass(buffer, other, len(each.number))
    return min((len(each.number) for each in cut.values()), default=0)

  def take(self, buffer: int, program: int, before: float = math.inf, by: str = "number"
           ) -> Executions:
    """Takes out the executions with numbers below `before`; or those that began before then, where
    it is by "start_ns"."""
    kept = self._ended.get((buffer, program))
    if not kept:
      return NOTHING
    joined = join(kept)
    taken = getattr(joined, by) < before
    self._ended[buffer, program] = [joined.picked(~taken)]
    return joined.picked(taken)

  def _split(self, buffer: int, ns: np.ndarray, tag: np.ndarray, programs: Container[int]) -> None:
    program = tag >> np.uint32(TAG_BITS)
    times = ns[tag & _OWN < VALUES]
    if len(times):
      self._latest[buffer] = int(times[-1])
    for number in np.unique(program).tolist():
      if number not in programs:
        continue
      own = program == number
      key = buffer, number
      if key not in self._splitters:
        self._splitters[key] = Splitter()
      ended = self._splitters[key].feed(tag[own] & _OWN, ns[own])
      if not len(ended.number):
        continue
      self._pass(buffer, number, int(ended.number[-1]) + 1)
      kept = self._ended.setdefault(key, [])
      kept.append(ended)
      while len(kept) > 1 and sum(len(each.ns) for each in kept) > MOST_MARKS:
        kept.pop(0)

  def _pass(self, buffer: int, program: int, count: int) -> None:
    self._passed[buffer, program] = max(count, self.passed(buffer, program))


def _is_much(cut: Executions, ran: Executions) -> bool:
  """Whether a loop has many iterations, and they take much of the time of its program. What comes
  before the loop is in the first one of each execution."""
  count, begins = len(cut.number), len(ran.number)
  if count < _MANY * begins:
    return False
  took = cut.end_ns - cut.start_ns
  later = np.diff(np.searchsorted(ran.end_ns, cut.end_ns), prepend=-1) == 0
  return bool(took[later].mean() * count >= _MUCH * (ran.end_ns - ran.start_ns).sum())


def _first_numbers(ns: np.ndarray, tag: np.ndarray, found: dict[int, int]) -> None:
  """Notes of each program how many of its executions come before the first that begins here."""
  starts = np.flatnonzero(tag & _OWN == NUMBER)
  for at in starts.tolist():
    found.setdefault(int(tag[at]) >> TAG_BITS, int(ns[at]))
