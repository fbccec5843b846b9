"""Shows workers' logs on the terminal while they grow, and reads the end of one.

Workers write their logs themselves. Nothing passes through the launcher, so a slow terminal never
slows a worker, and what a worker said is on disk whatever becomes of the launcher.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

_CHUNK_BYTES = 1 << 16
_TICK_SECONDS = 0.05


class LogView:
  """Reads what is appended to a log file, as it should look on the terminal."""

  def __init__(self, path: Path, prefix: str | None = None):
    """Opens a log, which must exist. With a prefix before every line lines are shown whole;
    without, the bytes as they come, so that progress bars stay alive."""
    self._file = path.open("rb")
    self._prefix = None if prefix is None else prefix.encode()
    self._partial = b""

  def new(self) -> Iterator[bytes]:
    """Yields what is new, in pieces."""
    if os.fstat(self._file.fileno()).st_size < self._file.tell():
      self._file.seek(0)  # truncated under our feet
    while chunk := self._file.read(_CHUNK_BYTES):
      if self._prefix is None:
        yield chunk
        continue
      *lines, self._partial = (self._partial + chunk).split(b"\n")
      if len(self._partial) > _CHUNK_BYTES:  # shown in pieces
        lines.append(self._partial)
        self._partial = b""
      yield b"".join(self._prefix + line + b"\n" for line in lines)

  def finish(self) -> bytes:
    """Returns an unfinished last line, after all that is new, and closes the log."""
    left, self._partial = self._partial, b""
    self._file.close()
    return (self._prefix or b"") + left + b"\n" if left else b""


class Display(threading.Thread):
  """Shows logs live, from a thread of its own: a launcher that waits for a paused terminal would
  not see its workers die."""

  def __init__(self, views: Sequence[LogView], screen: int | None):
    """Takes the logs to show and the descriptor to show them on; None shows nothing. Start it once
    all workers are started: a process that forks has no threads."""
    super().__init__(name="jaxpace-launch-output", daemon=True)
    self._views, self._screen = views, screen
    self._over = threading.Event()

  def run(self) -> None:
    """Shows what is new until the job is over, then what is left."""
    over = False
    try:
      while not over:
        over = self._over.wait(_TICK_SECONDS)
        for view in self._views:
          for data in view.new():
            self._write(data)
      for view in self._views:
        self._write(view.finish())
    except (OSError, ValueError):
      for view in self._views:
        view.finish()  # the reader has left (`| head`): the job goes on, in its logs

  def finish(self) -> None:
    """Shows all that is left, waiting for the terminal as long as it takes."""
    self._over.set()
    self.join()

  def _write(self, data: bytes) -> None:
    while data and self._screen is not None:
      data = data[os.write(self._screen, data):]


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
