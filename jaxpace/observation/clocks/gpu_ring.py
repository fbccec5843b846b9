"""Timestamps on GPUs: where each GPU writes them, and how they come into the ring of the process.

Each GPU has a ring of its own in the host's memory, of events as in `jaxpace.core.ring_layout` (the
kernels are in `jaxpace.observation.clocks.kernels`). Whoever reads the process's ring first has
what is new poured into it from there; so all else, the file and its readers, is as on CPUs. Times
are those of the host's monotonic clock: by how much a GPU's timer is off is measured once, when the
rings are made, and added by the kernels. Drift between the two afterwards is not followed.
"""

from __future__ import annotations

import ctypes
import struct
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from jaxpace.core import ring_layout
from jaxpace.core.observed import TAG_BITS
from jaxpace.observation.clocks import kernels
from jaxpace.observation.clocks.native.cuda import DriverError, DriverGpu

CAPACITY = 1 << 16
"""Events of a GPU's ring: 1 MiB."""
_TRIES = 32
_LONGEST_S = 5.0
_FARTHEST_NS = 100_000
"""Two clocks that differ by less than this count as equal: timestamps of a GPU come
in microseconds."""
_TRY_TAG = 2
_AT_ONCE = 1 << 15
_OWN = (1 << TAG_BITS) - 1


class GpuBuffer(NamedTuple):
  """One GPU's ring, its counters and its block."""

  # [capacity] ring_layout.EVENT, in the host's memory; the GPU writes it
  events: np.ndarray
  ring: int
  counters: int
  block: int


class Source:
  """The rings of this process's GPUs, in the order of its device buffers."""

  def __init__(self, devices: Sequence[DriverGpu], capacity: int = CAPACITY):
    """Makes them, and tries each with a kernel.

    Raises:
      DriverError: there is no memory for them, or what a GPU writes does not come.
    """
    self.buffers = [_buffer(device, capacity) for device in devices]
    for device, buffer in zip(devices, self.buffers, strict=True):
      device.upload(buffer.block, block_of(buffer, _shift(device, buffer)))
    # What was tried is no timestamp of a program.
    self._read = [_TRIES] * len(self.buffers)
    # By device buffer and program, of what was read.
    self._started: dict[tuple[int, int], int] = {}

  def started(self, buffer: int, program: int) -> int:
    """How many executions of a program have started on a GPU, as far as its events were read."""
    return self._started.get((buffer, program), 0)

  def pour(self, blocks: np.ndarray, events: np.ndarray) -> None:
    """Puts what is new into the ring of the process. One thread at a time.

    An event whose neighbour before it is not there yet waits for it. Events that were written over
    leave slots with an older number in the ring, by which its readers know that they are lost.

    Args:
      blocks: [buffers] `ring_layout.BUFFER` of that ring.
      events: [buffers, capacity] `ring_layout.EVENT` of it.
    """
    for place, buffer in enumerate(self.buffers):
      while not _is_idle(buffer.events, self._read[place]):
        lost, new = _new(buffer.events, self._read[place])
        if not lost and not len(new):
          break
        for event in new[new["tag"] & _OWN == ring_layout.NUMBER]:
          self._started[place, int(event["tag"]) >> TAG_BITS] = int(event["ns"]) + 1
        head = int(blocks["head"][place]) + lost
        capacity = events.shape[1]
        kept = new[max(0, len(new) - capacity):]
        numbers = np.arange(head + len(new) - len(kept), head + len(new))
        slots = numbers % capacity
        events["seq"][place, slots] = 0
        events["ns"][place, slots] = kept["ns"]
        events["tag"][place, slots] = kept["tag"]
        events["seq"][place, slots] = ((numbers + 1) % 2**32).astype(np.uint32)
        blocks["head"][place] = head + len(new)
        self._read[place] += lost + len(new)


def block_of(buffer: GpuBuffer, shift_ns: int) -> bytes:
  """A GPU's block, as its kernels read it."""
  return struct.pack("<QQIIq", buffer.ring, buffer.counters, len(buffer.events) - 1, 0, shift_ns)


def _buffer(device: DriverGpu, capacity: int) -> GpuBuffer:
  here, there = device.host_memory(capacity * ring_layout.EVENT.itemsize)
  if there % ring_layout.EVENT.itemsize:
    raise DriverError("the driver gave memory that is not aligned to 16 bytes")
  memory: Any = (ctypes.c_char * (capacity * ring_layout.EVENT.itemsize)).from_address(here)
  counters = device.memory(kernels.COUNTERS_BYTES)
  buffer = GpuBuffer(np.frombuffer(memory, ring_layout.EVENT), there, counters,
                     device.memory(4 * kernels.BLOCK_WORDS))
  device.upload(buffer.block, block_of(buffer, 0))
  return buffer


def _shift(device: DriverGpu, buffer: GpuBuffer) -> int:
  """What to add to a GPU's timer for the host's monotonic clock, ns.

  A timestamp is taken on an idle stream between two readings of the host's clock; the closest pair
  counts.
  """
  loaded = device.load(kernels.mark())
  best: tuple[int, int] | None = None
  for number in range(_TRIES):
    before = time.monotonic_ns()
    device.launch(loaded, [buffer.block, *kernels.tagged(0, _TRY_TAG)])
    deadline = time.monotonic() + _LONGEST_S
    while int(buffer.events["seq"][number]) != number + 1:
      if time.monotonic() > deadline:
        raise DriverError(f"a kernel wrote nothing within {_LONGEST_S:.0f} s")
    after = time.monotonic_ns()
    event = buffer.events[number]
    if int(event["tag"]) != _TRY_TAG:
      raise DriverError("a kernel wrote something else than a timestamp")
    span = after - before
    if best is None or span < best[1]:
      best = (before + after) // 2 - int(event["ns"]), span
  assert best is not None
  if best[1] > 2 * _FARTHEST_NS:
    raise DriverError(
        f"a kernel took {best[1] * 1e-6:.1f} ms to write to the host's memory, {_TRIES} times")
  return best[0]


def _is_idle(events: np.ndarray, position: int) -> bool:
  """Whether the slot after a position is as the GPU's last round left it. Asked for each program
  and GPU: `_new` reads half a megabyte to say so."""
  before = max(0, position + 1 - len(events)) % 2**32
  return int(events["seq"][position % len(events)]) == before


def _new(events: np.ndarray, position: int) -> tuple[int, np.ndarray]:
  """Events after a position, without a hole between them, and how many before them were written
  over."""
  capacity = len(events)
  slots = (position + np.arange(min(_AT_ONCE, capacity))) % capacity
  first = events[slots]
  # Twice: an event that was only half there the first time is another one now.
  second = events[slots]
  wanted = ((position + 1 + np.arange(len(slots))) % 2**32).astype(np.uint32)
  there = (second["seq"] == wanted) & (first == second)
  count = len(there) if there.all() else int(np.argmin(there))
  if count:
    return 0, second[:count]
  # A later number in the slot: the GPU has been round, and this one is gone. The very number: the
  # event was being written while it was read.
  ahead = int((int(second["seq"][0]) - int(wanted[0])) % 2**32)
  if ahead == 0 or ahead >= 2**31 or ahead % capacity:
    return 0, second[:0]
  # Half a ring is left to be read before the GPU comes round again.
  return ahead - capacity + capacity // 2 + 1, second[:0]
