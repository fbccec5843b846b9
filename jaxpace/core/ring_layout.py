"""Layout of a ring of timestamps: what a running program writes of each execution, in memory or a
file.

A file has a header of one page, a block of 64 bytes for each device buffer, and each device
buffer's events. A device buffer belongs to one device of the process. An event is 16 bytes; the
i-th of a device buffer lies at i modulo the capacity, and its `seq` is i + 1 modulo 2**32, stored
last: a slot with another `seq` is being written, or was written over.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from jaxpace.core.observed import TAG_BITS
from jaxpace.core.plan import Timestamp

MAGIC = b"jaxpace marks 1\n"
PAGE = 4096
BLOCK = 64
CAPACITY = 65536
"""Events of a device buffer, unless there are many device buffers."""
MOST_BUFFERS = 1024
MOST_BYTES = 64 << 20
"""Events of all device buffers together take at most this, as long as a device buffer has
`LEAST_CAPACITY`."""
LEAST_CAPACITY = 1024

VALUES = 1 << (TAG_BITS - 1)
"""From this tag on the `ns` of an event is no time, but a number of the program's."""
NUMBER = (1 << TAG_BITS) - 2
"""Tag of the event before each start timestamp. Its `ns` is how many executions of the program had
started on this device before: lost events don't shift the count."""

START_TAG, END_TAG, FIRST_TAG = 0, 1, 2
"""Tags of the timestamps that begin and end an execution, and the first of its collectives'."""

# Of instrumented steps.
MAX_PHASE_TIMESTAMPS = 16
"""Phase boundaries of a step that are marked."""
LAST_TAG = VALUES - 64
"""Tags of timestamps around collectives are below."""
DELAY_TAG, PHASE_TAG = LAST_TAG, LAST_TAG + 1
"""Tag of the timestamp at the end of the step's delay, which is left out where there was none, and
of the first phase boundary."""
MAX_DECISIONS = 24
"""Columns that a pacer may record a step. Every pacer of the package chained, guarded and steered
takes 17."""
STEP_VALUE, DELAY_VALUE, DECISION_VALUE = VALUES, VALUES + 1, VALUES + 2
"""The number of the step; the delay asked for, and the pacer's columns that came with it, float32
bits."""
LOST, ASKED, HEARD, LISTENED, READING, TELLING = range(6)
"""What was done before a collective: ns lost by holding; seconds asked for, and heard the last time
it was listened, float32 bits; how often; and of each time, what was heard and what telling took."""
_HELD_VALUE, _HELD_VALUES = VALUES + 64, 8
_OF_KIND = {"start": START_TAG, "delay": DELAY_TAG, "end": END_TAG}


def slot_tags(slot: int) -> tuple[int, int]:
  """Returns the tags of the timestamps at the entry and exit timestamps of a slot, in an
  instrumented step."""
  return FIRST_TAG + 2 * slot, FIRST_TAG + 2 * slot + 1


def held_value(slot: int, which: int) -> int:
  """Returns the tag of a number of what was done before a slot's collective: `LOST` and so on."""
  return _HELD_VALUE + _HELD_VALUES * slot + which


def timestamp_tags(timestamps: Sequence[Timestamp]) -> list[int]:
  """Returns the tag of each timestamp of an instrumented step, as its plan lists them."""
  tags: list[int] = []
  phase = itertools.count(PHASE_TAG)
  for timestamp in timestamps:
    if timestamp.collective is not None:
      tags.append(slot_tags(timestamp.collective)[timestamp.kind == "exit"])
    else:
      tags.append(_OF_KIND[timestamp.kind] if timestamp.kind in _OF_KIND else next(phase))
  return tags


EVENT = np.dtype([("ns", "<i8"), ("tag", "<u4"), ("seq", "<u4")])
"""`ns` of the host's monotonic clock; `tag` = program << TAG_BITS | the program's own tag."""

HEADER = np.dtype([
    ("magic", "S16"), ("lanes", "<u4"), ("process", "<u4"), ("capacity", "<u8"),
    ("attempt", "<u4"), ("pid", "<u4"),
    # Read together, so that times can be shown to people.
    ("monotonic_ns", "<i8"), ("wall_ns", "<i8"),
    # 1 once a recorder has closed it.
    ("closed", "<u4"), ("reserved", "<u4"), ("run", "S256"),
    # Monotonic time when the process last said that it lives, whether or not timestamps came; 0:
    # not said.
    ("alive_ns", "<i8")])
"""At the beginning of the file; zeros follow up to `PAGE`."""

BUFFER = np.dtype([("head", "<u8"), ("rank", "<i4"), ("device", "<i4"), ("rest", "V48")])
"""A device buffer's block: events written so far, the rank of its device, and XLA's number of
it."""


class RingLayout(NamedTuple):
  """Where what lies; offsets and sizes in bytes."""

  buffers: int
  capacity: int
  events: int
  size: int


def layout(buffers: int, capacity: int | None = None) -> RingLayout:
  """Lays a ring out.

  Args:
    buffers: devices that write to it, at least 1.
    capacity: events of each, a power of two; None takes what fits.

  Raises:
    ValueError: there are no device buffers or too many, or the capacity is no power of two.

  >>> layout(1).size == PAGE + PAGE + 65536 * 16
  True
  """
  if not 1 <= buffers <= MOST_BUFFERS:
    raise ValueError(f"A ring of timestamps has 1 to {MOST_BUFFERS} device buffers, not {buffers}.")
  if capacity is None:
    capacity = CAPACITY
    while capacity > LEAST_CAPACITY and buffers * capacity * EVENT.itemsize > MOST_BYTES:
      capacity //= 2
  if capacity < 2 or capacity & (capacity - 1) or capacity > 1 << 30:
    raise ValueError(f"A device buffer's capacity is a power of two, not {capacity}.")
  events = PAGE + -(-buffers * BLOCK // PAGE) * PAGE
  return RingLayout(buffers, capacity, events, events + buffers * capacity * EVENT.itemsize)


def views(memory: Any, where: RingLayout
          ) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any], np.ndarray[Any, Any]]:
  """Views a buffer of `where.size` bytes as a ring, by arrays that share it: [] HEADER, [buffers]
  BUFFER, and [buffers, capacity] EVENT."""
  count = where.buffers * where.capacity
  return (np.frombuffer(memory, HEADER, 1)[0:1].reshape(()),
          np.frombuffer(memory, BUFFER, where.buffers, PAGE),
          np.frombuffer(memory, EVENT, count, where.events).reshape(where.buffers, -1))
