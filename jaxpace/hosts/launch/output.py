"""Shows workers' logs on the terminal while they grow, and reads the end of one.

Workers' output goes to their log files by way of the scribe. Nothing passes through the launcher,
so a slow terminal never slows a worker, and what a worker said is on disk whatever becomes of the
launcher.
"""

from __future__ import annotations

import os
import select
from pathlib import Path

CHUNK_BYTES = 1 << 16
LINE_LIMIT_BYTES = 1 << 16
"""A prefixed line longer than this is shown in pieces."""


class LogView:
  """Reads what is appended to a log file, as it should look on the terminal."""

  def __init__(self, path: Path, prefix: str | None = None):
    """Opens the log.

    Args:
      path: log file, which must exist.
      prefix: put before every line; lines are then shown whole. None gives the bytes as they come,
        so that progress bars stay alive.
    """
    self._file = path.open("rb")
    self._prefix = None if prefix is None else prefix.encode()
    self._partial = b""

  def read(self) -> bytes:
    """Returns the next piece of what is new, at most `CHUNK_BYTES` of log; empty when there is
    nothing to show."""
    chunk = self._file.read(CHUNK_BYTES)
    # truncated under our feet
    if not chunk and os.fstat(self._file.fileno()).st_size < self._file.tell():
      self._file.seek(0)
      chunk = self._file.read(CHUNK_BYTES)
    if self._prefix is None:
      return chunk
    *lines, self._partial = (self._partial + chunk).split(b"\n")
    if len(self._partial) > LINE_LIMIT_BYTES:
      lines.append(self._partial)
      self._partial = b""
    return b"".join(self._prefix + line + b"\n" for line in lines)

  def finish(self) -> bytes:
    """Returns an unfinished last line, after `read` has returned nothing, and closes the log."""
    left, self._partial = self._partial, b""
    self._file.close()
    return (self._prefix or b"") + left + b"\n" if left else b""


class LogScreen:
  """Writes to a terminal, pipe or file without ever waiting for it, until `finish`.

  A launcher that waits for a paused terminal would not see its workers die.
  """

  def __init__(self, fd: int | None):
    """Takes a file descriptor, or None where there is nothing to write to."""
    self._fd = fd
    self._pending = b""

  @property
  def ready(self) -> bool:
    """Whether more should be offered."""
    return self._fd is not None and not self._pending

  def offer(self, data: bytes) -> None:
    """Takes `data` and writes as much of it as goes without waiting."""
    self._pending += data
    self._write(wait=False)

  def finish(self) -> None:
    """Writes what is pending, waiting as long as it takes."""
    self._write(wait=True)

  def _write(self, wait: bool) -> None:
    while self._pending and self._fd is not None:
      try:
        if not wait and not select.select([], [self._fd], [], 0)[1]:
          return
        # a pipe that is writable takes this much whole, so the write cannot block
        written = os.write(self._fd, self._pending[:select.PIPE_BUF])
        self._pending = self._pending[written:]
      except (OSError, ValueError):  # the reader has left (`| head`): the job goes on, in its logs
        self._fd, self._pending = None, b""


class Display:
  """The logs that are shown live."""

  def __init__(self, views: list[LogView], screen: LogScreen):
    """Takes the logs to show and where to show them."""
    self._views = views
    self._screen = screen

  def update(self, pieces: int = 16) -> None:
    """Shows what is new, at most `pieces` pieces of every log, as far as the screen takes it
    without waiting."""
    self._screen.offer(b"")
    for view in self._views:
      for _ in range(pieces):
        if not self._screen.ready:
          return
        data = view.read()
        if not data:
          break
        self._screen.offer(data)

  def finish(self) -> None:
    """Shows all that is left."""
    for view in self._views:
      self._screen.finish()
      while self._screen.ready and (data := view.read()):
        self._screen.offer(data)
        self._screen.finish()
      self._screen.offer(view.finish())
    self._screen.finish()


def tail(path: Path, lines: int, limit_bytes: int = 1 << 16) -> list[str]:
  """Returns the last lines of a log, undecodable bytes replaced, reading no more than `limit_bytes`
  of it."""
  try:
    with path.open("rb") as file:
      size = file.seek(0, os.SEEK_END)
      file.seek(max(0, size - limit_bytes))
      text = file.read().decode(errors="replace")
  except OSError:
    return []
  # a progress bar is one long line of many carriage returns: its last state is what was on the
  # screen
  found = [line.rstrip("\r").rpartition("\r")[2] for line in text.split("\n")]
  if size > limit_bytes and len(found) > 1:
    found = found[1:]  # begins in the middle of a line
  while found and not found[-1].strip():
    found.pop()
  return found[-lines:] if lines > 0 else []
