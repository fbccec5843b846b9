"""Says how far a long report is, on a terminal only."""

from __future__ import annotations

import sys
import threading
import time
from typing import TextIO

_QUIET_SECONDS = 2.0
_EVERY_SECONDS = 0.2


class Progress:
  """One line on standard error, from the third second on; nothing where that is no terminal."""

  def __init__(self, stream: TextIO | None = None, quiet_seconds: float = _QUIET_SECONDS):
    self._stream = stream or sys.stderr
    self._begin = time.monotonic()
    self._quiet, self._next = quiet_seconds, 0.0
    self._lock = threading.Lock()
    self._shown = False
    self._on = self._stream.isatty()

  def reading(self, done: int, total: int) -> None:
    """Shows how many rows have been read."""
    self._show("Reading", done, total)

  def adding_up(self, done: int, total: int) -> None:
    """Shows how many steps have been added up."""
    self._show("Adding up", done, total)

  def drawing(self, done: int, total: int) -> None:
    """Shows how many steps are laid out for charts."""
    self._show("Drawing", done, total)

  def simulating(self, done: int, total: int) -> None:
    """Shows how many steps have been simulated."""
    self._show("Simulating", done, total)

  def clear(self) -> None:
    """Takes the line away."""
    if self._shown:
      self._stream.write("\r\x1b[K")
      self._stream.flush()
      self._shown = False

  def _show(self, what: str, done: int, total: int) -> None:
    if not self._on:
      return
    with self._lock:
      now = time.monotonic() - self._begin
      if now < self._quiet or now < self._next:
        return
      self._next = now + _EVERY_SECONDS
      self._stream.write(f"\r\x1b[K{what} {100 * done // max(1, total)} %")
      self._stream.flush()
      self._shown = True
