"""Which execution each call of an observed function was, counted from the ring.

JAX does not say which program it dispatches: arguments, the mesh in context, the precision and more
choose it. But a device runs what is dispatched in order, so the k-th execution of any of the
function's programs is of the k-th call. Where events are lost, the numbers that executions carry
and the counts of those that have started say how many are missing.
"""

from __future__ import annotations

import bisect
import sys
from collections.abc import Mapping, Sequence

import numpy as np

from jaxpace.trace.marks.collect import Collector
from jaxpace.trace.marks.table import Range


class CallOrder:
  """The executions of one observed function in the order of its calls. Belongs to one thread."""

  def __init__(self, collector: Collector, lanes: Mapping[int, Sequence[int]], calls: int):
    """Begins where a recording does.

    Args:
      collector: reads the ring.
      lanes: of each program that is known by now, the lanes whose devices it runs on.
      calls: made by now.
    """
    self._collector = collector
    for number, of in lanes.items():
      for lane in of:
        collector.skip(lane, number)
    # Executions by program, of which the calls are known.
    self._settled = {number: self._passed(number, of) for number, of in lanes.items()}
    self._latest: dict[int, int] = {}
    started = [sum(collector.passed(lane, number) for number, of in lanes.items() if lane in of)
               for lane in range(collector.lanes)]
    # A call that raised after it was dispatched has run and is not counted.
    self._surplus = max(0, max(started, default=0) - calls)
    self._first = sum(self._settled.values()) - self._surplus
    self._order: list[tuple[int, int]] = []

  @property
  def known(self) -> int:
    """Calls so far of which the executions are known; all, where no program is."""
    return self._first + len(self._order) if self._settled else sys.maxsize

  def settle(self, lanes: Mapping[int, Sequence[int]]) -> None:
    """Takes in what has ended on all devices; `lanes` as at the beginning, with newer programs."""
    fresh: list[tuple[int, int, int]] = []
    for number, of in lanes.items():
      begin, end = self._settled.get(number, 0), self._passed(number, of)
      self._settled[number] = end
      if end > begin:
        fresh += zip(self._times(number, of, begin, end), [number] * (end - begin),
                     range(begin, end), strict=True)
    self._order += [(number, at) for _, number, at in sorted(fresh)]

  def ranges(self, begin: int, end: int) -> tuple[Range, ...]:
    """What the calls from `begin` to before `end` ran; those are known. Earlier ones are
    forgotten."""
    found: list[Range] = []
    for program, number in self._order[max(0, begin - self._first):max(0, end - self._first)]:
      if found and found[-1].program == program and found[-1].end == number:
        found[-1] = found[-1]._replace(end=number + 1)
      else:
        found.append(Range(program, number, number + 1))
    done = min(max(0, end - self._first), len(self._order))
    self._first, self._order = self._first + done, self._order[done:]
    return tuple(found)

  def taken(self) -> list[tuple[int, int]]:
    """Takes out all that is known: program and number of each execution, in their order."""
    order, self._order = self._order, []
    self._first += len(order)
    return order

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
