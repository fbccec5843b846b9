"""A recording beside the training loop: its run, its writer and its end, wherever the timestamps
come from."""

from __future__ import annotations

import atexit
import contextlib
import json
import logging
import math
import os
import pathlib
import re
import sys
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Any, Self

import jax
import numpy as np

from jaxpace.core.fields import is_number, number
from jaxpace.core.observed import ObservedProgram, Recordable
from jaxpace.files import UserError
from jaxpace.hosts import distributed
from jaxpace.record import describe
from jaxpace.record.exporting import Exporter, Feed
from jaxpace.record.host_sampler import HostCounters, HostSampler
from jaxpace.record.host_use import StepCauseMeter
from jaxpace.record.ring.intake import StepTables
from jaxpace.record.signals import in_main_thread
from jaxpace.record.writer import Writer, explain
from jaxpace.runs import rundir
from jaxpace.runs.run import ASKED

_LOG = logging.getLogger("jaxpace")
_AGAIN = re.compile(r"([^:]{1,80}: )\1+")
_SHARE_SECONDS = 120.0
CLOSE_SECONDS = 60.0
_MOST_SECONDS = 86_400.0
_MOST_NS = 1 << 53
"""Nanoseconds of one step that count, 104 days."""


class Recording:
  """What all recorders share. Those of one source of timestamps inherit, and say what `record`
  does.

  For them are `takes` and `terminate`, and some to make their own: `prepare`, `bring_in` and
  `closed`.
  """

  opened = False
  """Whether this process has opened any."""
  share_name = "jaxpace/recorder"
  """Under which process 0 says which run this is, to all processes in the same order."""
  own_thread = True
  """Whether a thread of its own writes; else the one that opens it does, by `write`."""
  unnamed = False
  """Whether nobody named the directory, so that it takes the name that process 0 gave its own."""
  loop_calls = True
  """Whether a loop calls `record`, and so reaches a step boundary after SIGTERM."""

  def __init__(self, directory: str | os.PathLike[str] | None, source: Recordable | None, *,
               resume: bool = False, config: Any = None, grace_seconds: float = 5.0,
               handle_sigterm: bool = True, hosts: bool | float = True,
               exporters: Iterable[Exporter] = ()):
    """Prepares; see `jaxpace.Recorder`. `source` describes where the timestamps come from."""
    describe.check_config(config)
    if not isinstance(hosts, bool) and not is_number(hosts, 0, _MOST_SECONDS):
      raise ValueError(
          f"hosts={hosts!r} must be True, False or the seconds between two samples of the host.")
    number("grace_seconds", grace_seconds, 0, _MOST_SECONDS, "seconds")
    if directory is not None and not os.fspath(directory):
      raise ValueError(
          f"directory={directory!r} names no directory. Give one, or None to record nothing.")
    # Absolute: a program that changes its working directory goes on recording to the same place.
    self.directory = None if directory is None else pathlib.Path(os.path.abspath(directory))
    self.grace_seconds = grace_seconds
    self._source: Any = source
    self._resume, self._config = resume, config
    self._handle_sigterm, self._hosts = handle_sigterm, hosts
    self._feed = Feed(exporters)
    self._causes = StepCauseMeter()
    self._writer: Writer | None = None
    self._lock: rundir.DirectoryLock | None = None
    self._opened = self._closed = self._terminated = self._patient = self._warned = False
    self._pid = 0
    self.given_up = threading.Event()
    """Set where nothing waits any longer for process 0 to say which run this is."""
    self.run: str | None = None

  @property
  def recording(self) -> bool:
    """Whether rows are still being recorded."""
    return self._writer is not None and not self._closed and self._writer.stopped is None

  @property
  def lost(self) -> dict[str, Any]:
    """What was lost so far: rows, holes, and why recording stopped, if so."""
    if self._writer is None:
      return {}
    lost = vars(self._writer.losses).copy()
    if self._writer.stopped is not None:
      # Nobody counted since.
      unwritten = self.due() - self._writer.rows_written
      if unwritten > lost["lost_rows"]:
        lost |= {"lost_rows": unwritten, "holes": lost["holes"] + 1}
    return {**lost, "stopped": self._writer.stopped}

  def due(self) -> int:
    """Rows of `steps` that this process was to record so far; 0 where the source doesn't tell."""
    return 0

  def __enter__(self) -> Self:
    self.open()
    return self

  def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
               trace: TracebackType | None) -> None:
    if (kind is not None and self._writer is not None and not self._closed
        and self._writer.ended_by is None):
      # A peer that has ended of the same signal first makes this one's collective fail.
      signalled = self._writer.termination.received and self._writer.termination.raises_again
      self._writer.ended_by = "SIGTERM" if signalled else in_one_line(error or kind())
    self._close(in_trouble=kind is not None)

  def open(self) -> None:
    """Starts recording. Process 0 gives the run its id and sets an earlier run aside; the others
    wait for that.

    After `jax.distributed.initialize`, before the first step. Trouble with the directory is a
    warning, no error.

    Raises:
      RuntimeError: the recorder was open before.
    """
    if self._opened:
      raise RuntimeError("A Recorder records once: make a new one for the next run.")
    self._opened = True
    if self.directory is None:
      return
    Recording.opened = True
    try:
      writer = self._begun(self.directory)
    except Exception as error:  # Whatever it is, training goes on.
      self._attempt(self.closed)
      self._causes.stop()
      self._unlock()
      _LOG.warning("Not recording, training goes on: %s", explain(error, self.directory))
      return
    self._writer = writer
    self._causes.start()
    if self._handle_sigterm:
      # Later than a loop's end, perhaps, where the main thread is not this one.
      in_main_thread(lambda: self._closed or writer.termination.install())
    atexit.register(self._at_exit)
    self._pid = os.getpid()

  def write(self) -> None:
    """Writes until `close`, if it is open: where no thread of its own does."""
    if self._writer is not None:
      self._writer.run()

  def _begun(self, directory: pathlib.Path) -> Writer:
    """Makes the run and starts its writer."""
    process = jax.process_index()
    identity, name = self._agree(process, directory)
    if self.unnamed:
      self.directory = directory = directory.with_name(name)
    self.run = identity.run
    info = describe.process(identity, process)
    run_info = (describe.run(identity, self._source, self._config, directory) if process == 0
                else None)
    place = describe.read(process)
    sampler = HostSampler(process, identity.attempt, float(self._hosts), make=lambda: HostCounters(
        gauges=describe.gauges(place), coordinator=distributed.coordinator_port())
        ) if self._hosts else None
    rundir.make(directory)
    if process != 0:
      rundir.set_aside(directory, identity.run, process)
    writer = Writer(directory, identity, process, info, run_info, self.prepare(identity),
                    grace_seconds=self.grace_seconds if self.loop_calls else None,
                    hosts=sampler, feed=self._feed,
                    thread=None if self.own_thread else threading.current_thread())
    try:
      writer.start()
    except Exception:
      writer.release()
      raise
    describe.write(directory, identity.run, place)
    return writer

  def measure(self, cause: str) -> AbstractContextManager[None]:
    """Adds the time spent inside to the current step's `data_ns` or `checkpoint_ns`.

        with recorder.measure("data"):
          batch = next(batches)

    Args:
      cause: "data" or "checkpoint".

    Raises:
      ValueError: any other cause; use `jaxpace.phase` for phases of the compiled step.
    """
    return self._causes.measure(cause)

  @property
  def programs(self) -> list[ObservedProgram]:
    """What the recorded steps were compiled to so far, where they are observed; else empty. For
    other threads."""
    return []

  @property
  def doing(self) -> str | None:
    """What `measure` measures at the moment: "data", "checkpoint" or None. For other threads."""
    return self._causes.doing

  def close(self) -> None:
    """Waits for the last steps, writes everything and says what was lost. Further calls do
    nothing."""
    self._close(in_trouble=False)

  def takes(self) -> Writer | None:
    """The writer; None where nothing is recorded, or no longer. An error where the recorder is not
    open."""
    if self.recording:
      return self._writer
    if not self._opened or (self._closed and self.directory is not None):
      raise RuntimeError(
          "record() outside of the recorder's `with` block: open the recorder around the loop.")
    return None

  def terminate(self, writer: Writer) -> None:
    """A step boundary after SIGTERM: gets everything to the disk, then lets the process go the way
    it would have."""
    dying = writer.termination.raises_again
    if self._terminated and not (dying and self._patient):
      return
    # A whole iteration, in which the program can ask JAX for the step at which to stop.
    self._patient = writer.termination.may_be_asked and not self._terminated
    self._terminated = True
    dying = dying and not self._patient
    if dying:
      writer.ended_by = "SIGTERM"
    deadline = time.monotonic() + self.grace_seconds
    self._attempt(lambda: self.bring_in(writer, deadline, last=False))
    writer.flush(max(deadline - time.monotonic(), 0.1))
    if dying:
      writer.termination.raise_again()

  def prepare(self, identity: rundir.RunIdentity) -> StepTables | None:
    """Before the writer starts: returns what reads the steps, None for none. For those that
    inherit."""
    return None

  def closed(self) -> None:
    """After all is written, or where it could not be opened. For those that inherit."""

  def bring_in(self, writer: Writer, deadline: float | None, last: bool) -> None:
    """Hands the writer what is under way, if there is a `deadline` until then: after SIGTERM, and
    for the last time at the end, when it says what is lost. For those that inherit."""

  def _agree(self, process: int, directory: pathlib.Path) -> tuple[rundir.RunIdentity, str]:
    """Learns the run's id, and the name of process 0's directory.

    Raises:
      UserError: it can't be recorded, for the reason that process 0 gives, or it gives none.
    """
    text = None
    if process == 0:
      try:
        rundir.prepare(directory)
        self._lock = rundir.DirectoryLock.take(directory)
        text = json.dumps([rundir.claim(directory, self._resume, time.time_ns()), directory.name])
      except Exception as error:
        text = "!" + explain(error, directory)
    try:
      text = distributed.share_string(self.share_name, text, _SHARE_SECONDS, self.given_up)
    except (TimeoutError, ConnectionError):
      text = None
    if text is None or text.startswith("!"):
      raise UserError(text[1:] if text else "process 0 did not say which run this is. Every "
                      "process must open the recorder.")
    identity, name = json.loads(text)
    return rundir.RunIdentity(*identity), name

  def decline(self, why: str) -> None:
    """On process 0, says why there will be no run: the others may be waiting to hear which it is.
    On them it does nothing."""
    with contextlib.suppress(ConnectionError):
      if distributed.process_index() == 0:
        distributed.share_string(self.share_name, f"!{why}", _SHARE_SECONDS)

  def _unlock(self) -> None:
    if self._lock:
      self._lock.release()

  def _host_columns(self, columns: dict[str, float]) -> dict[str, float]:
    extra = {}
    for name, value in columns.items():
      if isinstance(value, jax.Array) or not isinstance(
          value, int | float | np.integer | np.floating):
        raise TypeError(f"record({name}=...) takes a number of the host, not "
                        f"{type(value).__name__}: reading a device value here would make the loop "
                        "wait for the step.")
      if name in ASKED:
        self._causes.add(ASKED[name], self._nanoseconds(name, value))
      else:
        extra[name] = _as_float(value)
    return extra

  def _nanoseconds(self, name: str, value: float) -> int:
    """A time; of what can't be one it warns once, and it is 0."""
    if abs(_as_float(value)) < _MOST_NS:
      return int(value)
    if not self._warned:
      _LOG.warning("%s=%r is no time in nanoseconds, and is left out.", name, value)
    self._warned = True
    return 0

  def _at_exit(self) -> None:
    if self._writer is not None and self._writer.ended_by is None:
      error = getattr(sys, "last_value", None)  # the exception that ended the program, if one did
      self._writer.ended_by = (in_one_line(error) if error
                               else "the end of the program, without close()")
    with contextlib.suppress(KeyboardInterrupt):  # no traceback of a program that has ended
      self._close(in_trouble=True)

  def _close(self, in_trouble: bool) -> None:
    if self._closed or not self._opened:
      return
    self._closed = True
    writer = self._writer
    # A forked child has no part in its parent's recording.
    if writer is None or os.getpid() != self._pid:
      return
    atexit.unregister(self._at_exit)
    self._causes.stop()
    try:
      # After an error the devices may never finish: a peer is dead, say.
      deadline = time.monotonic() + self.grace_seconds if in_trouble else None
      self._attempt(lambda: self.bring_in(writer, deadline, last=True))
    finally:  # Ctrl-C while waiting, say: what has come is written all the same.
      self._attempt(lambda: self._finish(writer))

  def _attempt(self, part: Callable[[], None]) -> None:
    """Does a part of the end; what goes wrong with it is nothing to training."""
    try:
      part()
    except Exception as error:
      _LOG.warning("The recording of %s did not end as it should: %s", self.directory,
                   in_one_line(error))
      _LOG.debug("The end of a recording", exc_info=True)

  def _finish(self, writer: Writer) -> None:
    if writer.close(CLOSE_SECONDS):
      self._attempt(self.closed)
      self._unlock()
    else:
      _LOG.warning("%s has not taken the last rows within %.0f s: leaving them.", self.directory,
                   CLOSE_SECONDS)
    unfinished = writer.termination.received and writer.termination.raises_again
    if writer.losses.lost_rows and writer.stopped is None:
      _LOG.warning("Recorded %s with losses: %s.", self.directory, writer.losses)
    if unfinished:
      writer.termination.raise_again()
    in_main_thread(writer.termination.restore)
    in_main_thread(writer.release)


def _as_float(value: float) -> float:
  """The same; NaN where it is beyond all of these."""
  try:
    return float(value)
  except OverflowError:
    return math.nan


def in_one_line(error: BaseException) -> str:
  """What went wrong, in one line.

  >>> in_one_line(ValueError("dispatching: dispatching: dispatching: peer is gone"))
  'ValueError: dispatching: peer is gone'
  """
  # JAX says once more for each step in flight that it is the one before that failed.
  message = _AGAIN.sub(r"\1", next(iter(str(error).splitlines()), ""))[:200]
  return f"{type(error).__name__}: {message}" if message else type(error).__name__
