"""The writer thread: takes what is new in the ring, decodes it and writes it as parts.

All file I/O of a running recorder happens here, and nothing here touches a device. Trouble of any
kind (a full disk, a deleted directory, a quota) ends the recording with one warning; the training
loop never sees it.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import errno
import logging
import os
import pathlib
import signal
import socket
import threading
import time
from typing import Any

from jaxpace.files import UserError
from jaxpace.files.folders import Folder, ForeignFileError
from jaxpace.hosts import distributed
from jaxpace.record import columns
from jaxpace.record.exporting import Feed
from jaxpace.record.host_sampler import HostSampler
from jaxpace.record.parts import PartStore
from jaxpace.record.ring.intake import Losses, StepTables
from jaxpace.record.ring.plan import StepPlan
from jaxpace.record.signals import Termination
from jaxpace.record.threads import BackgroundThread
from jaxpace.runs import rundir

_LOG = logging.getLogger("jaxpace")
_FLUSH_SECONDS, _FLUSH_ROWS = 2.0, 65536
"""How long rows stay in memory, and how many of them, at most."""
_HEARTBEAT_SECONDS = 5.0
_SAMPLE_SECONDS = 1.0  # how long the last sample of the host may take
_TERMINATES_SECONDS = 60.0
_EXPORT_SECONDS = 5.0  # how long exporters may take to finish
_FIRST_SECONDS = 0.5
"""After so long it is written for the first time what the steps seem to be, and then whenever twice
the time has passed, until it is sure."""
_GUESS_SECONDS = 8.0  # but at least so often
_GUESS_PART = 20.0
"""Times the processor time that takes until it is done again: of training that is one program all
of it is written anew each time. The first time also loads what writes, which is done once."""


class Writer:
  """A daemon thread with a bounded queue. Methods without an underscore may be called from any
  thread."""

  def __init__(self, directory: pathlib.Path, identity: rundir.RunIdentity, process: int,
               process_info: dict[str, Any], run_info: dict[str, Any] | None,
               intake: StepTables | None, *,
               grace_seconds: float | None = 5.0, hosts: HostSampler | None = None,
               feed: Feed | None = None, thread: threading.Thread | None = None):
    """Prepares; `start` starts the thread.

    Args:
      directory: run directory.
      process_info: contents of `process/<process>.json`, to which the writer adds what it counts.
      run_info: contents of `run.json`, to which the writer adds the plan; None in all processes but
        the first.
      intake: reads the steps; None where nothing does.
      grace_seconds: time the loop has after SIGTERM to reach a step boundary; None where no loop
        calls, so that the signal takes its course as soon as all is written.
      hosts: samples the host's counters, which are written as well; None for none.
      feed: gets all rows as they are decoded; None for none.
      thread: this one, if it calls `run` next; None for one of the writer's own.
    """
    self._directory, self._identity, self._process = directory, identity, process
    self._process_info, self._run_info, self._intake = process_info, run_info, intake
    self._grace_seconds = grace_seconds or 0.0
    self._hosts, self._feed = hosts, feed
    self._receive, self.wake = socket.socketpair()
    self.wake.setblocking(False)
    # Without a loop that calls, what a C library's handler makes of the signal is all that happens.
    self.termination = Termination(
        self.wake, (lambda: True) if grace_seconds is None else distributed.asks_for_preemption,
        lambda: self._thread.is_alive())
    self.losses = intake.losses if intake else Losses()
    self.stopped: str | None = None  # why recording stopped early
    self.rows_written = 0
    self.ended_by: str | None = None  # "SIGTERM", or the exception that left the recorder's `with`
    self._closing = False
    self._awaited: collections.deque[threading.Event] = collections.deque()
    """Set once everything that had come before is written, or recording has stopped."""
    self._stores: dict[str, PartStore] = {}
    self._guess: StepTables | None = None
    self._guessed_rows = 0
    self._guessed_once = False
    self._began = time.monotonic()
    self._guess_at = self._began + _FIRST_SECONDS
    self._failure: Exception | None = None
    self._plan: StepPlan | None = None
    self._last_flush = self._last_heartbeat = time.monotonic()
    self._die_at: float | None = None
    self._terminates_until: float | None = None
    self._thread = thread or BackgroundThread(self.run, "writer")

  def start(self) -> None:
    """Writes the JSON files, opens the parts and starts the thread.

    Raises:
      OSError: the directory can't be written.
    """
    # Held open: what stands under their names later is nothing to write to.
    self._root, self._own = Folder(self._directory), Folder(self._directory, "process")
    if self._run_info is not None:
      self._root.write_text(rundir.RUN_FILE, rundir.json_text(self._run_info), fsync=True)
    self._write_process_file(closed=False)
    for table in ("steps", "collectives", "hosts") if self._hosts else ("steps", "collectives"):
      self._store(table)
    if self._feed:
      self._feed.start()
    if self._hosts:
      self._hosts.start()
    if self._thread.ident is None:
      self._thread.start()

  def fail(self, error: Exception) -> None:
    """Ends the recording, for something that went wrong beside it."""
    self._failure = error
    self.poke()

  def flush(self, timeout: float) -> bool:
    """Writes everything that has come so far.

    Returns:
      Whether it is written; False when time ran out or recording has stopped.
    """
    self._awaited.append(written := threading.Event())
    self.poke()
    return (self.stopped is None and self._thread.is_alive() and written.wait(timeout)
            and self.stopped is None)

  def close(self, timeout: float) -> bool:
    """Writes the rest, merges small parts and ends the thread. May be called twice.

    Returns:
      Whether the thread has ended within `timeout` seconds.
    """
    self._closing = True
    self.poke()
    self._thread.join(timeout)
    return not self._thread.is_alive()

  def release(self) -> None:
    """Closes the sockets; after `close` and after the signal handlers are restored."""
    if not self._thread.is_alive() or self._thread is threading.current_thread():
      self._receive.close()
      self.wake.close()

  def poke(self) -> None:
    """Has the thread look what there is to do."""
    with contextlib.suppress(OSError):  # A full buffer wakes the thread just as well.
      self.wake.send(b"\0")

  def run(self) -> None:
    """Writes until `close`; on the writer's thread."""
    try:
      while not self._closing:
        self._wait()
        self._take_in()
        asked, terminating = len(self._awaited), self._terminates()
        if asked or terminating or time.monotonic() >= self._flush_at():
          self._flush(merge=not terminating)
          self._answer(asked)
        if self._die_at is not None and time.monotonic() >= self._die_at:
          if self.termination.raises_again:
            self.ended_by = "SIGTERM"
            self._write_process_file(closed=False)
            self.termination.raise_again()
            return
          self._die_at = None  # the program has asked JAX meanwhile, and stops by itself
      self._take_in()
      if self._hosts:
        self._hosts.stop(_SAMPLE_SECONDS)
      self._flush()
      if self._guess is None:
        self._drop_guess()
      if not self.termination.received:
        for store in self._stores.values():
          store.compact()
      self._write_process_file(closed=True)
      self._answer(len(self._awaited))
      if self._feed:
        self._feed.close(_EXPORT_SECONDS)
    except Exception as error:  # Whatever it is, training goes on.
      self._stop(error)

  def _wait(self) -> None:
    """Sleeps until there is something to do: a batch, a signal, a flush that is due, or the end of
    the grace time."""
    now, due = time.monotonic(), self._flush_at()
    if self._intake and self._intake.wait_seconds is not None:
      due = min(due, now + self._intake.wait_seconds)
    if self._die_at is not None:
      due = min(due, self._die_at)
    self._receive.settimeout(max(due - now, 0.001))
    try:
      received = self._receive.recv(4096)
    except TimeoutError:
      return
    if int(signal.SIGTERM) in received and self._die_at is None:
      self.termination.received = True
      self.termination.tell_native()
      if self.termination.raises_again:
        self._die_at = time.monotonic() + self._grace_seconds

  def _terminates(self) -> bool:
    """Whether the process may be gone at any moment: for a minute after SIGTERM. A program that
    lives on is recorded as before."""
    if not self.termination.received:
      return False
    if self._terminates_until is None:
      self._terminates_until = time.monotonic() + _TERMINATES_SECONDS
    return time.monotonic() < self._terminates_until

  def _flush_at(self) -> float:
    """When rows, or a sign of life, are to be written."""
    at = self._last_heartbeat + _HEARTBEAT_SECONDS
    if self._intake and (rows := self._intake.rows):
      at = min(at, self._last_flush + (_FLUSH_SECONDS if rows < _FLUSH_ROWS else 0.0))
    return min(at, self._guess_at) if self._intake and self._intake.undecided else at

  def _take_in(self) -> None:
    if self._failure is not None:
      raise self._failure
    if self._intake is None:
      return
    self._intake.poll()
    plan = self._intake.plan
    if plan is not None and plan is not self._plan:
      self._plan = plan
      self._write_plan(plan)
      # With the slots of what the steps seem to be.
      self._guess_at = 0.0

  def _write_plan(self, plan: StepPlan) -> None:
    assert self._intake is not None
    self._process_info = {**self._process_info, "ranks": self._intake.ranks}
    if self._run_info is None:
      return
    run_info = {**self._run_info, "clock": plan.clock, "axis": plan.axis, "ranks": plan.ranks,
                "plan": plan.to_json()}
    if plan.settings:
      run_info["settings"] = {**(run_info.get("settings") or {}), **plan.settings}
    self._root.write_text(rundir.RUN_FILE, rundir.json_text(run_info))
    self._run_info = run_info

  def _flush(self, merge: bool = True) -> None:
    tables = self._intake.take() if self._intake else {}
    if self._feed and (steps := tables.get("steps")):
      self._feed.put(steps, tables.get("collectives", {}))
    for table, rows in tables.items():
      self._store(table).append(rows, merge)
    if self._intake:
      self._write_guess(self._intake)
    self.rows_written += columns.length(tables.get("steps", {}))
    if self._hosts:
      self._store("hosts").append(self._hosts.take(force=self._closing or not merge), merge)
    self._last_flush = time.monotonic()
    self._write_process_file(closed=False)

  def _write_guess(self, intake: StepTables) -> None:
    """Writes what the steps seem to be, in place of what they seemed before, until it is sure."""
    if not intake.undecided:
      self._guess, self._guessed_rows = None, 0
      return
    now, worked = time.monotonic(), time.thread_time()
    guess = intake.guess()
    if guess is None or guess.plan is None:
      # Something else has run since: what was the step until then is none.
      self._drop_guess()
    else:
      tables = guess.take()
      for table, rows in tables.items():
        self._store(table).append(rows, preliminary=True)
      self._write_plan(guess.plan)
      self._guess, self._guessed_rows = guess, columns.length(tables.get("steps", {}))
    took = time.thread_time() - worked if self._guessed_once else 0.0
    self._guessed_once = True
    self._guess_at = now + max(min(max(now - self._began, _FIRST_SECONDS), _GUESS_SECONDS),
                               _GUESS_PART * took)

  def _drop_guess(self) -> None:
    for store in self._stores.values():
      store.drop_preliminary()
    self._guess, self._guessed_rows = None, 0

  def _store(self, table: str) -> PartStore:
    if table not in self._stores:
      self._stores[table] = PartStore(self._directory, table, self._identity.run, self._process)
    return self._stores[table]

  def _answer(self, asked: int) -> None:
    for _ in range(asked):
      self._awaited.popleft().set()

  def _write_process_file(self, closed: bool, in_place: bool = False) -> None:
    self._last_heartbeat = time.monotonic()
    info = {**self._process_info, **dataclasses.asdict(self.losses),
            "rows_written": self.rows_written + self._guessed_rows, "closed_cleanly": closed,
            "ended_by": self._ended_by(closed), "stopped": self.stopped,
            "last_step": tables.last_step if (tables := self._guess or self._intake) else None,
            "monotonic_ns": time.monotonic_ns(), "wall_ns": time.time_ns()}
    name, text = f"{self._process}.json", rundir.json_text(info)
    if not in_place:
      self._own.write_text(name, text)
      return
    with open(self._own.open_own(name, os.O_RDWR, create=False), "r+", encoding="utf-8") as file:
      file.write(text)
      file.truncate()

  def _ended_by(self, closed: bool) -> str | None:
    """What ends the run; from SIGTERM on it is that, should nothing more be written, or where the
    process dies of it once it is closed."""
    told = self.termination
    terminated = told.received and told.mode != "ignored" and (not closed or told.raises_again)
    return self.ended_by or ("SIGTERM" if terminated else None)

  def _stop(self, error: Exception) -> None:
    self.stopped = explain(error, self._directory)
    self._answer(len(self._awaited))
    if self._hosts:
      self._hosts.stop(0)
    if self._feed:
      self._feed.close(0.1)
    _LOG.warning("Recording stopped, training goes on: %s", self.stopped)
    _LOG.debug("Recording stopped", exc_info=error)
    try:
      self._write_process_file(closed=False)
    except OSError:
      with contextlib.suppress(OSError):
        # on a full disk there is no room for a second file
        self._write_process_file(closed=False, in_place=True)
    if self._die_at is not None:  # The promise to die of SIGTERM outlives the recording.
      time.sleep(max(self._die_at - time.monotonic(), 0))
      if self.termination.raises_again:
        self.termination.raise_again()


def explain(error: BaseException, directory: pathlib.Path) -> str:
  """Says in a sentence what kept the recorder from writing, and what to do about it."""
  number = error.errno if isinstance(error, OSError) else None
  if isinstance(error, UserError | ForeignFileError):
    return str(error)
  if number in (errno.ENOSPC, errno.EDQUOT):
    return (f"no space is left for {directory} (disk or quota full). What was written until now "
            "can be read.")
  if number in (errno.EACCES, errno.EPERM, errno.EROFS):
    return (f"{directory} can't be written ({os.strerror(number)}). Choose another directory or "
            "change its permissions.")
  if number in (errno.ENOENT, errno.ESTALE):
    return f"{directory} was moved or deleted while it was being written."
  if number in (errno.ENOTDIR, errno.EEXIST):
    return f"{directory} is not a directory. Choose another one."
  return f"{directory} can't be written ({type(error).__name__}: {error})."
