"""Runs a job of N local processes from start to end and says how it ended."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import shutil
import signal
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Literal

from jaxpace.hosts.launch import environment, outcome, processes
from jaxpace.hosts.launch.output import Display, LogView, tail


@dataclasses.dataclass(frozen=True)
class Launch:
  """What to run and how.

  Attributes:
    command: program and arguments, the same for every process.
    nproc: number of processes, at least 1.
    logs: directory of the logs; made if missing.
    show: whose output appears on the terminal: process 0's, everyone's with a prefix, or nobody's.
    grace: seconds between SIGTERM and SIGKILL.
    tail_lines: lines of the failed process's log to print.
    devices: devices a process, or None to leave it to JAX.
    threads: XLA CPU threads a process, or None to leave it to XLA.
    port: TCP port of the coordinator, 0 for a free one.
  """

  command: Sequence[str]
  nproc: int
  logs: Path
  show: Literal["first", "all", "none"] = "first"
  grace: float = 10.0
  tail_lines: int = 20
  devices: int | None = None
  threads: int | None = None
  port: int = 0


class LaunchError(Exception):
  """The job could not be started; the message is one sentence for the user."""


def find_program(command: Sequence[str]) -> str | None:
  """Returns what is wrong with the command, as one sentence, or None if it can be run."""
  if not command:
    return "no command after `--`; for example: jaxpace run --nproc 2 -- python train.py"
  program = command[0]
  if shutil.which(program):
    return None
  path = Path(program)
  if os.sep in program or path.exists():
    if path.is_dir():
      return f"{program} is a directory, not a program"
    if path.exists():
      how = f"; did you mean `-- python {program}`?" if path.suffix == ".py" else "; see `chmod +x`"
      return f"{program} is not executable{how}"
    return f"{program} does not exist"
  return f"the command {program!r} was not found in PATH"


_TICK_SECONDS = 0.02
_SETTLE_SECONDS = 1.0
"""So long a process that complains of a lost peer is not taken for the cause: the lost peer's own
end is waited for."""
_LEFTOVER_GRACE_SECONDS = 2.0
"""Children that outlive the worker that started them get this long between SIGTERM and SIGKILL, if
not less."""


class Supervisor:
  """Watches over the workers of one job. `run` does everything."""

  def __init__(self, job: Launch):
    """Takes the job; nothing is started yet."""
    self._job = job
    self._id = uuid.uuid4().hex
    self._workers: list[processes.Worker] = []
    self._failures: dict[int, outcome.Failure] = {}
    self._received: list[int] = []  # signals that reached the launcher
    self._stop_signal: int | None = None  # that of them which stopped the job
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
    job = self._job
    self._prepare_logs()
    try:
      port = environment.PortReservation(job.port)
    except OSError as error:
      raise LaunchError(f"the coordinator's port {job.port or '(any)'} cannot be used: "
                        f"{error.strerror}") from error
    begun = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="jaxpace-launch-") as notices, self._signals():
      self._notices = Path(notices)
      try:
        port.release_early()
        for index in range(job.nproc):
          self._start(index, port.port)
        display = self._display()
        display.start()
        self._loop()
        display.finish()
      finally:
        for worker in self._workers:
          worker.send(signal.SIGTERM)
        processes.clear_away(self._id, min(job.grace, _LEFTOVER_GRACE_SECONDS))
        for worker in self._workers:
          worker.send(signal.SIGKILL)
          worker.release()
        port.close()
    return self._conclude(time.monotonic() - begun)

  @contextlib.contextmanager
  def _signals(self) -> Iterator[None]:
    """Collects SIGINT, SIGTERM and SIGHUP meanwhile. What a parent chose to ignore stays ignored:
    `nohup` does so with SIGHUP, `sh -c '... &'` with SIGINT."""
    before = {number: signal.signal(number, lambda number, _: self._received.append(number))
              for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
              if signal.getsignal(number) is not signal.SIG_IGN}
    try:
      yield
    finally:
      for number, handler in before.items():
        signal.signal(number, handler)

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
        notice=str(self._notices / f"process-{index}"), devices=job.devices, threads=job.threads,
        gpus=environment.count_gpus(os.environ))
    try:
      self._workers.append(processes.Worker(index, job.command, env,
                                            job.logs / f"process-{index}.log"))
    except OSError as error:
      raise LaunchError(
          f"process {index} cannot be started: {job.command[0]}: {error.strerror}") from error

  def _display(self) -> Display:
    show = {"first": self._workers[:1], "all": self._workers, "none": []}[self._job.show]
    views = [LogView(w.log, f"[{w.index}] " if self._job.show == "all" else None) for w in show]
    try:
      return Display(views, sys.stdout.fileno())
    except (AttributeError, OSError, ValueError):  # no stdout at all (`>&-`)
      return Display(views, None)

  def _running(self) -> list[processes.Worker]:
    return [worker for worker in self._workers if worker.status is None]

  def _loop(self) -> None:
    while self._running():
      time.sleep(_TICK_SECONDS)
      while self._received:
        self._on_signal(self._received.pop(0))
      for worker in self._workers:
        self._look_at(worker)
      if self._failures and not self._stopping and not self._cause_may_come():
        if self._running():
          self._say(f"{self._describe(self._first())}; stopping the others.")
        self._stop([(0.0, signal.SIGTERM), (self._job.grace, signal.SIGKILL)])
      self._send_due()

  def _look_at(self, worker: processes.Worker) -> None:
    """Notes whether a worker ended, or announced that it will."""
    index, ended = worker.index, worker.poll()
    if not self._stopping and (
        announced := outcome.read_announcement(self._notices / f"process-{index}", index)):
      self._failures.setdefault(index, announced)
    if not ended or not worker.status:
      return
    if index in self._failures:
      self._failures[index] = dataclasses.replace(self._failures[index], status=worker.status)
    # once the job is being stopped only what we cannot have done ourselves still counts
    elif not self._stopping or (worker.status < 0 and -worker.status not in self._sent):
      self._failures[index] = outcome.Failure(index, worker.ended_ns, worker.status)

  def _cause_may_come(self) -> bool:
    """Returns whether only followers have failed so far, a moment ago: then what they follow is
    still to be seen."""
    failures, words = self._evidence()
    age = time.monotonic_ns() - min(failure.when_ns for failure in failures)
    return (bool(self._running()) and age < _SETTLE_SECONDS * 1e9
            and all(map(outcome.is_follower, failures, words)))

  def _on_signal(self, number: int) -> None:
    grace, running = self._job.grace, len(self._running())
    if self._stopping:
      if number == signal.SIGINT:
        self._say("killing all processes.")
        self._plan = [(time.monotonic(), signal.SIGKILL)]
      return
    self._stop_signal = number
    if number == signal.SIGINT:
      self._say(f"stopping {running} processes; Ctrl-C again kills them at once.")
      # what Ctrl-C does to a single program, so that `finally` and `with` run; jax swallows SIGTERM
      self._stop([(0.0, signal.SIGINT), (grace / 2, signal.SIGTERM), (grace, signal.SIGKILL)])
    else:
      self._say(f"{outcome.signal_name(number)} received, stopping {running} processes.")
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
    self._say(f"{self._describe(first)} after {seconds:.1f} s, and the job with it.")
    if first.announced is None and (hint := outcome.HINTS.get(-(first.status or 0))):
      self._say(hint)
    if killed := ", ".join(map(str, sorted(self._killed))):
      self._say(f"killed, as SIGTERM did not end them in {self._job.grace:g} s: process {killed}.")
    log = self._workers[first.index].log
    last = tail(log, self._job.tail_lines)
    print(f"--- last lines of {log}" + ("" if last else " (empty)"), *last, sep="\n",
          file=sys.stderr, flush=True)
    # one that announced an exception had failed before our SIGKILL ended its exit
    return 1 if first.index in self._killed else outcome.exit_status(first.status or 1)

  def _evidence(self) -> tuple[list[outcome.Failure], list[str]]:
    failures = list(self._failures.values())
    return failures, ["\n".join(tail(self._workers[failure.index].log, 12)) for failure in failures]

  def _first(self) -> outcome.Failure:
    return outcome.first_cause(*self._evidence())

  def _describe(self, failure: outcome.Failure) -> str:
    how = (f"failed with {failure.announced}" if failure.announced
           else outcome.describe_status(failure.status or 0))
    return f"process {failure.index} (pid {self._workers[failure.index].pid}) {how}"

  @staticmethod
  def _say(text: str) -> None:
    with contextlib.suppress(OSError, ValueError):
      print(f"jaxpace run: {text}", file=sys.stderr, flush=True)
