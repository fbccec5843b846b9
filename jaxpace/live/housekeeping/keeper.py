"""Runs the host's pauses at the same step on every process, or where they cost least; and finds out
which is best."""

from __future__ import annotations

import collections
import logging
import os
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any, Self

from jaxpace.core import fields
from jaxpace.hosts import distributed
from jaxpace.live.housekeeping import chores, memory
from jaxpace.live.housekeeping.auto import Auto
from jaxpace.live.housekeeping.collector import GarbageCollector
from jaxpace.live.housekeeping.modes import ALIGNED, ALONE, AUTO, FROZEN, IN_SLACK, MODES
from jaxpace.live.housekeeping.selection import Situation
from jaxpace.live.housekeeping.slack import SlackReader

_LOG = logging.getLogger("jaxpace")
_GOLDEN = 0.618034  # multiples of it, modulo 1, are spread evenly: one for each process
_active: list[Housekeeper] = []  # There is one collector in an interpreter, so one housekeeper.


class Housekeeper:
  """Garbage collection and other pauses of the training loop, at one step on all processes, or
  where they cost least.

      with jaxpace.Housekeeper(every=200) as keeper:
        keeper.add(lambda: manager.save(keeper.steps, state), every=1000, name="checkpoint")
        for batch in batches:
          pace, (state, metrics) = step(pace, state, batch)
          keeper.step(pace)

  A collection of Python's garbage stops one process, and all others wait for it at the next
  collective. Where each process collects when it happens to, some process does in nearly every
  step. Modes, for the collections:

  - "aligned": no full collection by itself; all processes collect after the same step, every
    `every` steps;
  - "frozen": after warm-up all objects are taken out of collections to come (`gc.freeze`); those
    stay short;
  - "in-slack": as aligned, but a process that is early by more than a collection takes does it
    before, while the others are late anyway. Needs the pace state, with shared arrivals; without
    them it is the same as aligned;
  - "alone": left to the interpreter;
  - "auto": chooses among these by measurement: blocks of steps in each mode, and a mode other than
    "alone" only where it has shown itself faster. All processes change the mode at the same step.

  Which is best is not obvious: four processes collecting at once on two cores are slower than four
  that take turns.

  Leaving the `with` block, by an exception too, restores the interpreter's settings. Every process
  of a job opens its housekeepers in the same order and calls `step` after each step.
  """

  def __init__(self, every: int = 200, mode: str = AUTO, *, start: int = 0, warmup: int = 20,
               max_growth: int | None = 1 << 30, max_memory: int | None = None,
               max_objects: int | None = 20_000_000, ranks: Sequence[int] | None = None,
               timeout: float = 30.0):
    """Prepares; nothing is touched before `with`.

    Args:
      every: steps between two collections. "auto" takes a multiple of it, up to 8, where the
        interpreter's own collections are farther apart.
      mode: one of the modes above.
      start: steps done before, in the attempt that this one resumes. The same on all processes.
      warmup: first steps in which the collector is left alone: the program compiles, and its heap
        takes shape.
      max_growth: bytes by which resident memory may grow from one collection to the next; then it
        is collected at once, whatever the step. None: no such ceiling. Where the system doesn't
        tell resident memory: none either.
      max_memory: the same for resident memory as a whole, in bytes.
      max_objects: the same for the number of container objects since the last collection,
        approximately.
      ranks: indices along the data axis of this process's ranks, for "in-slack"; needed only where
        the mesh has other axes besides it.
      timeout: seconds to wait for what process 0 says of the next mode; then the collector is left
        alone, for good.

    Raises:
      ValueError: an argument is out of range.
    """
    fields.choice("mode", mode, (*MODES, AUTO))
    for name, value, least in (("every", every, 2), ("start", start, 0), ("warmup", warmup, 0)):
      fields.whole(name, value, least, of="steps")
    for name, limit in (("max_growth", max_growth), ("max_memory", max_memory),
                        ("max_objects", max_objects)):
      if limit is not None and not limit > 0:
        raise ValueError(f"{name}={limit!r} must be positive, or None for no ceiling.")
    if not timeout > 0:
      raise ValueError(f"timeout={timeout!r} must be a positive number of seconds.")
    self.every, self.wanted = every, mode
    self.mode = ALONE
    self.steps = self._start = start
    self.forced = 0
    self._begin = start + warmup
    self._collector = GarbageCollector()
    self._collection = chores.Chore("garbage collection", self._collector.collect, every,
                                    movable=True)
    self._chores: list[chores.Chore] = []
    self._errors = chores.Errors()
    self._ceiling = memory.Ceiling(max_memory, max_growth, max_objects)
    self._ceiling_told = False
    self._slack = SlackReader(max(1, every // 16), ranks) if mode in (AUTO, IN_SLACK) else None
    self._timeout = timeout
    self._auto: Auto | None = None
    self._spent: collections.Counter[str] = collections.Counter()  # ns by name of the columns
    self._stagger = 0.0
    self._open = self._closed = False
    self._pid = 0

  def add(self, hook: Callable[[], object], every: int, *, name: str | None = None,
          movable: bool = False) -> None:
    """Has `hook()` called after every `every`-th step, counted from the start of the run: at one
    step on all processes.

    An error that it raises is logged, once for each kind, counted, and does not stop the training.

    Args:
      hook: what to call, in the thread that trains.
      every: steps from one call to the next.
      name: for the log; "checkpoint" for what the trace's `checkpoint_ns` is to show, see
        `columns`.
      movable: whether mode "in-slack" may call it up to half a period before, on each process at a
        step of its own. Not for hooks that talk to the other processes, as saving a checkpoint
        does: those must come together.

    Raises:
      TypeError: `hook` can't be called.
      ValueError: `every` is not a positive whole number.
    """
    if not callable(hook):
      raise TypeError(f"add() takes a function to call, not {type(hook).__name__}; for one with "
                      "arguments: keeper.add(lambda: save(state), every=...).")
    fields.whole("every", every, 1, of="steps")
    chore = chores.Chore(name or str(getattr(hook, "__qualname__", type(hook).__name__)), hook,
                         every, movable)
    chore.begin(self.steps)
    self._chores.append(chore)

  @property
  def errors(self) -> dict[str, int]:
    """How often each hook has raised."""
    return dict(self._errors.counts)

  def summary(self) -> dict[str, Any]:
    """Returns what was done so far, as plain JSON values.

    `mode`; `steps`; `full_collections` (all, the interpreter's own too) and their
    `collection_seconds`; `forced`: collections that a ceiling asked for; `errors`; with "auto" also
    `trial`: what was found of each mode, on process 0.
    """
    found = {"mode": self.mode, "steps": self.steps, "full_collections": self._collector.full,
             "collection_seconds": self._collector.full_ns * 1e-9, "forced": self.forced,
             "errors": self.errors}
    return found if self._auto is None else {**found, "trial": self._auto.summary()}

  def columns(self) -> dict[str, float]:
    """Returns what the trace may keep of the pauses since the last call.

        keeper.step(pace)
        recorder.record(pace, **keeper.columns())

    `checkpoint_ns`, where there is a hook of the name "checkpoint"; `pauses_ns` of all other hooks;
    `housekeeping`: the mode, as its index in `jaxpace.live.housekeeping.modes.MODES`. (Garbage
    collection needs no column: the recorder sees every one, and its `gc_ns` shows them.)
    """
    found: dict[str, float] = {"pauses_ns": self._spent.pop("pauses_ns", 0),
                               "housekeeping": MODES.index(self.mode)}
    if any(chore.name == "checkpoint" for chore in self._chores):
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
    if self.wanted == AUTO:
      # The same step on all processes: a multiple of the period, so that each block has whole
      # periods.
      self._auto = Auto(self.every, max(1, -(-self._begin // self.every)) * self.every,
                        self._timeout)
    self._open, self._pid = True, os.getpid()
    self._stagger = distributed.process_index() * _GOLDEN % 1
    _active.append(self)
    self._collector.take()
    return self

  def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
               trace: TracebackType | None) -> None:
    self._open, self._closed = False, True
    _active.clear()
    if os.getpid() != self._pid:
      return
    self._collector.restore()  # first: whatever becomes of the rest
    if self._auto is not None:
      self._auto.close()

  def step(self, pace: Any = None) -> None:
    """Counts a step, and does what is due after it. Call it once after every step, on every
    process.

    Args:
      pace: the pace state that the step returned; it may be donated afterwards. Only "in-slack",
        and "auto" to try it, look at it; without it neither runs anything in an early rank's slack.

    Raises:
      RuntimeError: the housekeeper is not open.
      ValueError: `pace` was donated already.
    """
    if not self._open:
      raise RuntimeError(
          "step() outside of the housekeeper's `with` block: open it around the loop.")
    self.steps += 1
    if pace is not None and self._slack is not None:
      if not hasattr(pace, "arrivals"):
        raise TypeError("step() takes the pace state, the first thing the step returns, or "
                        f"nothing; got {type(pace).__name__}. Is it the train state?")
      if pace.arrivals.is_deleted():
        raise ValueError("step() got a pace state that was donated: give it the one the step "
                         "returned, `pace, out = step(pace, ...)`, then keeper.step(pace).")
      self._slack.see(pace)
    slack = self._slack.own() if self._slack is not None and self.mode == IN_SLACK else None
    for chore in self._chores:
      if chore.is_due(self.steps, slack, self._stagger):
        column = "checkpoint_ns" if chore.name == "checkpoint" else "pauses_ns"
        self._spent[column] += int(1e9 * chores.run(chore, self.steps, self._errors))
    if (self.mode in (ALIGNED, IN_SLACK)
        and self._collection.is_due(self.steps, slack, self._stagger)):
      self._collect()
    elif self._collector.withholds:
      self._collector.refresh()
      self._watch_memory()
    self._change_mode()

  def _collect(self) -> None:
    chores.run(self._collection, self.steps, self._errors)
    self._ceiling.collected()

  def _watch_memory(self) -> None:
    reason = self._ceiling.reached(self._collector.growth())
    if reason is None:
      return
    self.forced += 1
    done = self._collection.done
    self._collect()
    self._collection.done = done  # What is due for all still is.
    if not self._ceiling_told:
      self._ceiling_told = True
      _LOG.warning("Collected garbage at step %d, out of turn: %s. Further such collections are "
                   "only counted, in Housekeeper.forced. A smaller `every` avoids them.",
                   self.steps, reason)

  def _change_mode(self) -> None:
    if self._auto is not None:
      block = self._auto.after(self.steps, self._situation)
      if block is not None:
        # In "auto" a block is as long as the interpreter's own collections are apart, and is ended
        # by one.
        self._collection.every = block.until - block.first
        self._collection.begin(self.steps, origin=block.first)
        self._take_up(block.mode)
    elif self.mode != self.wanted and self.steps >= self._begin:
      self._collection.begin(self.steps)
      self._take_up(self.wanted)

  def _take_up(self, mode: str) -> None:
    if mode == self.mode:
      return
    self.mode = mode
    if mode in (ALIGNED, IN_SLACK):
      self._collector.hold_back()
    elif mode == FROZEN:
      self._collector.freeze()
    else:
      self._collector.leave()
    self._ceiling.collected()

  def _situation(self) -> Situation:
    return Situation(self._collector.full - self._collector.own, self._collection.expected,
                     None if self._slack is None else self._slack.largest())
