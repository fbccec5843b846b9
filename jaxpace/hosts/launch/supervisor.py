"""Runs a job of N local processes from start to end and says how it ended."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import tempfile
import time
import uuid
from pathlib import Path

from jaxpace.hosts.launch import environment, outcome, processes
from jaxpace.hosts.launch.job import Launch, LaunchError
from jaxpace.hosts.launch.output import Display, LogScreen, LogView, tail
from jaxpace.hosts.launch.scribe import Scribe
from jaxpace.hosts.launch.signals import Signals

TICK_SECONDS = 0.05
SETTLE_SECONDS = 1.0
"""So long a process that complains of a lost peer is not taken for the cause: the lost peer's own
end is waited for."""
LEFTOVER_GRACE_SECONDS = 2.0
"""Children that outlive the worker that started them get this long between SIGTERM and SIGKILL, if
not less."""


class Supervisor:
  """Watches over the workers of one job. `run` does everything."""

  def __init__(self, job: Launch):
    """Takes the job; nothing is started yet."""
    self._job = job
    self._id = uuid.uuid4().hex
    self._workers: list[processes.Worker] = []
    self._notices: Path | None = None
    self._failures: dict[int, outcome.Failure] = {}
    self._stop_signal: int | None = None  # the signal that reached the launcher and stopped the job
    self._plan: list[tuple[float, int]] = []  # (monotonic time, signal) still to be sent
    self._stopping = False
    self._sent: set[int] = set()
    self._killed: set[int] = set()  # workers that ended only by our SIGKILL

  def run(self) -> int:
    """Runs the job to its end.

    Returns:
      The exit status for the launcher: 0, the failed worker's, or 128 + the number of the signal
      that stopped it.

    Raises:
      LaunchError: if it cannot be started.
    """
    self._prepare_logs()
    try:
      self._scribe = Scribe()
    except OSError as error:
      raise LaunchError(f"no process can be started: {error.strerror}") from error
    try:
      return self._run()
    finally:
      self._scribe.close()

  def _run(self) -> int:
    """Runs the job between the scribe's beginning and end."""
    job = self._job
    try:
      port = environment.PortReservation(job.port)
    except OSError as error:
      port_asked = job.port or "(any)"
      raise LaunchError(
          f"the coordinator's port {port_asked} cannot be used: {error.strerror}") from error
    begun = time.monotonic()
    watchdog = processes.OrphanReaper(self._id, min(job.grace, LEFTOVER_GRACE_SECONDS))
    groups: list[int] = []
    with tempfile.TemporaryDirectory(
        prefix="jaxpace-launch-") as notices, Signals().collecting() as signals:
      self._notices = Path(notices)
      try:
        port.release_early()
        for index in range(job.nproc):
          self._start(index, port.port)
          groups.append(self._workers[-1].pid)
          watchdog.add(groups[-1])
        display = self._display()
        self._loop(signals, display)
        self._scribe.sync()
        display.finish()
      finally:
        processes.clear_away(groups, self._id, min(job.grace, LEFTOVER_GRACE_SECONDS))
        for worker in self._workers:
          worker.release()
        watchdog.dismiss()
        port.close()
    return self._conclude(time.monotonic() - begun)

  def log_path(self, index: int) -> Path:
    """Returns the log of one process."""
    return self._job.logs / f"process-{index}.log"

  def _prepare_logs(self) -> None:
    try:
      self._job.logs.mkdir(parents=True, exist_ok=True)
      # of a run with more processes, they would mislead
      for old in self._job.logs.glob("process-*.log"):
        old.replace(old.with_name(f"{old.name}.previous"))
    except (FileExistsError, NotADirectoryError) as error:
      raise LaunchError(f"--logs takes a directory, but {self._job.logs} is a file or lies in one; "
                        "give another, such as runs/logs") from error
    except OSError as error:
      raise LaunchError(
          f"the log directory {self._job.logs} cannot be used: {error.strerror}") from error

  def _start(self, index: int, port: int) -> None:
    job = self._job
    env = environment.worker_environment(
        os.environ, index=index, nproc=job.nproc, port=port, launch_id=self._id,
        notice=str(self._notice_path(index)), devices=job.devices, threads=job.threads,
        gpus=environment.count_gpus(os.environ), as_slurm=job.as_slurm)
    try:
      self._workers.append(processes.Worker(index, job.command, env, self.log_path(index),
                                            self._scribe))
    except OSError as error:
      raise LaunchError(
          f"process {index} cannot be started: {job.command[0]}: {error.strerror}") from error

  def _notice_path(self, index: int) -> Path:
    assert self._notices is not None
    return self._notices / f"process-{index}"

  def _display(self) -> Display:
    show = {"first": self._workers[:1], "all": self._workers, "none": []}[self._job.show]
    views = [LogView(w.log, f"[{w.index}] " if self._job.show == "all" else None) for w in show]
    try:
      return Display(views, LogScreen(sys.stdout.fileno()))
    except (AttributeError, OSError, ValueError):  # no stdout at all (`>&-`)
      return Display(views, LogScreen(None))

  def _running(self) -> list[processes.Worker]:
    return [worker for worker in self._workers if worker.status is None]

  def _loop(self, signals: Signals, display: Display) -> None:
    while self._running():
      signals.wait(TICK_SECONDS)
      display.update()
      while signals.received:
        self._on_signal(signals.received.pop(0))
      self._reap()
      if self._failures and not self._stopping and not self._cause_may_come():
        if self._running():
          self._say(f"{self._describe_first()}; stopping the others.")
        self._stop([(0.0, signal.SIGTERM), (self._job.grace, signal.SIGKILL)])
      self._send_due()

  def _reap(self) -> None:
    """Notes which workers ended, and which announced that they will."""
    for worker in self._workers:
      index = worker.index
      ended = worker.poll()
      if self._stopping and not ended:
        continue
      announced = outcome.read_announcement(self._notice_path(index), index)
      if announced and not self._stopping:
        self._failures.setdefault(index, announced)
      if not ended or not worker.status:
        continue
      # once the job is being stopped only what we cannot have done ourselves still counts
      own_death = worker.status < 0 and -worker.status not in self._sent
      if index in self._failures or not self._stopping or own_death:
        assert worker.ended_ns is not None
        self._failures[index] = (
            outcome.Failure(index, announced.when_ns, worker.status, announced.announced)
            if announced
            else outcome.Failure(index, worker.ended_ns, worker.status))

  def _cause_may_come(self) -> bool:
    """Returns whether only followers have failed so far, a moment ago: then what they follow is
    still to be seen."""
    failures, words = self._evidence()
    age = time.monotonic_ns() - min(failure.when_ns for failure in failures)
    return (bool(self._running()) and age < SETTLE_SECONDS * 1e9
            and all(map(outcome.is_follower, failures, words)))

  def _on_signal(self, number: int) -> None:
    if number == signal.SIGINT and self._stopping:
      self._say("killing all processes.")
      self._plan = [(time.monotonic(), signal.SIGKILL)]
      return
    if self._stopping:
      return
    self._stop_signal = number
    grace = self._job.grace
    if number == signal.SIGINT:
      self._say(f"stopping {len(self._running())} processes; Ctrl-C again kills them at once.")
      # what Ctrl-C does to a single program, so that `finally` and `with` run; jax swallows SIGTERM
      self._stop([(0.0, signal.SIGINT), (grace / 2, signal.SIGTERM), (grace, signal.SIGKILL)])
    else:
      self._say(
          f"{outcome.signal_name(number)} received, stopping {len(self._running())} processes.")
      self._stop([(0.0, signal.SIGTERM), (grace, signal.SIGKILL)])

  def _stop(self, plan: list[tuple[float, int]]) -> None:
    now = time.monotonic()
    self._stopping = True
    self._plan = [(now + after, number) for after, number in plan]

  def _send_due(self) -> None:
    while self._plan and self._plan[0][0] <= time.monotonic():
      _, number = self._plan.pop(0)
      self._sent.add(number)
      for worker in self._running():
        worker.send(number)
        if number == signal.SIGKILL:
          self._killed.add(worker.index)

  def _conclude(self, seconds: float) -> int:
    if self._stop_signal is not None:
      name = outcome.signal_name(self._stop_signal)
      killed = (f"; {len(self._killed)} of {self._job.nproc} processes had to be killed"
                if self._killed else "")
      self._say(f"stopped by {name} after {seconds:.1f} s{killed}. Logs: {self._job.logs}")
      return 128 + self._stop_signal
    if not self._failures:
      return 0
    first = self._first()
    worker = self._workers[first.index]
    status = first.status if first.status is not None else worker.status
    self._say(f"{self._describe_first()} after {seconds:.1f} s, and the job with it.")
    if (status is not None and status < 0 and not first.announced
        and (hint := outcome.HINTS.get(-status))):
      self._say(hint)
    self._say_others(first.index)
    last = tail(worker.log, self._job.tail_lines)
    print(f"--- last lines of {worker.log}" + ("" if last else " (empty)"), *last, sep="\n",
          file=sys.stderr)
    sys.stderr.flush()
    if first.announced is not None and worker.index in self._killed:
      return 1  # it had failed by an exception before our SIGKILL ended its exit
    return outcome.exit_status(status or 1)

  def _evidence(self) -> tuple[list[outcome.Failure], list[str]]:
    self._scribe.sync()
    failures = [self._failures[index] for index in sorted(self._failures)]
    return failures, ["\n".join(tail(self._workers[failure.index].log, 12)) for failure in failures]

  def _first(self) -> outcome.Failure:
    return outcome.first_cause(*self._evidence())

  def _describe_first(self) -> str:
    first = self._first()
    how = (f"failed with {first.announced}" if first.announced
           else outcome.describe_status(first.status or 0))
    return f"process {first.index} (pid {self._workers[first.index].pid}) {how}"

  def _say_others(self, first: int) -> None:
    others = [worker for worker in self._workers if worker.index != first]
    killed = [str(worker.index) for worker in others if worker.index in self._killed]
    followed = [str(worker.index) for worker in others if worker.status
                and worker.index not in self._killed]
    if followed:
      self._say(f"it took along: process {', '.join(followed)}.")
    if killed:
      self._say(
          f"killed, as SIGTERM did not end them in {self._job.grace:g} s: process "
          f"{', '.join(killed)}.")

  @staticmethod
  def _say(text: str) -> None:
    with contextlib.suppress(OSError, ValueError):
      print(f"jaxpace launch: {text}", file=sys.stderr, flush=True)
