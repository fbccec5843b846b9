"""Follows the ring of this process while programs write to it, keeps the executions that have
ended, with their order.

JAX does not say which program it dispatches: arguments, the mesh in context, the precision and more
choose it. But a device runs what is dispatched in order. Where events are lost, the numbers that
executions carry and the counts of those that have started say how many are missing.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Container, Mapping, Sequence

import numpy as np

from jaxpace.core.observed import TAG_BITS
from jaxpace.core.ring_layout import NUMBER, VALUES
from jaxpace.observation.clocks import host_ring
from jaxpace.record.ring.executions import NOTHING, Executions, Lane, Splitter, join, part

MOST_MARKS = 1 << 22
"""Marks of one program and device that wait for a `record` call, at most; the oldest are
dropped."""
_OWN = np.uint32((1 << TAG_BITS) - 1)


class Collector:
  """Belongs to one thread."""

  def __init__(self, before: bool = False):
    """Begins with what is written from now on; with `before`, with what the ring still holds."""
    self._ring = host_ring.current()
    self.ranks = self._ring.ranks
    held = self._ring.layout.capacity if before else 0
    self._lanes = [Lane(max(0, head - held)) for head in self._ring.heads().tolist()]
    self._splitters: dict[tuple[int, int], Splitter] = {}
    self._ended: dict[tuple[int, int], list[Executions]] = {}
    self._passed: dict[tuple[int, int], int] = {}
    self._latest = [0] * len(self._lanes)
    self.gaps: list[int] = []
    """ns of the last event before each loss of some."""

  @property
  def devices(self) -> list[int]:
    """`jax.Device.id` of each lane."""
    return [int(device) for device in self._ring.blocks["device"]]

  @property
  def lanes(self) -> int:
    """Devices of this process."""
    return len(self._lanes)

  @property
  def lost(self) -> int:
    """Events that were written over before they were read."""
    return sum(lane.lost for lane in self._lanes)

  def collect(self, programs: Callable[[], Container[int]]) -> None:
    """Reads what is new.

    Args:
      programs: tells the numbers of the programs to read. It is asked after their marks were read:
        a program may be compiled and run for the first time meanwhile.
    """
    host_ring.current()
    self._drain(programs)

  def skip(self, lane: int, program: int) -> None:
    """Counts what a program has run so far as over; what of it comes all the same is read."""
    self._passed[lane, program] = host_ring.executions(lane, program)

  def passed(self, lane: int, program: int) -> int:
    """Executions of a program that are over on a lane's device, lost ones counted."""
    return self._passed.get((lane, program), 0)

  def began(self, lane: int, program: int, begin: int, end: int) -> np.ndarray:
    """[end - begin] int64 ns at which executions with these numbers began; 0 where lost, or
    taken."""
    found = np.zeros(end - begin, np.int64)
    for each in self._ended.get((lane, program), ()):
      first, last = np.searchsorted(each.number, [begin, end])
      found[each.number[first:last] - begin] = each.start_ns[first:last]
    return found

  def seconds(self, program: int) -> float:
    """Time of a program's executions that were not taken, on the device that took longest."""
    return max(sum(int((each.end_ns - each.start_ns).sum())
                   for each in self._ended.get((lane, program), ()))
               for lane in range(self.lanes)) * 1e-9

  def take(self, lane: int, program: int, before: int) -> Executions:
    """Takes out the executions with numbers below `before`."""
    kept = self._ended.get((lane, program))
    if not kept:
      return NOTHING
    joined = join(kept)
    count = int(np.searchsorted(joined.number, before))
    self._ended[lane, program] = [part(joined, count, len(joined.number))]
    return part(joined, 0, count)

  def _drain(self, programs: Callable[[], Container[int]]) -> None:
    # Before what is read: a start that was counted and does not come is lost.
    started = {key: host_ring.executions(*key) for key in self._splitters}
    for lane, follower in enumerate(self._lanes):
      slots, blocks = self._ring.events[lane], self._ring.blocks
      since: dict[int, int] | None = None

      def head(blocks: np.ndarray = blocks, lane: int = lane) -> int:
        return int(blocks["head"][lane])

      # What is written meanwhile is for the next time.
      end = head()
      while follower.position < end:
        taken = follower.take(slots, head)
        if taken.lost:
          self.gaps.append(self._latest[lane])
          since = {}
          for (own, _), splitter in self._splitters.items():
            if own == lane:
              splitter.lose()
        if not len(taken.ns) and not taken.lost:
          break
        if len(taken.ns):
          if since is not None:
            _first_numbers(taken.ns, taken.tag, since)
          self._split(lane, taken.ns, taken.tag, programs())
      if since is not None:
        for (own, program), count in started.items():
          if own == lane:
            self._pass(lane, program, min(count, since.get(program, count)))

  def _split(self, lane: int, ns: np.ndarray, tag: np.ndarray, programs: Container[int]) -> None:
    program = tag >> np.uint32(TAG_BITS)
    times = ns[tag & _OWN < VALUES]
    if len(times):
      self._latest[lane] = int(times[-1])
    for number in np.unique(program).tolist():
      if number not in programs:
        continue
      own = program == number
      key = lane, number
      if key not in self._splitters:
        self._splitters[key] = Splitter()
      ended = self._splitters[key].feed(tag[own] & _OWN, ns[own])
      if not len(ended.number):
        continue
      self._pass(lane, number, int(ended.number[-1]) + 1)
      kept = self._ended.setdefault(key, [])
      kept.append(ended)
      while len(kept) > 1 and sum(len(each.ns) for each in kept) > MOST_MARKS:
        kept.pop(0)


  def _pass(self, lane: int, program: int, count: int) -> None:
    self._passed[lane, program] = max(count, self.passed(lane, program))


def _first_numbers(ns: np.ndarray, tag: np.ndarray, found: dict[int, int]) -> None:
  """Notes of each program how many of its executions come before the first that begins here."""
  starts = np.flatnonzero(tag & _OWN == NUMBER)
  for at in starts.tolist():
    found.setdefault(int(tag[at]) >> TAG_BITS, int(ns[at]))


class ExecutionOrder:
  """The executions of programs, in the order in which they began. Belongs to one thread."""

  def __init__(self, collector: Collector, lanes: Mapping[int, Sequence[int]]):
    """Begins where a recording does.

    Args:
      collector: reads the ring.
      lanes: of each program that is known by now, the lanes whose devices it runs on.
    """
    self._collector = collector
    for number, of in lanes.items():
      for lane in of:
        collector.skip(lane, number)
    # By program, how many executions have a place in the order.
    self._settled = {number: self._passed(number, of) for number, of in lanes.items()}
    self._latest: dict[int, int] = {}

  def settle(self, lanes: Mapping[int, Sequence[int]]) -> list[tuple[int, int]]:
    """Returns what has ended on all devices since the last call: program and number of each
    execution, in their order. `lanes` as at the beginning, with newer programs."""
    fresh: list[tuple[int, int, int]] = []
    for number, of in lanes.items():
      begin, end = self._settled.get(number, 0), self._passed(number, of)
      self._settled[number] = end
      if end > begin:
        fresh += zip(self._times(number, of, begin, end), [number] * (end - begin),
                     range(begin, end), strict=True)
    return [(number, at) for _, number, at in sorted(fresh)]

  def _passed(self, number: int, lanes: Sequence[int]) -> int:
    return min((self._collector.passed(lane, number) for lane in lanes), default=0)

  def _times(self, number: int, lanes: Sequence[int], begin: int, end: int) -> list[int]:
    """When executions began, on the last device; of lost ones, when events were lost."""
    began = np.max([self._collector.began(lane, number, begin, end) for lane in lanes], axis=0)
    gaps, latest, times = sorted(self._collector.gaps), self._latest.get(number, 0), []
    for ns in began.tolist():
      if not ns:
        at = bisect.bisect_left(gaps, latest)
        ns = gaps[at] if at < len(gaps) else latest
      latest = ns
      times.append(latest)
    self._latest[number] = latest
    return times
