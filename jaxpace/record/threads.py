"""Threads beside the program's own."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable


class BackgroundThread(threading.Thread):
  """A thread that ends with the process, and that no tracer or profiler of the program sees: they
  may count on its own threads alone, as `python -m trace --count` does."""

  def __init__(self, target: Callable[[], None], name: str):
    """Prepares; `start` calls `target`."""
    super().__init__(target=target, name=f"jaxpace-{name}", daemon=True)

  def run(self) -> None:
    """See `threading.Thread`."""
    # As `threading.settrace` and `threading.setprofile` asked for.
    sys.settrace(None)
    sys.setprofile(None)
    super().run()
