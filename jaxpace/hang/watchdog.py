"""Says which processes have not arrived when a step does not complete."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import logging
import math
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import TYPE_CHECKING, Any, ParamSpec, Self, TypeVar

from jaxpace.core.fields import is_number
from jaxpace.hang import progress, verdict
from jaxpace.hang.alarms import EventFile, Late, LateCause
from jaxpace.hang.heartbeat import (
  LARGE_JOB,
  STACK_CHARACTERS,
  Heartbeat,
  LastHeartbeat,
  StoreThread,
)
from jaxpace.hang.progress import LoopProgress
from jaxpace.hang.waits import too_long
from jaxpace.hosts import distributed

if TYPE_CHECKING:
  from jaxpace.record.recording import Recording

P = ParamSpec("P")
R = TypeVar("R")

_LOG = logging.getLogger("jaxpace")
_LOOK_SECONDS = 0.2  # between two looks at the loop
_BEAT_SECONDS = 0.4  # between two heartbeats, in a small job
_BEATS_A_SECOND = 1000  # of all processes together: what process 0's store is asked to take
_SILENCE_BEATS = 3  # a process is silent when so many of its heartbeats have not come
# before the time is up the others' heartbeats are read, so that their silence is known then
_PRELUDE_SECONDS = 4.0
_GRACE_SECONDS = 1.6  # after the time is up, at most, to hear everyone
# processes that read all heartbeats at a time; in a large job the rest wait for their turn
_READERS = 16
_TURN_SECONDS = 2.0
_SHORTEST = 1.0
_CAUSES = 3  # causes within the step that are put into words
# Makes the names of successive watchdogs differ; the same in every process.
_counter = itertools.count()


class Watchdog:
  """Names the processes that have not arrived, when a step has not completed for `timeout` seconds.

      with jaxpace.Watchdog(timeout=60.0, recorder=recorder) as watchdog:
        step = watchdog.watch(step)
        for batch in batches:
          pace, (state, metrics) = step(pace, state, batch)
          recorder.record()
          if time_to_save:
            with watchdog.pause("checkpoint"):
              save(state)

  Two threads beside the loop; neither starts anything on a device. Each process publishes twice a
  second how far its loop is (one key of the store that `jax.distributed` runs, overwritten in
  place, a last time when it leaves its loop). When a step does not complete in time, one process
  logs a warning, and writes to the run directory, who has not arrived, where its loop is, and its
  Python stack if its own watchdog can still answer. The loop goes on: nothing is killed.

  Nothing is said while a process compiles, or within `pause` and `recorder.measure("checkpoint")`,
  up to their limits. Process 0 runs the store. Where it is stopped altogether the others can hear
  nothing of each other; each then says that process 0 does not answer. Where only its loop hangs,
  it is named like any other.

  Every process of a job opens its watchdogs in the same order.
  """

  def __init__(self, timeout: float | None = None, *, recorder: Recording | None = None,
               directory: str | os.PathLike[str] | None = None, first_timeout: float = 600.0,
               on_late: Callable[[Late], object] | None = None):
    """Prepares; no thread runs before `with`.

    Args:
      timeout: seconds without a completed step after which late processes are named. None: twenty
        times the usual step, at least 10 s.
      recorder: whose directory, and whose `measure("data")` and `measure("checkpoint")` are used.
        Open it first.
      directory: where to write `watchdog/<process>.jsonl`, if not to the recorder's directory. None
        of both: nowhere.
      first_timeout: seconds for the time before the first step has completed, and for a
        compilation.
      on_late: called with what was found, in the watchdog's thread, in the process that reports it.

    Raises:
      ValueError: a time is out of range.
      TypeError: `recorder` is no recorder, or `on_late` can't be called.
    """
    if timeout is not None and not is_number(timeout, _SHORTEST):
      raise ValueError(
          f"timeout={timeout!r} must be at least {_SHORTEST:g} s, or None for one that follows "
          "the steps.")
    if not first_timeout > 0:
      raise ValueError(f"first_timeout={first_timeout!r} must be a positive number of seconds.")
    if recorder is not None and not hasattr(recorder, "doing"):
      raise TypeError("recorder takes a jaxpace.Recorder, such as recorded_step.recorder; this is "
                      f"a {type(recorder).__name__}. A run directory is directory=...")
    if on_late is not None and not callable(on_late):
      raise TypeError(f"on_late={on_late!r} must be a function that takes what was found.")
    self.timeout, self.first_timeout = timeout, first_timeout
    self.latest: Late | None = None
    self._recorder, self._directory, self._on_late = recorder, directory, on_late
    self._progress = LoopProgress(time.monotonic)
    self._store_thread: StoreThread | None = None
    self._events: EventFile | None = None
    self._closing = threading.Event()
    self._thread = threading.Thread(target=self._run, name="jaxpace-watchdog", daemon=True)
    self._process, self._processes = 0, 1
    self._number = 0
    self._beaten_at = -math.inf
    self._busy_since: float | None = None  # compiles, or writes a checkpoint
    self._told: tuple[Any, ...] | None = None
    self._overdue_since: float | None = None
    self._reads_before = 0

  def __enter__(self) -> Self:
    if self._thread.ident is not None:
      raise RuntimeError("A Watchdog is opened once: make a new one for the next loop.")
    self._process, self._processes = distributed.process_index(), distributed.process_count()
    number = next(_counter)
    if self._processes > 1:
      # The one before may still be asked for what this process did last.
      stale = f"jaxpace/watchdog/{number - 2}" if number >= 2 else None
      self._store_thread = StoreThread(f"jaxpace/watchdog/{number}", self._process, stale)
      self._store_thread.start()
    directory = (self._directory
                 or (self._recorder.directory if self._recorder is not None else None))
    if directory is not None:
      self._events = EventFile(directory, self._process,
                               self._recorder.run if self._recorder is not None else None)
    self._progress.thread = threading.get_ident()
    self._progress.moved = time.monotonic()
    self._thread.start()
    return self

  def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
               trace: TracebackType | None) -> None:
    self._closing.set()
    if threading.current_thread() is not self._thread:
      self._thread.join(2 * _LOOK_SECONDS)
    if self._store_thread is not None:
      self._progress.look()
      now = time.monotonic()
      self._store_thread.close(self._heartbeat(now, now - self._progress.moved, False,
                                               False)._replace(left=True))

  def watch(self, step: Callable[P, R]) -> Callable[P, R]:
    """Makes a function whose calls are counted as steps.

    Args:
      step: the compiled step, or whatever the loop calls once a step. Its results are passed on as
        they are; a few of the smallest are kept until they are there, to see when the step has
        completed.

    Raises:
      TypeError: `step` can't be called.
    """
    if not callable(step):
      raise TypeError(f"watch() takes the step's function, not {type(step).__name__}.")

    @functools.wraps(step)
    def watched(*args: P.args, **kwargs: P.kwargs) -> R:
      self._progress.enter()
      try:
        result = step(*args, **kwargs)
      except BaseException:
        self._progress.fail()
        raise
      self._progress.leave(result)
      return result

    return watched

  @contextlib.contextmanager
  def pause(self, name: str, limit: float = 3600.0) -> Iterator[None]:
    """Announces that what is done inside takes long: nobody is called late meanwhile, on any
    process.

    Args:
      name: what it is, for the words; "checkpoint", "evaluation".
      limit: seconds after which it counts as a hang all the same.
    """
    if not limit > 0:
      raise ValueError(f"limit={limit!r} must be a positive number of seconds.")
    with self._progress.pause(name, limit):
      self._beaten_at = -math.inf  # the others should know at once
      yield
    self._beaten_at = -math.inf

  # Below runs in the watchdog's own thread.

  def _run(self) -> None:
    while not self._closing.wait(_LOOK_SECONDS):
      try:
        self._look()
      except Exception as error:
        _LOG.warning("The watchdog has stopped, training goes on: %s: %s", type(error).__name__,
                     error)
        _LOG.debug("The watchdog has stopped", exc_info=error)
        return

  def _limit(self) -> float:
    """Seconds without a completed step that are too long at the moment."""
    usual = self._progress.usual()
    if self._progress.completed == 0 or (self.timeout is None and usual is None):
      return max(self.first_timeout, self.timeout or 0.0)
    if self.timeout is not None:
      return self.timeout
    assert usual is not None
    return too_long(usual)

  def _excused(self, now: float) -> bool:
    """Whether this process takes long for a known reason; sees to it that the time starts anew when
    it ends."""
    busy = self._progress.compiling() or (
        self._recorder is not None and self._recorder.doing == "checkpoint")
    if self._busy_since is not None and not busy:
      self._progress.excuse()
    self._busy_since = None if not busy else now if self._busy_since is None else self._busy_since
    within = self._busy_since is not None and now - self._busy_since < self.first_timeout
    return within or self._progress.excused()

  def _look(self) -> None:
    self._progress.look()
    now = time.monotonic()
    excused = self._excused(now)
    limit, age = self._limit(), now - self._progress.moved
    overdue = age >= limit and not excused
    heartbeat = self._heartbeat(now, age, excused, overdue)
    self._carry(heartbeat, now, age - limit)
    if not overdue:
      self._resumed(age)
      self._overdue_since = None
      return
    if self._overdue_since is None:
      self._overdue_since = now
      self._reads_before = self._store_thread.reads if self._store_thread else 0
    self._accuse(heartbeat, now, age, limit)

  def _heartbeat(self, now: float, age: float, excused: bool, overdue: bool) -> Heartbeat:
    since = self._progress.excused_at
    doing, stack, marks = None, "", ""
    if self._recorder is not None:
      doing = self._recorder.doing
    if overdue:
      stack = progress.of_thread(self._progress.thread, STACK_CHARACTERS[self._large])
    if overdue and self._recorder is not None:
      marks = verdict.own_text(self._recorder.programs, self._process,
                               verdict.CHARACTERS[self._large])
    self._number += 1
    return Heartbeat(self._process, socket.gethostname(), os.getpid(), self._number,
                     self._progress.entered, self._progress.completed,
                     self._progress.phase(doing), age,
                     0.0 if excused else 1e9 if since is None else now - since, overdue, stack,
                     marks=marks)

  def _with_marks(self, late: Late) -> Late:
    """Adds what the timestamps of an observed step tell; trouble with that leaves the rest as it
    is."""
    if self._recorder is None:
      return late
    heard = self._store_thread.last_heartbeats() if self._store_thread is not None else {}
    try:
      found = verdict.find_in_step(self._recorder.programs, self._process, heard,
                                   self._recorder.directory)
    except Exception as error:
      _LOG.debug("Marks can't be read", exc_info=error)
      return late
    sentences = [str(each) for one in found[:_CAUSES] for each in one.sentences]
    causes = [LateCause(kind=one.cause.kind, ranks=one.cause.ranks,
                        collective=one.document["waits"][0]["collective"]) for one in found]
    return dataclasses.replace(late, marks=tuple(sentences), causes=tuple(causes))

  def _carry(self, heartbeat: Heartbeat, now: float, over: float) -> None:
    """Publishes the heartbeat if it is time; reads the others' if they are few, or if they may soon
    be asked for."""
    if self._store_thread is None:
      return
    first = heartbeat.waiting and self._overdue_since is None
    if not first and now - self._beaten_at < self._beat:
      return
    self._beaten_at = now
    turn = _TURN_SECONDS * (self._process // _READERS)
    self._store_thread.carry(heartbeat,
                             read=not self._large or over > turn - _PRELUDE_SECONDS)

  @property
  def _large(self) -> bool:
    return self._processes > LARGE_JOB

  @property
  def _beat(self) -> float:
    """Seconds between two heartbeats."""
    return max(_BEAT_SECONDS, self._processes / _BEATS_A_SECOND)

  @property
  def _silence(self) -> float:
    return _SILENCE_BEATS * self._beat

  def _accuse(self, heartbeat: Heartbeat, now: float, age: float, limit: float) -> None:
    """The time is up here: finds out who is late, once everyone was heard or can be called
    silent."""
    assert self._overdue_since is not None
    own = LastHeartbeat(heartbeat, 0.0)
    if self._store_thread is None:
      self._tell(verdict.judge({self._process: own}, 1, self._silence, self._process, age))
      return
    last_heartbeats = self._store_thread.last_heartbeats()
    last_heartbeats[self._process] = own
    if self._store_thread.stuck() > self._silence:
      if self._process != 0:
        self._tell(verdict.without_service(last_heartbeats, own, age))
      return
    over = now - self._overdue_since
    if self._store_thread.reads < self._reads_before + 2:
      return  # the others' heartbeats are of before the time was up
    if verdict.excused(last_heartbeats, self._silence) < limit:
      self._overdue_since, self._reads_before = now, self._store_thread.reads
      return
    late = verdict.judge(last_heartbeats, self._processes, self._silence, self._process, age)
    unsure = any(0.9 * self._beat < one.silence <= self._silence for one in last_heartbeats.values()
                 if not one.left)
    mute = any(p.state == "outside" and not p.stack for p in late.late)
    if (unsure or mute) and over < _GRACE_SECONDS:
      return
    if verdict.speaker(last_heartbeats, self._silence, self._process) == self._process:
      self._tell(late)

  def _tell(self, late: Late) -> None:
    """Logs and records what was found, once for each set of late processes."""
    found = (late.step, tuple((p.process, p.state) for p in late.late))
    if found == self._told:
      return
    self._told = found
    late = self._with_marks(late)
    self.latest = late
    _LOG.warning("Watchdog: %s", late.text())
    if self._events is not None:
      self._events.write("late", time.time_ns(), late.to_json())
    if self._on_late is None:
      return
    try:
      self._on_late(late)
    except Exception as error:
      _LOG.warning("on_late has failed, the watchdog goes on: %s: %s", type(error).__name__, error)
      _LOG.debug("on_late", exc_info=True)

  def _resumed(self, age: float) -> None:
    if self._told is None:
      return
    self._told = None
    waited = self.latest.waited if self.latest is not None else 0.0
    _LOG.warning("Watchdog: steps complete again.")
    if self._events is not None:
      self._events.write("resumed", time.time_ns(),
                         {"process": self._process, "seconds": waited + age})
