"""How far this process's loop has come: written by the loop, read by the watchdog's thread."""

from __future__ import annotations

import collections
import contextlib
import operator
import os
import statistics
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import jax

_JAX = f"{os.sep}jax{os.sep}_src{os.sep}"
"""In the path of every file of JAX itself, wherever it is installed."""


def of_thread(identity: int, characters: int) -> str:
  """Returns a thread's Python stack, outermost call first; where it has more characters, its
  innermost calls."""
  frame = sys._current_frames().get(identity)
  if frame is None:
    return "the thread has ended"
  text = "".join(traceback.format_list([call for call in traceback.extract_stack(frame)
                                        # the import system, runpy
                                        if not call.filename.startswith("<frozen ")]))
  if len(text) > characters:
    text = "...\n" + text[len(text) - characters + 4:]
  return text.rstrip("\n")


def compiles(identity: int) -> bool:
  """Whether a thread is in the middle of tracing or compiling for JAX, as its stack shows.

  A running program shows no frames of JAX below the call, or those of a wait; a program in the
  making shows those of its compiler or its tracer.
  """
  frame: FrameType | None = sys._current_frames().get(identity)
  while frame is not None:
    code = frame.f_code
    if _JAX in code.co_filename and ("compile" in code.co_name or "trace_to_jaxpr" in code.co_name):
      return True
    frame = frame.f_back
  return False


_LEAVES = 4
# steps under way whose results are looked at; JAX dispatches no more than a few dozen
_PENDING = 256
_INTERVALS = 64


class LoopProgress:
  """Counts the steps that were called and those that completed.

  A step has completed when one of its results is there: `jax.Array.is_ready` asks the host's own
  record of the array and starts nothing on a device. A result that was donated to the next step
  can't be asked, so a few of the smallest are kept (the loss, say). Where none can be asked, a step
  counts as completed when its call returns.
  """

  def __init__(self, clock: Callable[[], float]) -> None:
    """Prepares; `clock` gives monotonic seconds."""
    self._clock = clock
    self._lock = threading.Lock()
    self._pending: collections.deque[tuple[int, list[Any]]] = collections.deque()
    self._intervals: collections.deque[float] = collections.deque(maxlen=_INTERVALS)
    self._pauses: list[tuple[str, float]] = []  # name, when its excuse ends
    self._inside = False
    self.thread = threading.get_ident()
    self.entered = self.completed = 0
    self.moved = clock()
    self.excused_at: float | None = None

  def enter(self) -> None:
    """The step's function is being called."""
    self.thread = threading.get_ident()
    with self._lock:
      self.entered += 1
      self._inside = True

  def leave(self, result: Any) -> None:
    """It has returned; the devices may be at it still."""
    arrays = (leaf for leaf in jax.tree.leaves(result) if isinstance(leaf, jax.Array))
    leaves = sorted(arrays, key=lambda leaf: leaf.size)[:_LEAVES]
    with self._lock:
      self._inside = False
      self._pending.append((self.entered, leaves))
      if len(self._pending) > _PENDING:
        self._pending.popleft()
    self.look()

  def fail(self) -> None:
    """It has raised: the step does not count."""
    with self._lock:
      self._inside = False
      self.entered -= 1

  def look(self) -> None:
    """Finds out which steps have completed by now."""
    with self._lock:
      done = self.completed
      for step, leaves in self._pending:
        if _done(leaves):
          done = max(done, step)
      while self._pending and self._pending[0][0] <= done:
        self._pending.popleft()
      if done > self.completed:
        now = self._clock()
        if self.completed and not self._pauses:
          self._intervals.append((now - self.moved) / (done - self.completed))
        self.completed = done
        self.moved = now

  @contextlib.contextmanager
  def pause(self, name: str, limit: float) -> Iterator[None]:
    """Announces that this takes long, up to `limit` seconds."""
    entry = (name, self._clock() + limit)
    with self._lock:
      self._pauses.append(entry)
    try:
      yield
    finally:
      with self._lock:
        self._pauses.remove(entry)
        self.excuse()

  def excuse(self) -> None:
    """Starts the waiting time anew: it is known why nothing moved until now."""
    self.excused_at = self.moved = self._clock()

  def excused(self) -> bool:
    """Whether an announced pause is going on, within its limit."""
    with self._lock:
      return any(self._clock() < until for _, until in self._pauses)

  def phase(self, doing: str | None) -> str:
    """Where the loop is; `doing` is what the recorder measures at the moment, if it does."""
    with self._lock:
      pauses, inside, entered = list(self._pauses), self._inside, self.entered
    if pauses:
      return pauses[-1][0]
    if self.compiling():
      return "compiling"
    if doing:
      return doing
    if inside or entered > self.completed:
      return "step"
    return "between steps" if entered else ""

  def compiling(self) -> bool:
    """Whether the loop's thread is compiling."""
    return compiles(self.thread)

  def usual(self) -> float | None:
    """Median time of a step, seconds, pauses left out; None before a few have completed."""
    with self._lock:
      return statistics.median(self._intervals) if len(self._intervals) >= 4 else None


def _done(leaves: list[Any]) -> bool:
  asked = False
  for leaf in leaves:
    try:
      # `is_ready` of an array that `delete()` was called on crashes the interpreter (JAX 0.10), and
      # the loop's thread may call that at any time: so both are asked in one go, during which the
      # interpreter changes no threads.
      if any(map(operator.call, (leaf.is_deleted, leaf.is_ready))) and not leaf.is_deleted():
        return True
      asked |= not leaf.is_deleted()
    except (AttributeError, RuntimeError):  # a tracer; donated to the next step this very moment
      continue
  return not asked
