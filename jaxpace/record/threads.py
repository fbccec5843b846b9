"""Threads beside the program's own."""

from __future__ import annotations

import contextlib
import sys
import threading
import types
from collections.abc import Callable


class BackgroundThread(threading.Thread):
  """A thread that ends with the process, and that no tracer or profiler of the program sees: they
  may count on its own threads alone, as `python -m trace --count` does."""

  def __init__(self, target: Callable[[], None], name: str):
    """Prepares; `start` calls `target`."""
    super().__init__(target=target, name=f"jaxpace-{name}", daemon=True)

  def start_if_it_can(self) -> None:
    """Starts it, unless no thread can start, as in Python 3.12 once the program is over."""
    with contextlib.suppress(RuntimeError):
      self.start()

  def run(self) -> None:
    """See `threading.Thread`."""
    # As `threading.settrace` and `threading.setprofile` asked for. A debugger has a function of its
    # own there, which complains.
    for see in (sys.settrace, sys.setprofile):
      if isinstance(see, types.BuiltinFunctionType):
        see(None)
    super().run()
