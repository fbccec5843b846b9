"""A signal that switches pacing off, and on again."""

from __future__ import annotations

import logging
import signal
import threading
from types import FrameType
from typing import Any

_LOG = logging.getLogger("jaxpace")


class Toggle:
  """Counts arrivals of a signal; whoever listened to it before still does. `install` and `restore`:
  main thread."""

  def __init__(self, number: int | None):
    """Prepares; `number` is the signal, None for none."""
    self._number, self._installed = number, False
    self._before: Any = None
    self._pressed = self._seen = 0

  def install(self) -> None:
    """Begins to count; a warning where that can't be, outside of the main thread."""
    if self._number is None:
      return
    if threading.current_thread() is threading.main_thread():
      self._before = signal.signal(self._number, self._on_signal)
      self._installed = True
    else:
      _LOG.warning(
          "jaxpace.Control runs outside the main thread: signal %d does not switch pacing.",
          self._number)

  def restore(self) -> None:
    """Gives the signal back, unless someone else has taken it since."""
    if (self._number is None or not self._installed
        or threading.current_thread() is not threading.main_thread()):
      return
    if signal.getsignal(self._number) == self._on_signal:
      signal.signal(self._number, signal.SIG_DFL if self._before is None else self._before)
    self._installed = False

  def turned(self) -> bool:
    """Whether the signal has come an odd number of times since the last call. For one thread."""
    pressed = self._pressed
    odd = (pressed - self._seen) % 2 == 1
    self._seen = pressed
    return odd

  def _on_signal(self, number: int, frame: FrameType | None) -> None:
    self._pressed += 1
    if callable(self._before):
      self._before(number, frame)
