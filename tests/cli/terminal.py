"""A command on a pseudo-terminal, as a user sees it: what it shows is kept, and the terminal's size
can change."""

from __future__ import annotations

import os
import subprocess
import threading
from collections.abc import Sequence
from types import TracebackType

_TERM = {"TERM": "xterm-256color"}


class Terminal:
  """Runs a command; on leaving the context it is killed if it still runs."""

  def __init__(self, command: Sequence[str], columns: int, lines: int,
               cwd: str | os.PathLike[str] | None = None):
    self.shown = bytearray()  # all that it has shown so far
    self._leader, follower = os.openpty()
    self.resize(columns, lines)
    variables = ({name: value for name, value in os.environ.items()
                  if name not in ("COLUMNS", "LINES")} | _TERM)
    self.process = subprocess.Popen(list(command), stdin=follower, stdout=follower, stderr=follower,
                                    env=variables, cwd=cwd)
    os.close(follower)
    self._reader = threading.Thread(target=self._read, daemon=True)
    self._reader.start()

  def resize(self, columns: int, lines: int) -> None:
    """Changes the size; nobody is told, as a terminal would, by SIGWINCH."""
    import fcntl  # not at the top: POSIX only, as pseudo-terminals are
    import struct
    import termios

    fcntl.ioctl(self._leader, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))

  def read_on(self, seconds: float) -> None:
    """Waits until the command has closed the terminal, and all it showed is read."""
    self._reader.join(seconds)

  def __enter__(self) -> Terminal:
    return self

  def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
               traceback: TracebackType | None) -> None:
    if self.process.poll() is None:
      self.process.kill()
      self.process.wait()
    self._reader.join(10)
    os.close(self._leader)

  def _read(self) -> None:
    while True:
      try:
        data = os.read(self._leader, 65536)
      except OSError:  # the command has ended
        return
      if not data:
        return
      self.shown.extend(data)
