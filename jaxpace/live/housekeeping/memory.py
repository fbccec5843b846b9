"""How much memory a process has, and when that calls for a collection at once."""

from __future__ import annotations

import os
import pathlib
import time
from collections.abc import Callable

_STATM = pathlib.Path("/proc/self/statm")
_SECONDS = 0.25  # between two looks: each takes some 10 us
_AGAIN = 1.05  # a collection that freed nothing is not repeated before memory has grown by as much


def resident_bytes() -> int | None:
  """Returns the bytes of this process that are in memory; None where the system doesn't tell (all
  but Linux)."""
  try:
    return int(_STATM.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
  except (OSError, ValueError, IndexError):
    return None


class Ceiling:
  """Says when memory has grown so much that it must be collected now, whatever the step.

  Args:
    max_bytes: most resident bytes; None for no such limit.
    max_growth: most resident bytes more than after the last collection; None for no such limit.
    max_objects: most container objects more than after the last collection; None for no such limit.
    resident: tells the resident bytes.
    clock: seconds, monotonic.
  """

  def __init__(self, max_bytes: int | None, max_growth: int | None, max_objects: int | None,
               resident: Callable[[], int | None] = resident_bytes,
               clock: Callable[[], float] = time.monotonic):
    self._max_bytes, self._max_growth, self._max_objects = max_bytes, max_growth, max_objects
    self._resident, self._clock = resident, clock
    self._after: int | None = None
    self._looked = float("-inf")

  def collected(self) -> None:
    """Takes memory as it is now for what is left after a collection."""
    self._after = self._resident()

  def reached(self, growth: int) -> str | None:
    """Returns what has grown too much, in words, or None. Looks at memory a few times a second.

    Args:
      growth: container objects more than after the last collection.
    """
    if self._max_objects is not None and growth > self._max_objects:
      return (f"{growth:,} more objects than after the last collection "
              f"(max_objects={self._max_objects:,})")
    now = self._clock()
    if now - self._looked < _SECONDS:
      return None
    self._looked = now
    resident = self._resident()
    if resident is None:
      return None
    if self._after is None:
      self._after = resident
    if self._max_growth is not None and resident - self._after > self._max_growth:
      return (f"{_mib(resident - self._after)} more than after the last collection "
              f"(max_growth={_mib(self._max_growth)})")
    if (self._max_bytes is not None and resident > self._max_bytes
        and resident > _AGAIN * self._after):
      return f"{_mib(resident)} resident (max_memory={_mib(self._max_bytes)})"
    return None


def _mib(count: int) -> str:
  return f"{count / 2**20:,.0f} MiB"
