"""Copies this process's ring of timestamps to a file while programs write to it."""

from __future__ import annotations

import logging
import os
import pathlib
import threading
import time

import jax
import numpy as np

from jaxpace.core import ring_layout as layout
from jaxpace.files.folders import Folder
from jaxpace.observation.clocks import host_ring
from jaxpace.record.threads import BackgroundThread
from jaxpace.record.writer import explain
from jaxpace.runs import ring_file, rundir

_LOG = logging.getLogger("jaxpace")
COPY_SECONDS = 0.25
"""Between two copies: what a process that is killed had marked last is lost at most for so long."""
_RETRY_SECONDS = 5.0
_CLOSE_SECONDS = 5.0
_BEHIND = 64
"""Events that are written again, since timestamps may have been under way in them."""


class RingCopier:
  """Keeps `marks/<process>.ring` as the ring in memory is, from `start` to `close`.

  In a thread of its own: a recording of rows that ends early does not end it. The file is anybody's
  to cut short, write over or take away; the next copy makes it anew, with all that the ring holds.
  """

  def __init__(self, directory: pathlib.Path, identity: rundir.RunIdentity):
    """Prepares; what a process that was killed left in the run directory is kept.

    Raises:
      OSError: the directory can't be written.
    """
    self._folder = Folder(directory, ring_file.FOLDER)
    ring_file.keep_unclosed(self._folder, jax.process_index())
    self._name = ring_file.name(jax.process_index())
    self.path = self._folder.path / self._name
    """The file."""
    self._ring = host_ring.current()
    self._began = self._ring.heads().tolist()
    self._header = self._labelled(identity)
    self._written = self._began
    self._file: int | None = None
    self._left = b""
    self._stop = threading.Event()
    self._warned = False
    self._thread = BackgroundThread(self._work, "marks")

  def start(self) -> None:
    """Makes the file, and starts the thread. Trouble is one warning, and tried again."""
    self.copy()
    self._thread.start_if_it_can()

  def close(self) -> None:
    """Says in the file that it is closed. It stays."""
    self._stop.set()
    if self._thread.is_alive():
      self._thread.join(_CLOSE_SECONDS)
    if self._thread.is_alive():
      # A file system hangs, and has the file.
      return
    self._header["closed"] = 1
    self.copy()
    if self._file is not None:
      os.close(self._file)
      self._file = None

  def _labelled(self, identity: rundir.RunIdentity) -> np.ndarray:
    header = np.zeros((), layout.HEADER)
    where = self._ring.layout
    header["magic"], header["lanes"], header[
        "capacity"] = layout.MAGIC, where.buffers, where.capacity
    header["process"], header["pid"] = jax.process_index(), os.getpid()
    header["run"], header["attempt"] = identity.run.encode()[:255], identity.attempt
    header["monotonic_ns"], header["wall_ns"] = time.monotonic_ns(), time.time_ns()
    return header

  def _work(self) -> None:
    pause = COPY_SECONDS
    while not self._stop.wait(pause):
      # With what GPUs have written.
      host_ring.current()
      pause = COPY_SECONDS if self.copy() else _RETRY_SECONDS

  def copy(self) -> bool:
    """Brings the file up to date, from one thread at a time; returns whether that went well."""
    try:
      if self._file is not None and self._is_as_left(self._file):
        self._written = self._write(self._file, self._written)
      elif self._is_succeeded():
        self._stop.set()
      else:
        self._make()
      return True
    except OSError as error:
      if not self._warned:
        self._warned = True
        _LOG.warning("Timestamps are kept in memory, so that they can't be read when the process "
                     "is killed: %s", explain(error, self.path))
      return False

  def _is_as_left(self, file: int) -> bool:
    """Whether the file under its name is the one that was written, and as it was."""
    try:
      there = self._folder.stat(self._name)
    except FileNotFoundError:
      return False
    return (os.path.samestat(there, os.fstat(file))
            and there.st_size == self._ring.layout.size
            and os.pread(file, len(self._left), 0) == self._left)

  def _is_succeeded(self) -> bool:
    """Whether a later start of this process has put its own file there: this one hangs, say, and
    was given up."""
    header = ring_file.header(self.path) if self._file is not None else None
    # The wall clock may have been set back since, and the other is each host's own.
    return (header is not None and header["process"] == self._header["process"]
            and any(header[clock] > self._header[clock] for clock in ("wall_ns", "monotonic_ns")))

  def _make(self) -> None:
    """Makes the file with all of its space: a disk that is full says so now."""
    with self._folder.replacing(self._name) as file:
      _take_space(file.fileno(), self._ring.layout.size)
      written = self._write(file.fileno(), self._began)
    made = self._folder.open(self._name, os.O_RDWR)
    if self._file is not None:
      os.close(self._file)
      _LOG.warning("%s was cut short, written over or taken away: it is made anew, with the "
                   "timestamps that are still in memory.", self.path)
    self._file, self._written = made, written

  def _write(self, file: int, since: list[int]) -> list[int]:
    """Writes what each device buffer has marked `since` then; returns how far it has come."""
    heads, where, size = self._ring.heads().tolist(), self._ring.layout, layout.EVENT.itemsize
    for buffer, head in enumerate(heads):
      at = max(self._began[buffer], since[buffer] - _BEHIND, head - where.capacity)
      while at < head:
        # Up to the end of the device buffer's memory, then from its beginning.
        count = min(head - at, where.capacity - at % where.capacity)
        begin = where.events + (buffer * where.capacity + at % where.capacity) * size
        _put(file, self._ring.memory[begin:begin + count * size], begin)
        at += count
    self._header["alive_ns"] = time.monotonic_ns()
    blocks = self._ring.blocks.copy()
    blocks["head"] = heads
    self._left = self._header.tobytes().ljust(layout.PAGE, b"\0") + blocks.tobytes()
    # Last: what they count is in the file.
    _put(file, self._left, 0)
    return heads


def _take_space(file: int, size: int) -> None:
  if hasattr(os, "posix_fallocate"):
    os.posix_fallocate(file, 0, size)
    return
  for at in range(0, size, 1 << 20):
    _put(file, bytes(min(1 << 20, size - at)), at)


def _put(file: int, data: bytes | memoryview, at: int) -> None:
  while data:
    count = os.pwrite(file, data, at)
    data, at = data[count:], at + count
