"""Runs the host's pauses at the same step on every process, and keeps garbage collections short."""

from __future__ import annotations

import collections
import contextlib
import gc
import logging
import os
import pathlib
import sys
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any, Self

from jaxpace.core import fields

_LOG = logging.getLogger("jaxpace")
ALONE, ALIGNED, FROZEN = "alone", "aligned", "frozen"
MODES = (ALONE, ALIGNED, FROZEN)
"""In this order: a mode's index is what the trace's column `host_housekeeping` holds."""
_LOOK_SECONDS = 0.25  # between two looks at memory: each takes some 10 us
_active: list[Housekeeper] = []  # There is one collector in an interpreter, so one housekeeper.


class Housekeeper:
  """Garbage collection and other pauses of the training loop, at one step on all processes.

      with jaxpace.Housekeeper(every=200) as keeper:
        keeper.add(lambda: manager.save(keeper.steps, state), every=1000, name="checkpoint")
        for batch in batches:
          state, metrics = step(state, batch)
          keeper.step()

  A collection of Python's garbage stops one process, and all others wait for it at the next
  collective. Where each process collects when it happens to, some process does in nearly every
  step. Modes, for the collections:

  - "frozen": after warm-up all objects are taken out of collections to come (`gc.freeze`); those
    stay short;
  - "aligned": no full collection by itself; all processes collect after the same step, every
    `every` steps;
  - "alone": left to the interpreter.

  Leaving the `with` block, by an exception too, restores the interpreter's settings. Every process
  of a job calls `step` after each step.
  """

  def __init__(self, every: int = 200, mode: str = FROZEN, *, start: int = 0, warmup: int = 20,
               max_growth: int | None = 1 << 30):
    """Prepares; nothing is touched before `with`.

    Args:
      every: steps between two collections of mode "aligned".
      mode: one of the modes above.
      start: steps done before, in the attempt that this one resumes. The same on all processes.
      warmup: first steps in which the collector is left alone: the program compiles, and its heap
        takes shape.
      max_growth: bytes by which resident memory may grow from one collection to the next; then it
        is collected at once, whatever the step. None: no ceiling; nor is there one where the
        system doesn't tell resident memory (all but Linux).

    Raises:
      ValueError: an argument is out of range.
    """
    fields.choice("mode", mode, MODES)
    for name, value, least in (("every", every, 2), ("start", start, 0), ("warmup", warmup, 0)):
      fields.whole(name, value, least, of="steps")
    if max_growth is not None and not max_growth > 0:
      raise ValueError(f"max_growth={max_growth!r} must be positive, or None for no ceiling.")
    self.every, self.wanted = every, mode
    self.mode = ALONE
    self.steps = start
    self.forced = 0
    self._begin = start + warmup
    self._collector = GarbageCollector()
    # Of each hook its name, itself, and steps from one call to the next.
    self._tasks: list[tuple[str, Callable[[], object], int]] = []
    self._errors: collections.Counter[str] = collections.Counter()  # by hook
    self._logged: set[tuple[str, type[BaseException]]] = set()
    self._max_growth, self._ceiling_told = max_growth, False
    self._after: int | None = None  # resident bytes after the last collection
    self._looked = 0.0
    self._spent: collections.Counter[str] = collections.Counter()  # ns by name of the columns
    self._open = self._closed = False
    self._pid = 0

  def add(self, hook: Callable[[], object], every: int, *, name: str | None = None) -> None:
    """Has `hook()` called after every `every`-th step, counted from the start of the run: at one
    step on all processes.

    An error that it raises is logged, once for each kind, counted, and does not stop the training.

    Args:
      hook: what to call, in the thread that trains.
      every: steps from one call to the next.
      name: for the log; "checkpoint" for what the trace's `checkpoint_ns` is to show, see
        `columns`.

    Raises:
      TypeError: `hook` can't be called.
      ValueError: `every` is not a positive whole number.
    """
    if not callable(hook):
      raise TypeError(f"add() takes a function to call, not {type(hook).__name__}; for one with "
                      "arguments: keeper.add(lambda: save(state), every=...).")
    fields.whole("every", every, 1, of="steps")
    called = name or str(getattr(hook, "__qualname__", type(hook).__name__))
    self._tasks.append((called, hook, every))

  @property
  def errors(self) -> dict[str, int]:
    """How often each hook has raised."""
    return dict(self._errors)

  def summary(self) -> dict[str, Any]:
    """Returns what was done so far, as plain JSON values.

    `mode`; `steps`; `full_collections` (all, the interpreter's own too) and their
    `collection_seconds`; `forced`: collections that a ceiling asked for; `errors`.
    """
    return {"mode": self.mode, "steps": self.steps, "full_collections": self._collector.full,
            "collection_seconds": self._collector.full_ns * 1e-9, "forced": self.forced,
            "errors": self.errors}

  def columns(self) -> dict[str, float]:
    """Returns what the trace may keep of the pauses since the last call.

        keeper.step()
        recorder.record(**keeper.columns())

    `checkpoint_ns`, where there is a hook of the name "checkpoint"; `pauses_ns` of all other hooks;
    `housekeeping`: the mode, as its index in `jaxpace.live.housekeeper.MODES`. (Garbage
    collection needs no column: the recorder sees every one, and its `gc_ns` shows them.)
    """
    found: dict[str, float] = {"pauses_ns": self._spent.pop("pauses_ns", 0),
                               "housekeeping": MODES.index(self.mode)}
    if any(name == "checkpoint" for name, _, _ in self._tasks):
      found["checkpoint_ns"] = self._spent.pop("checkpoint_ns", 0)
    return found

  def __enter__(self) -> Self:
    if self._closed or self._open:
      raise RuntimeError(
          "A Housekeeper is opened once: make a new one for the next run, with start= the "
          "steps done.")
    if _active:
      raise RuntimeError("A Housekeeper is open already, and there is one garbage collector in a "
                         "process: leave its `with` block first, or add your pauses to it with "
                         "keeper.add(...).")
    self._open, self._pid = True, os.getpid()
    _active.append(self)
    self._collector.take()
    return self

  def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
               trace: TracebackType | None) -> None:
    self._open, self._closed = False, True
    _active.clear()
    if os.getpid() == self._pid:
      self._collector.restore()

  def step(self) -> None:
    """Counts a step, and does what is due after it. Call it once after every step, on every
    process.

    Raises:
      RuntimeError: the housekeeper is not open.
    """
    if not self._open:
      raise RuntimeError(
          "step() outside of the housekeeper's `with` block: open it around the loop.")
    self.steps += 1
    for name, hook, every in self._tasks:
      if self.steps % every == 0:
        column = "checkpoint_ns" if name == "checkpoint" else "pauses_ns"
        self._spent[column] += int(1e9 * self._run(name, hook))
    if self.mode == ALIGNED and self.steps % self.every == 0:
      self._collect()
    elif self._collector.withholds:
      self._collector.refresh()
      self._watch_memory()
    if self.mode != self.wanted and self.steps >= self._begin:
      self._begin_mode()

  def _collect(self) -> None:
    self._run("garbage collection", self._collector.collect)
    self._after = resident_bytes()

  def _run(self, name: str, hook: Callable[[], object]) -> float:
    """Calls a hook, and returns the seconds that it took. What it raises is counted, and logged the
    first time it raises one of this type; only KeyboardInterrupt, SystemExit and their like pass.
    """
    start = time.monotonic()
    try:
      hook()
    except Exception as error:
      self._errors[name] += 1
      if (key := (name, type(error))) not in self._logged:
        self._logged.add(key)
        _LOG.warning("Housekeeping hook %r raised %s at step %d: %s. Training goes on; further "
                     "ones of this kind are only counted, in Housekeeper.errors.", name,
                     type(error).__name__, self.steps, error)
        _LOG.debug("Hook %r raised", name, exc_info=error)
    return time.monotonic() - start

  def _watch_memory(self) -> None:
    """Collects out of turn where memory has grown too much since the last collection."""
    if self._max_growth is None or time.monotonic() - self._looked < _LOOK_SECONDS:
      return
    self._looked = time.monotonic()
    resident = resident_bytes()
    if resident is None or self._after is None or resident - self._after <= self._max_growth:
      return
    grown = (resident - self._after) >> 20
    self.forced += 1
    self._collect()
    if not self._ceiling_told:
      self._ceiling_told = True
      _LOG.warning("Collected garbage at step %d, out of turn: %s MiB more than after the last "
                   "collection (max_growth=%s MiB). Further such collections are only counted, in "
                   "Housekeeper.forced. A smaller `every` avoids them.", self.steps, f"{grown:,}",
                   f"{self._max_growth >> 20:,}")

  def _begin_mode(self) -> None:
    self.mode = self.wanted
    if self.mode == ALIGNED:
      self._collector.hold_back()
    else:
      self._collector.freeze()
    self._after = resident_bytes()


# Python's garbage collector under the housekeeper: held back, run on purpose, frozen, and put back
# as it was.

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
    self._held = False
    gc.set_threshold(*self._thresholds)
    (gc.enable if self._enabled else gc.disable)()
    with contextlib.suppress(ValueError):
      gc.callbacks.remove(self._on_gc)

  @property
  def withholds(self) -> bool:
    """Whether garbage may grow here that the interpreter would have collected."""
    return self._held or self._frozen

  def hold_back(self) -> None:
    """No full collection by itself from now on; young objects are still collected, which takes
    microseconds."""
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
    self._frozen = True
    self.collect()

  def refresh(self) -> None:
    """Freezes what has outlived a full collection since the last call. Cheap; for every step."""
    if self._frozen and self._survivors:
      self._freeze()

  def collect(self) -> None:
    """Collects everything now, frozen objects too."""
    frozen = self._frozen
    self._thaw()
    gc.collect()
    if frozen:
      self._freeze()

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
