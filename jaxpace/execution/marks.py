"""The ring that marks of observed programs go to: one a process, in memory or in a file.

On CPUs marks are written by a native handler, `jaxpace_mark`, into the lane of their device. XLA
tells the handler which device it runs on; that is `jax.Device.id`, for forced devices and in
several processes alike (tried with jax 0.10). GPUs write to rings of their own, from which
`current` takes what is new. Until a recorder opens a file, the ring lies in memory.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import itertools
import mmap
import os
import pathlib
import threading
import time
from typing import Any

import jax
import numpy as np

from jaxpace.core import marks
from jaxpace.execution import gpu_marks
from jaxpace.execution.native import cuda, library

_LOOKS = 1000
MOST_PROGRAMS = 1 << 12
"""Programs with marks that a process can tell apart."""
_MAPPED = frozenset({"ext2", "ext3", "ext4", "xfs", "tmpfs", "ramfs", "overlay", "f2fs"})
"""File systems of this machine on which space that was taken stays: files on them are mapped. On
others, those of the network above all, a mark that touches a page could wait for a server: there a
thread writes the file."""
_BEHIND = 64
"""Events that are written again, since marks may have been under way in them."""
_lock = threading.Lock()
_in_memory: Ring | None = None
_current: Ring | None = None
_fork_handled = False
_source: gpu_marks.Source | None = None
# Why GPUs can't write marks, once that has been tried.
_no_source: str | None = None
# Memory that a mark may still be writing to, where that could not be ruled out.
_kept: list[Any] = []
# The ring is one a process, and so are the numbers of the programs that write to it.
_numbers = itertools.count(1)


class Ring:
  """Memory of a ring, and its views. Made by `in_memory` and `open_file`."""

  def __init__(self, memory: mmap.mmap, where: marks.RingLayout, path: pathlib.Path | None):
    self.memory, self.layout, self.path = memory, where, path
    self.header, self.blocks, self.events = marks.views(memory, where)
    self._file: int | None = None
    self._written = [0] * where.lanes
    self.began = self.heads()
    """[lanes] uint64: events that had been written when marks were last switched to it."""

  def heads(self) -> np.ndarray:
    """[lanes] uint64: events written so far."""
    return np.array(self.blocks["head"])

  def sync(self) -> None:
    """Says in the header that the process lives; where the file is not mapped, writes what is new
    to it.

    From one thread. A file that can't be written any more is left as it is.
    """
    self.header["alive_ns"] = time.monotonic_ns()
    if self._file is None:
      return
    try:
      for lane, head in enumerate(self.heads().tolist()):
        self._write_lane(self._file, lane, head)
      # Last: what they count is in the file.
      end = marks.PAGE + self.blocks.nbytes
      os.pwrite(self._file, self.memory[:end], 0)
    except OSError:
      self.let_go()

  def _write_lane(self, file: int, lane: int, head: int) -> None:
    capacity, size = self.layout.capacity, marks.EVENT.itemsize
    at = max(0, self._written[lane] - _BEHIND, head - capacity)
    while at < head:
      # Up to the end of the lane's memory, then from its beginning.
      count = min(head - at, capacity - at % capacity)
      begin = self.layout.events + (lane * capacity + at % capacity) * size
      os.pwrite(file, self.memory[begin:begin + count * size], begin)
      at += count
    self._written[lane] = head

  def let_go(self) -> None:
    """Closes the file, where it is not mapped."""
    if self._file is not None:
      os.close(self._file)
      self._file = None

  @property
  def ranks(self) -> list[int]:
    """Rank of each lane's device: its place in `jax.devices()`."""
    return [int(rank) for rank in self.blocks["rank"]]


def unavailable(clock: str = "auto") -> str:
  """Registers the handler and makes the ring in memory, unless that has been done.

  Args:
    clock: "auto", or "stream" for the marks of GPUs, which nothing uses unless it is asked for.

  Returns:
    Empty where programs with marks can run; else a sentence that says why not, and what to do.
  """
  devices = jax.local_devices()
  if reason := _unfit(devices[0].platform, clock):
    return reason
  if reason := library.unavailable():
    return reason
  if len(devices) > marks.MOST_LANES:
    return f"Marks are kept for at most {marks.MOST_LANES} devices of a process."
  if clock == "stream" and (reason := _gpus(devices)):
    return reason
  current()
  return ""


def _unfit(platform: str, clock: str) -> str:
  """Why devices of a platform can't have marks by a clock; empty where they can."""
  if platform == "cpu":
    return "" if clock != "stream" else (
        "clock=\"stream\" is the clock of NVIDIA GPUs, and the step runs on cpu: leave it out.")
  profiles = "jaxpace.ProfiledRecorder samples profiles of the step as it is."
  if platform not in ("gpu", "cuda"):
    return (
        f"There are no marks for {platform}: jaxpace knows no clock that a program can read there. "
        f"{profiles}")
  if clock != "stream":
    return ("Marks for GPUs are kernels that XLA's compiler takes and no GPU has run yet, so they "
            "are used only where asked for, by jaxpace.observe(step, clock=\"stream\"). "
            f"{profiles}")
  try:
    jax.devices("rocm")
  except RuntimeError:
    return ""
  return f"Marks for GPUs are written for NVIDIA's, and these are AMD's. {profiles}"


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
    source = gpu_marks.Source([driver.device(number) for number in numbers])
    cuda.tell(driver, list(zip(numbers, source.blocks, strict=True)))
  except cuda.DriverError as error:
    return f"Marks can't be written by the GPUs of this process: {error}."
  _source = source
  return ""


def current() -> Ring:
  """Returns the ring that marks go to now, with what GPUs have written so far."""
  global _in_memory, _current, _fork_handled
  with _lock:
    if _current is None:
      devices = jax.local_devices()
      ids = (ctypes.c_int32 * len(devices))(*(device.id for device in devices))
      library.functions().jaxpace_lanes(ids, len(devices))
      if _in_memory is None:
        where = marks.layout(len(devices))
        _in_memory = _labelled(Ring(mmap.mmap(-1, where.size), where, None))
      _switch(_in_memory)
      if not _fork_handled and hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=_after_fork)
        _fork_handled = True
    assert _current is not None
    if _source is not None:
      _source.pour(_current.blocks, _current.events)
    return _current


def open_file(path: pathlib.Path, *, run: str = "", attempt: int = 0) -> tuple[Ring, str]:
  """Switches to a new ring in a file, which takes the place of what is there.

  All of the file's space is taken at once: a full disk is told here, and never by a signal in a
  mark. On a disk of this machine the file is mapped, and has every mark at once; on a file system
  of the network it has what `Ring.sync` wrote.

  Args:
    path: the file; its folder must be there.
    run: id of the run.
    attempt: attempt of the run.

  Returns:
    The ring that marks go to from now on, and empty; or the one in memory, and why the file can't
    be used, in the second half of a sentence.
  """
  ring = current()
  written = path.with_name(f".{path.name}.{os.getpid()}.tmp")
  new: Ring | None = None
  try:
    new = _made(written, path, ring.layout)
    _labelled(new, run, attempt)
    new.sync()
    os.replace(written, path)
  except OSError as error:
    if new is not None:
      new.let_go()
    with contextlib.suppress(OSError):
      written.unlink(missing_ok=True)
    return ring, _why(error)
  with _lock:
    _switch(new)
  return new, ""


def close_file(ring: Ring) -> None:
  """Switches back to memory, if marks go to this ring. The file stays.

  Its memory is unmapped when nobody holds the ring any more and no mark can be writing to it.
  """
  if ring.path is None:
    return
  with _lock:
    if _current is ring and _in_memory is not None:
      _switch(_in_memory)
  if not _quiet(ring.layout.lanes):
    _kept.append(ring.memory)
  ring.header["closed"] = 1
  ring.sync()
  ring.let_go()


def ranks() -> dict[jax.Device, int]:
  """Rank of each device of the job: its place in `jax.devices()`."""
  return {device: place for place, device in enumerate(jax.devices())}


def next_program() -> int:
  """Returns a number that no program with marks has in this process: 1, 2, ...."""
  return next(_numbers)


def executions(lane: int, program: int) -> int:
  """Returns how many executions of a program have started on a lane's device in this process."""
  return int(library.functions().jaxpace_executions(lane, program))


def _labelled(ring: Ring, run: str = "", attempt: int = 0) -> Ring:
  ring.header["magic"] = marks.MAGIC
  ring.header["lanes"], ring.header["capacity"] = ring.layout.lanes, ring.layout.capacity
  ring.header["process"], ring.header["pid"] = jax.process_index(), os.getpid()
  ring.header["attempt"], ring.header["run"] = attempt, run.encode()[:255]
  ring.header["monotonic_ns"], ring.header["wall_ns"] = time.monotonic_ns(), time.time_ns()
  rank = ranks()
  for block, device in zip(ring.blocks, jax.local_devices(), strict=True):
    block["rank"], block["device"] = rank[device], device.id
  return ring


def _switch(ring: Ring) -> None:
  """Sends marks to another ring. The caller holds the lock, and keeps the memory of the one
  before."""
  global _current
  ring.began = ring.heads()
  library.functions().jaxpace_ring(
      ring.blocks.ctypes.data, ring.events.ctypes.data, ring.layout.capacity, ring.layout.lanes)
  _current = ring


def _quiet(lanes: int, seconds: float = 0.5) -> bool:
  """Waits until each mark that was under way has ended; they take nanoseconds, unless a thread is
  held up."""
  deadline = time.monotonic() + seconds
  for lane in range(lanes):
    while not library.functions().jaxpace_quiet(lane, _LOOKS):
      if time.monotonic() > deadline:
        return False
      time.sleep(0.0002)
  return True


def _made(written: pathlib.Path, path: pathlib.Path, where: marks.RingLayout) -> Ring:
  """Makes a file with all of its space, and the ring that is to be `path`.

  Raises:
    OSError: there is no space for it, or it can't be written or mapped.
  """
  flags = (os.O_RDWR | os.O_CREAT | os.O_EXCL | getattr(os, "O_NOFOLLOW", 0)
           | getattr(os, "O_CLOEXEC", 0))
  with contextlib.suppress(FileNotFoundError):
    written.unlink()
  descriptor = os.open(written, flags, 0o666)
  try:
    if hasattr(os, "posix_fallocate"):
      os.posix_fallocate(descriptor, 0, where.size)
    else:
      for at in range(0, where.size, 1 << 20):
        os.pwrite(descriptor, bytes(min(1 << 20, where.size - at)), at)
    if _file_system(path.parent) in _MAPPED:
      return Ring(mmap.mmap(descriptor, where.size), where, path)
    ring = Ring(mmap.mmap(-1, where.size), where, path)
    ring._file, descriptor = descriptor, -1
    return ring
  finally:
    if descriptor >= 0:
      os.close(descriptor)


def _file_system(folder: pathlib.Path) -> str:
  """Kind of the file system that a folder lies on; "" where the system doesn't tell."""
  best, kind = "", ""
  try:
    place = os.path.realpath(folder)
    with open("/proc/self/mountinfo", encoding="utf-8", errors="replace") as file:
      for line in file:
        before, _, after = line.partition(" - ")
        point = before.split()[4].replace("\\040", " ")
        if (len(point) >= len(best)
            and (place == point or place.startswith(point.rstrip("/") + "/"))):
          best, kind = point, after.split()[0]
  except (OSError, IndexError):
    return ""
  return kind


def _why(error: OSError) -> str:
  if error.errno in (errno.ENOSPC, errno.EDQUOT):
    return "there is no space left for it (disk or quota full)"
  return f"it can't be made ({os.strerror(error.errno) if error.errno else error})"


def _after_fork() -> None:
  """A child has no part in its parent's rings: what it marks goes nowhere."""
  global _current, _in_memory, _lock, _source
  _lock = threading.Lock()
  _source = None
  library.functions().jaxpace_ring(None, None, 0, 0)
  # Never unmapped: an atfork handler is no place for that.
  _kept.extend(ring.memory for ring in (_current, _in_memory) if ring is not None)
  _current = _in_memory = None
