"""Python's garbage collector under the housekeeper: held back, run on purpose, frozen, and put back
as it was."""

from __future__ import annotations

import contextlib
import gc
import os
import pathlib
import sys
import time
from typing import Any

_NEVER = 1 << 30
_HAS_OLD_GENERATION = sys.version_info < (3, 14)
"""From 3.14 on the threshold of the oldest generation is ignored: there the collector is held back
as a whole."""


class GarbageCollector:
  """Steers the collector between `take` and `restore`; the settings found by `take` are those put
  back.

  Attributes:
    full: full collections seen since `take`, the interpreter's own and those asked for.
    full_ns: time spent in full collections.
  """

  def __init__(self) -> None:
    self.full = self.full_ns = 0
    self._started = 0
    self._enabled = True
    self._thresholds: tuple[int, int, int] = (700, 10, 10)
    self._others_frozen = False
    self._frozen = self._survivors = self._held = False

  def take(self) -> None:
    """Remembers the interpreter's settings and begins to watch its full collections."""
    self._enabled, self._thresholds = gc.isenabled(), gc.get_threshold()
    self._others_frozen = gc.get_freeze_count() > 0
    gc.callbacks.append(self._on_gc)

  def restore(self) -> None:
    """Puts the interpreter's settings back; what was frozen here becomes collectable again."""
    self._thaw()
    self.leave()
    with contextlib.suppress(ValueError):
      gc.callbacks.remove(self._on_gc)

  @property
  def withholds(self) -> bool:
    """Whether garbage may grow here that the interpreter would have collected."""
    return self._held or self._frozen

  def leave(self) -> None:
    """Leaves the collector to the interpreter, as `take` found it.

    After freezing it collects once: the interpreter waits for a quarter more objects than its last
    collection looked at, and that was few.
    """
    self._held = False
    if self._frozen:
      self._thaw()
      self._collect()
    gc.set_threshold(*self._thresholds)
    (gc.enable if self._enabled else gc.disable)()

  def hold_back(self) -> None:
    """No full collection by itself from now on; young objects are still collected, which takes
    microseconds."""
    self.leave()
    self._held = True
    if _HAS_OLD_GENERATION:
      gc.set_threshold(self._thresholds[0], self._thresholds[1], _NEVER)
    else:
      gc.disable()

  def freeze(self) -> None:
    """Collects, then takes all objects out of collections to come, and again after each full one of
    the interpreter.

    Only objects made since then are looked at: pauses become short. Frozen objects are still freed
    when their last reference goes; cycles among them that become garbage are not, until `collect`.
    """
    self._thaw()
    self.leave()
    self._collect()
    self._freeze()

  def refresh(self) -> None:
    """Freezes what has outlived a full collection since the last call. Cheap; for every step."""
    if self._frozen and self._survivors:
      self._freeze()

  def collect(self) -> float:
    """Collects everything now, frozen objects too.

    Returns:
      Seconds it took.
    """
    frozen = self._frozen
    self._thaw()
    seconds = self._collect()
    if frozen:
      self._freeze()
    return seconds

  def _collect(self) -> float:
    start = time.monotonic()
    gc.collect()
    return time.monotonic() - start

  def _freeze(self) -> None:
    gc.freeze()
    self._frozen, self._survivors = True, False

  def _thaw(self) -> None:
    # gc.unfreeze knows nothing of who froze what: where the user had frozen objects before, all
    # stay frozen.
    if self._frozen and not self._others_frozen:
      gc.unfreeze()
    self._frozen = False

  def _on_gc(self, phase: str, info: dict[str, Any]) -> None:
    if info.get("generation") != 2:
      return
    if phase == "start":
      self._started = time.monotonic_ns()
    elif self._started:
      self.full += 1
      self.full_ns += time.monotonic_ns() - self._started
      self._started = 0
      self._survivors = True  # `refresh` freezes them, outside of the collector.


_STATM = pathlib.Path("/proc/self/statm")


def resident_bytes() -> int | None:
  """Returns the bytes of this process that are in memory; None where the system doesn't say (all
  but Linux)."""
  try:
    return int(_STATM.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
  except (OSError, ValueError, IndexError):
    return None
