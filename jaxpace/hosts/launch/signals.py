"""Signals that reach the launcher, collected for its loop."""

from __future__ import annotations

import contextlib
import os
import select
import signal
from collections.abc import Iterator
from types import FrameType


class Signals:
  """Collects the signals that reach the launcher while the context is open, and wakes its loop."""

  def __init__(self) -> None:
    """Prepares; nothing is caught before `collecting`."""
    self.received: list[int] = []
    self._read, self._write = os.pipe()
    for fd in (self._read, self._write):
      os.set_blocking(fd, False)

  @contextlib.contextmanager
  def collecting(self) -> Iterator[Signals]:
    """Catches SIGINT, SIGTERM, SIGHUP and SIGCHLD until the context is left; `received` lists the
    first three."""
    before = {}
    wakeup = signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)
    try:
      for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGCHLD):
        # what a parent chose to ignore stays ignored: `nohup` does so with SIGHUP, `sh -c '... &'`
        # with SIGINT
        if number == signal.SIGCHLD or signal.getsignal(number) is not signal.SIG_IGN:
          before[number] = signal.signal(number, self._note)
      yield self
    finally:
      for number, handler in before.items():
        signal.signal(number, handler)
      signal.set_wakeup_fd(wakeup)
      os.close(self._read)
      os.close(self._write)

  def _note(self, number: int, frame: FrameType | None) -> None:
    del frame
    if number != signal.SIGCHLD:
      self.received.append(number)

  def wait(self, seconds: float) -> None:
    """Sleeps until a signal comes (a child's end is one) or the time is over."""
    select.select([self._read], [], [], seconds)
    with contextlib.suppress(BlockingIOError):
      while os.read(self._read, 512):
        pass
