"""Runs the host's pauses at the same step on every process, and keeps garbage collections short."""

from __future__ import annotations

import collections
import logging
import os
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any, NamedTuple, Self

from jaxpace.core import fields
from jaxpace.live.collector import GarbageCollector, resident_bytes


class PeriodicTask(NamedTuple):
  """A pause of the program's own that recurs every so many steps."""

  name: str  # for the log and the counts
  hook: Callable[[], object]
  every: int  # steps from one time to the next


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
    self._collection = PeriodicTask("garbage collection", self._collector.collect, every)
    self._tasks: list[PeriodicTask] = []
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
    self._tasks.append(PeriodicTask(called, hook, every))

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
    if any(task.name == "checkpoint" for task in self._tasks):
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
    for task in self._tasks:
      if self.steps % task.every == 0:
        column = "checkpoint_ns" if task.name == "checkpoint" else "pauses_ns"
        self._spent[column] += int(1e9 * self._run(task))
    if self.mode == ALIGNED and self.steps % self.every == 0:
      self._collect()
    elif self._collector.withholds:
      self._collector.refresh()
      self._watch_memory()
    if self.mode != self.wanted and self.steps >= self._begin:
      self._begin_mode()

  def _collect(self) -> None:
    self._run(self._collection)
    self._after = resident_bytes()

  def _run(self, task: PeriodicTask) -> float:
    """Runs a periodic task. What it raises is counted, and logged the first time it raises one of
    this type; only KeyboardInterrupt, SystemExit and their like pass.

    Returns:
      Seconds it took.
    """
    start = time.monotonic()
    try:
      task.hook()
    except Exception as error:
      self._errors[task.name] += 1
      if (key := (task.name, type(error))) not in self._logged:
        self._logged.add(key)
        _LOG.warning("Housekeeping hook %r raised %s at step %d: %s. Training goes on; further "
                     "ones of this kind are only counted, in Housekeeper.errors.", task.name,
                     type(error).__name__, self.steps, error)
        _LOG.debug("Hook %r raised", task.name, exc_info=error)
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
