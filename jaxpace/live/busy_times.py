"""How long devices were busy in each call of an observed step, and the call took, from the ring on
the host."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from jaxpace.core.observed import ObservedFunction
from jaxpace.observation.clocks import host_ring
from jaxpace.record.ring.calls import call_of
from jaxpace.record.ring.collect import Collector
from jaxpace.record.ring.executions import Executions, exposed, occurrences

_PATIENCE = 60.0
"""Seconds to wait for a step that was dispatched long ago to end on this process's devices."""
_MOMENT = 1e-3
_PART = 0.25
"""Of the ring. To read takes most of a millisecond, however few events are new."""
_UNKNOWN = (np.nan, np.nan)


class BusyTimes:
  """What the ring shows of an observed step's calls on this process's devices. Belongs to one
  thread."""

  def __init__(self, step: ObservedFunction, devices: Sequence[jax.Device]):
    """Begins with what is written from now on; `devices` are this process's that run the step."""
    self.step, self._collector = step, Collector()
    lane_of = {device: buffer for buffer, device in enumerate(self._collector.devices)}
    self._buffers = [lane_of[device.id] for device in devices]
    self._started = [{number: host_ring.executions(buffer, number) for number in step.runs}
                     for buffer in self._buffers]
    self._busy: list[dict[int, tuple[float, float]]] = [{} for _ in devices]
    self._latest = [-1] * len(self._buffers)
    self._patience = _PATIENCE

  def of(self, calls: Sequence[int | None]) -> np.ndarray:
    """Returns how long each device was busy in these calls, rising, None for one that nothing is
    known of, and how long they took, and waits until they are over: [devices, 2, calls] float32 s,
    NaN where not known. Busy is what an execution takes less what it waits in collectives."""
    wanted = [call for call in calls if call is not None]
    until = time.monotonic() + self._patience
    self._read()
    while wanted and min(self._latest) < wanted[-1]:
      if time.monotonic() > until:
        # Their timestamps don't come: none are waited for until some have come by themselves.
        self._patience = 0.0
        break
      time.sleep(_MOMENT)
      self._read()
    else:
      # They came, however late: a process that stood still for minutes goes on.
      self._patience = _PATIENCE if wanted else self._patience
    found = np.array([[_UNKNOWN if call is None else own.get(call, _UNKNOWN) for call in calls]
                      for own in self._busy], np.float32).swapaxes(1, 2)
    # Where calls are not counted any more nobody will ask for these.
    last = wanted[-1] if wanted else max(self._latest)
    for own in self._busy:
      for call in [call for call in own if call <= last]:
        del own[call]
    return found

  def keep_up(self) -> None:
    """Reads the ring once a part of it is new, so that nothing is written over; else does
    nothing."""
    if self._collector.unread > _PART:
      self._read()

  def _read(self) -> None:
    self._collector.collect(lambda: self.step.runs)
    programs = {each.number: each for each in (self.step.plan.programs if self.step.plan else ())}
    for place, (buffer, started) in enumerate(zip(self._buffers, self._started, strict=True)):
      ended = []
      for number in self.step.runs:
        ran = self._collector.take(buffer, number)
        busy = busy_seconds(ran, programs[number].collectives)
        ended += [(int(start), number, int(at), (float(seconds), 1e-9 * float(end - start)))
                  for start, end, at, seconds in zip(
                    ran.start_ns, ran.end_ns, ran.number, busy, strict=True)]
      for _, number, at, seconds in sorted(ended):
        call = call_of(started, number, at)
        self._busy[place][call], self._latest[place] = seconds, call


def busy_seconds(ran: Executions, collectives: Sequence[Any]) -> np.ndarray:
  """Returns how long executions took, less the time that they waited in collectives: [n] float64 s.
  """
  each = occurrences(ran, collectives)
  order, begin, end = exposed(each.execution, each.enter_ns, each.exit_ns)
  waited = np.bincount(each.execution[order], end - begin, len(ran.number))
  return (ran.end_ns - ran.start_ns - waited) * 1e-9
