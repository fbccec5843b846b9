"""The ring that events of programs go to: one a process, in memory of its own.

On CPUs they are written by native handlers into the device buffer of their device. XLA tells the
handler which device it runs on; that is `jax.Device.id`, for forced devices and in several
processes alike (tried with jax 0.10). GPUs write to rings of their own, from which `current` takes
what is new. Callbacks of an instrumented step write by `record`. No file is mapped: whoever cut it
short would end the process.
"""

from __future__ import annotations

import collections
import ctypes
import itertools
import mmap
import os
import threading
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from jaxpace.core import ring_layout
from jaxpace.core.observed import TAG_BITS
from jaxpace.observation.clocks import gpu_ring, stream
from jaxpace.observation.clocks.native import cuda, library

MOST_PROGRAMS = 1 << 12
"""Programs with timestamps that a process can tell apart."""
USAGE = np.dtype([("ns", "<i8"), ("cpu_ns", "<i8"), ("switches", "<i8"), ("faults", "<i8"),
                  ("queued_ns", "<i8"), ("seq", "<u8")])
"""When an execution ended; processor time of the process so far, -1 where the kernel was not asked;
its involuntary switches and major page faults; and how long its main thread has waited for a
processor, -1 where nobody knows."""
_USAGE_ENTRIES = 1 << 15
_usage: np.ndarray | None = None
_lock = threading.Lock()
_current: Ring | None = None
_fork_handled = False
_source: gpu_ring.Source | None = None
# Why GPUs can't write timestamps, once that has been tried.
_no_source: str | None = None
# Rings of the process that this one was forked from.
_kept: list[Any] = []
# The ring is one a process, and so are the numbers of the programs that write to it.
_numbers = itertools.count(1)
# By program whose callbacks write: the device buffer of each place of its pace state.
_buffer_of: dict[int, dict[int, int]] = {}
# Executions by device buffer and program, where there is no native library to count them.
_started: collections.Counter[tuple[int, int]] = collections.Counter()
_writing = threading.Lock()


class Ring:
  """Memory of a ring, and its views; see `jaxpace.core.ring_layout` for what lies where. Its header
  is
  empty: that is of the file."""

  def __init__(self, where: ring_layout.RingLayout):
    self.layout = where
    self.memory = memoryview(mmap.mmap(-1, where.size))
    _, self.blocks, self.events = ring_layout.views(self.memory, where)

  def heads(self) -> np.ndarray:
    """[buffers] uint64: events written so far."""
    return np.array(self.blocks["head"])

  @property
  def ranks(self) -> list[int]:
    """Rank of each device buffer's device: its place in `jax.devices()`."""
    return [int(rank) for rank in self.blocks["rank"]]


def unavailable() -> str:
  """Registers the handler and makes the ring in memory, unless that has been done.

  Returns:
    Empty where programs with timestamps can run; else a sentence that says why not, and what to do.
  """
  platform = jax.local_devices()[0].platform
  return _unfit(platform) or library.unavailable() or unwritable(
      "native" if platform == "cpu" else "stream")


def unwritable(clock: str) -> str:
  """Makes the ring for the events of a step, unless that has been done.

  Returns:
    Empty where they have a place to go to; else why not, in a sentence.
  """
  devices = jax.local_devices()
  if len(devices) > ring_layout.MOST_BUFFERS:
    return f"Timestamps are kept for at most {ring_layout.MOST_BUFFERS} devices of a process."
  if clock == "stream" and (reason := _gpus(devices)):
    return reason
  current()
  return ""


def tell_places(program: int, devices: Sequence[int], first: int = 0) -> None:
  """Says which device each place of a program's pace state belongs to, for `record`.

  Args:
    devices: by `jax.Device.id`.
    first: the first one's place.
  """
  buffers = {int(device): buffer for buffer,
             device in enumerate(current().blocks["device"].tolist())}
  _buffer_of[program] = {place: buffers[device] for place, device in enumerate(devices, first)
                       if device in buffers}


def record(program: int, place: int, tag: int, ns: int) -> None:
  """Writes an event from the host.

  Args:
    program: number of a program of which `tell_places` was called; others are ignored.
    place: of its pace state, whose device ran it.
    tag: the program's own.
    ns: of the monotonic clock, or a number.
  """
  buffer = _buffer_of.get(program, {}).get(place)
  ring = _current
  if buffer is None or ring is None:
    return
  if not library.unavailable():
    library.functions().jaxpace_record(buffer, program, tag, ns)
    return
  with _writing:
    if tag == ring_layout.START_TAG:
      _put(ring, buffer, program, ring_layout.NUMBER, _started[buffer, program])
      _started[buffer, program] += 1
    _put(ring, buffer, program, tag, ns)


def _put(ring: Ring, buffer: int, program: int, tag: int, ns: int) -> None:
  index = int(ring.blocks["head"][buffer])
  ring.events[buffer, index % ring.layout.capacity] = (
      ns, program << TAG_BITS | tag, (index + 1) % 2**32)
  ring.blocks["head"][buffer] = index + 1


def _unfit(platform: str) -> str:
  """Why devices of a platform can't have timestamps; empty where they can."""
  if platform == "cpu":
    return ""
  if platform in ("gpu", "cuda"):
    return stream.unavailable()
  return (f"There are no timestamps for {platform}: jaxpace knows no clock that a program can read "
          "there. jaxpace.ProfiledRecorder samples profiles of the step as it is.")


def _gpus(devices: list[jax.Device]) -> str:
  """Makes the rings that this process's GPUs write to, once; returns why there are none, in a
  sentence."""
  global _source, _no_source
  with _lock:
    if _no_source is None:
      _no_source = cuda.unavailable() or _made_source(devices)
    return _no_source


def _made_source(devices: list[jax.Device]) -> str:
  global _source
  try:
    driver = cuda.Driver()
    numbers = [int(device.local_hardware_id) for device in devices]
    gpus = [cuda.DriverGpu(driver, number) for number in numbers]
    source = gpu_ring.Source(gpus)
    blocks = [buffer.block for buffer in source.buffers]
    cuda.tell(driver, list(zip(numbers, gpus, blocks, strict=True)))
  except cuda.DriverError as error:
    return f"Timestamps can't be written by the GPUs of this process: {error}."
  _source = source
  return ""


def current() -> Ring:
  """Returns the ring of this process, with what GPUs have written so far."""
  global _current, _fork_handled
  with _lock:
    if _current is None:
      _current = _made()
      if not _fork_handled and hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=_after_fork)
        _fork_handled = True
    if _source is not None:
      _source.pour(_current.blocks, _current.events)
    return _current


def ranks() -> dict[jax.Device, int]:
  """Rank of each device of the job: its place in `jax.devices()`."""
  return {device: place for place, device in enumerate(jax.devices())}


class Usage:
  """When executions on this process's first device ended, and what it had used by then, from now
  on."""

  def __init__(self) -> None:
    """Begins. A reading takes the device's thread 8 to 20 µs, at most every 10 ms."""
    global _usage
    functions = library.functions()
    self._head = getattr(functions, "jaxpace_usage_head", int)
    with _lock:
      if _usage is None:
        _usage = np.zeros(_USAGE_ENTRIES, USAGE)
        if hasattr(functions, "jaxpace_used"):
          functions.jaxpace_used(_usage.ctypes.data, _USAGE_ENTRIES, _main_thread())
      self._entries = _usage
    self._at = int(self._head())

  def take(self) -> np.ndarray:
    """Returns what is new, [n] USAGE in order; entries that were written over are left out."""
    head = int(self._head())
    numbers = np.arange(max(self._at, head - _USAGE_ENTRIES), head)
    self._at = head
    found = self._entries[numbers % _USAGE_ENTRIES]
    return found[found["seq"] == numbers + 1]


def _main_thread() -> int:
  """What the kernel says of the main thread's scheduling, open; -1 where there is none."""
  try:
    return os.open(f"/proc/self/task/{os.getpid()}/schedstat", os.O_RDONLY)
  except OSError:
    return -1


def next_program() -> int:
  """Returns a number that no program with timestamps has in this process: 1, 2, ...."""
  return next(_numbers)


def executions(buffer: int, program: int) -> int:
  """Returns how many executions of a program have started on a device buffer's device in this
  process."""
  if _source is not None:
    current()
    return _source.started(buffer, program)
  if library.unavailable():
    return _started[buffer, program]
  return int(library.functions().jaxpace_executions(buffer, program))


def _made() -> Ring:
  """Makes the ring, and sends timestamps there."""
  devices = jax.local_devices()
  ring, rank = Ring(ring_layout.layout(len(devices))), ranks()
  for block, device in zip(ring.blocks, devices, strict=True):
    block["rank"], block["device"] = rank[device], device.id
  if not library.unavailable():
    ids = (ctypes.c_int32 * len(devices))(*(device.id for device in devices))
    library.functions().jaxpace_lanes(ids, len(devices))
    library.functions().jaxpace_ring(
        ring.blocks.ctypes.data, ring.events.ctypes.data, ring.layout.capacity, ring.layout.buffers)
  return ring


def _after_fork() -> None:
  """A child has no part in its parent's ring: what it timestamps goes nowhere."""
  global _current, _lock, _source
  _lock = threading.Lock()
  _source = None
  if not library.unavailable():
    library.functions().jaxpace_ring(None, None, 0, 0)
  # Never unmapped: an atfork handler is no place for that.
  _kept.append(_current)
  _current = None
