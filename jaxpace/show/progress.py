"""Says how far a long command is, on a terminal only."""

from __future__ import annotations

import functools
import sys
import threading
import time
from collections.abc import Callable
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
    self._said, self._last = "", ""
    self._over = threading.Event()
    self._ticker: threading.Thread | None = None

  def during(self, what: str) -> None:
    """Shows what goes on, and for how many seconds the command has run, until `clear`.

    For what can't say how far it is: imports, compilation, a run in one piece. What is counted
    replaces the words.
    """
    if not self._on:
      return
    with self._lock:
      self._said = what
    if self._ticker is None:
      self._ticker = threading.Thread(target=self._tick, name="jaxpace-progress", daemon=True)
      self._ticker.start()

  def counting(self, what: str) -> Callable[[int, int], None]:
    """Returns what shows how much of something is done: called with what is done, and with all."""
    return functools.partial(self._show, what)

  def clear(self) -> None:
    """Takes the line away."""
    if self._ticker is not None:
      self._over.set()
      self._ticker.join()
    if self._shown:
      self._stream.write("\r\x1b[K")
      self._stream.flush()
      self._shown = False

  def _show(self, what: str, done: int, total: int) -> None:
    if not self._on:
      return
    text = f"{what} {100 * done // max(1, total)} %"
    with self._lock:
      self._said = text
      if self._ticker is not None:
        return
      now = time.monotonic() - self._begin
      if now < self._quiet or now < self._next:
        return
      self._next = now + _EVERY_SECONDS
      self._write(text)

  def _tick(self) -> None:
    while not self._over.wait(_EVERY_SECONDS):
      now = time.monotonic() - self._begin
      with self._lock:
        text = f"{self._said}, {now:.0f} s"
        if now >= self._quiet and text != self._last:
          self._last = text
          self._write(text)

  def _write(self, text: str) -> None:
    self._stream.write(f"\r\x1b[K{text}")
    self._stream.flush()
    self._shown = True
