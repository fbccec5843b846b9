"""Runs a job of N local processes from start to end and says which failed first."""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Literal

from jaxpace.files import UserError
from jaxpace.hosts.launch import environment
from jaxpace.hosts.launch.output import Display, LogView, tail

_TICK_SECONDS = 0.02
_SETTLE_SECONDS = 1.0
"""So long a process that complains of a lost peer is not taken for the cause: the lost peer's own
end is waited for."""
_LEFTOVER_GRACE_SECONDS = 2.0
"""Between SIGTERM and SIGKILL for what outlives the worker that started it, if not less."""
_KILL_SECONDS = 1.0
"""Longest wait for what SIGKILL ends; one that forks meanwhile needs another round."""
_TAIL_LINES = 20
"""Of the log of the process that failed first; all of it is in its file."""
_PR_SET_PDEATHSIG = 1
_SIGNALS = {int(one): one.name for one in signal.Signals}
_LOST_PEER = re.compile(
    r"gloo .*failed|connection closed by peer|connection reset by peer|coordination service|"
    r"heartbeat timeout|shutdown barrier|socket closed|another task died|unavailable:",
    re.IGNORECASE)


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


def is_follower(status: int, last_words: str) -> bool:
  """Returns whether a worker that ended with this status, as `subprocess` has it, failed because
  another one had, by the end of its log."""
  # One that a signal cut short says nothing of why. JAX aborts when process 0 is gone, and says so.
  if status < 0 and -status != signal.SIGABRT:
    return False
  return _LOST_PEER.search(last_words) is not None


def describe_status(status: int) -> str:
  """Returns "was killed by SIGKILL (signal 9)" for -9, "ended with exit status 3" for 3."""
  if status < 0:
    return f"was killed by {_SIGNALS.get(-status)} (signal {-status})"
  name = _SIGNALS.get(status - 128)  # a shell in between reports a signal so
  return f"ended with exit status {status}" + (f" (128 + {name})" if name else "")


def _die_with(parent: int) -> Callable[[], None] | None:
  """Returns what a new worker calls before it becomes the user's program: the kernel kills it when
  `parent` dies."""
  if not sys.platform.startswith("linux"):
    return None
  # Looked up here: nothing may be loaded after the fork.
  prctl = ctypes.CDLL(None, use_errno=True).prctl

  def before_exec() -> None:
    prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # it died before the line above
      os._exit(1)

  return before_exec


@dataclasses.dataclass(frozen=True)
class Worker:
  """One process of the job, leader of its own session and process group."""

  index: int
  log: Path
  process: subprocess.Popen[bytes]

  @property
  def status(self) -> int | None:
    """Its exit status as `subprocess` has it; None while it runs, as far as was seen."""
    return self.process.returncode

  def send(self, number: int) -> None:
    """Sends a signal to the process and its group while it runs: later the number may be another's.
    """
    if self.status is None:
      with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(self.process.pid, number)

  def __str__(self) -> str:
    """How it ended, in words."""
    return f"process {self.index} (pid {self.process.pid}) {describe_status(self.status or 0)}"


def clear_away(launch_id: str, grace: float) -> None:
  """Ends what is left of a launch, processes in sessions of their own included, by its mark in
  their environment: SIGTERM, and SIGKILL after `grace` seconds. Finds nothing where there is no
  /proc."""
  now = time.monotonic()
  asked: set[int] = set()
  while ((left := marked(environment.LAUNCH_ID, launch_id))
         and time.monotonic() < now + grace + _KILL_SECONDS):
    killing = time.monotonic() >= now + grace
    for pid in left if killing else left - asked:
      with contextlib.suppress(OSError):  # it ended meanwhile, or is not ours to end
        os.kill(pid, signal.SIGKILL if killing else signal.SIGTERM)
    asked |= left
    time.sleep(_TICK_SECONDS)


def marked(name: str, value: str) -> set[int]:
  """Returns the living processes that began with this in their environment, zombies and this one
  left out; nothing where there is no /proc."""
  mark, found = f"{name}={value}".encode(), set()
  for entry in Path("/proc").glob("[0-9]*"):
    with contextlib.suppress(OSError):  # it ended meanwhile, or is not ours to look at
      if mark in (entry / "environ").read_bytes().split(b"\0"):
        found.add(int(entry.name))
  return found - {os.getpid()}


@dataclasses.dataclass
class Launcher:
  """Starts the workers of one job and answers for them. `run` does everything."""

  command: Sequence[str]  # program and arguments, the same for every process
  nproc: int  # number of processes, at least 1
  logs: Path  # directory of the logs; made if missing
  show: Literal["first", "all", "none"] = "first"  # whose output appears on the terminal
  grace: float = 10.0  # seconds between SIGTERM and SIGKILL
  devices: int | None = None  # devices per process; None leaves it to JAX
  threads: int | None = None  # XLA CPU threads per process; None leaves it to XLA

  def __post_init__(self) -> None:
    self._id = uuid.uuid4().hex
    self._workers: list[Worker] = []
    self._failed: list[Worker] = []  # in the order in which it was seen
    self._left: list[Worker] = []  # ended well before the job was stopped
    self._received: list[int] = []  # signals that reached the launcher
    self._sent: list[int] = []  # signals with which the launcher stops the job
    self._killed: list[int] = []  # workers that only SIGKILL ended

  def run(self) -> int:
    """Runs the job to its end; UserError, if it can't be started. Returns the exit status for the
    launcher: 0, the failed worker's, or 128 + the number of the signal that stopped it."""
    begun = time.monotonic()
    self._prepare_logs()
    with environment.reserve_port() as port, self._signals():
      try:
        for index in range(self.nproc):
          self._workers.append(self._start(index, port.getsockname()[1]))
        display = Display(self._shown(), _screen())
        display.start()
        stopped_by = self._watch()
        display.finish()
      finally:
        for worker in self._workers:
          worker.send(signal.SIGTERM)
        clear_away(self._id, min(self.grace, _LEFTOVER_GRACE_SECONDS))
        for worker in self._workers:
          worker.send(signal.SIGKILL)
    return self._conclude(stopped_by, time.monotonic() - begun)

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
    logs = self.logs
    try:
      logs.mkdir(parents=True, exist_ok=True)
      # Those of a run with more processes would mislead.
      for old in logs.glob("process-*.log"):
        old.replace(old.with_name(f"{old.name}.previous"))
    except (FileExistsError, NotADirectoryError) as error:
      raise UserError(f"--logs takes a directory, but {logs} is a file or lies in one; "
                        "give another, such as runs/logs") from error
    except OSError as error:
      raise UserError(f"the log directory {logs} can't be used ({error.strerror}): "
                      "give another with --logs DIR") from error

  def _start(self, index: int, port: int) -> Worker:
    """Starts a process with an empty stdin, and stdout and stderr in a log of its own."""
    env = environment.worker_environment(
        os.environ, index=index, nproc=self.nproc, port=port, launch_id=self._id,
        devices=self.devices, threads=self.threads, gpus=environment.count_gpus(os.environ))
    log = self.logs / f"process-{index}.log"
    # Appends, so that a log that is cut while it grows has no hole.
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_EXCL
    try:
      with open(os.open(log, flags, 0o666), "wb") as out:
        return Worker(index, log, subprocess.Popen(
            list(self.command), env=env, stdin=subprocess.DEVNULL, stdout=out,
            stderr=subprocess.STDOUT, start_new_session=True,
            preexec_fn=_die_with(os.getpid())))  # the launcher has no threads
    except OSError as error:
      raise UserError(
          f"process {index} cannot be started: {self.command[0]}: {error.strerror}") from error

  def _shown(self) -> list[LogView]:
    shown = {"first": self._workers[:1], "all": self._workers, "none": []}[self.show]
    return [LogView(w.log, f"[{w.index}] " if self.show == "all" else None) for w in shown]

  def _running(self) -> list[Worker]:
    return [worker for worker in self._workers if worker.status is None]

  def _watch(self) -> int | None:
    """Waits until all workers have ended; stops them when one fails, or when asked to. Returns the
    signal that stopped the job, if one did."""
    self._wait(math.inf, lambda: self._received or self._failed)
    # Where only followers have failed, what they follow is still to be seen.
    self._wait(_SETTLE_SECONDS, lambda: self._received or self._causes())
    self._left = [worker for worker in self._workers if worker.status == 0]
    by = self._received.pop(0) if self._received else None
    if by == signal.SIGINT:
      self._say("stopping the job; Ctrl-C again kills it at once.")
      # What Ctrl-C does to a single program, so that `finally` and `with` run: JAX swallows SIGTERM
      self._stop((signal.SIGINT, self.grace / 2), (signal.SIGTERM, self.grace / 2))
    elif by is not None:
      self._say(f"{_SIGNALS[by]} received, stopping the job.")
      self._stop((signal.SIGTERM, self.grace))
    elif self._running():
      self._say(f"{self._first()}; stopping the others.")
      self._stop((signal.SIGTERM, self.grace))
    return by

  def _wait(self, seconds: float, over: Callable[[], object]) -> None:
    """Waits until all workers have ended, but no longer than so many seconds or until `over()`."""
    deadline = time.monotonic() + seconds
    while self._running() and not over() and time.monotonic() < deadline:
      time.sleep(_TICK_SECONDS)
      for worker in self._running():
        # While the job is being stopped only what the launcher cannot have done itself counts.
        if (status := worker.process.poll()) and (
            not self._sent or (status < 0 and -status not in self._sent)):
          self._failed.append(worker)

  def _stop(self, *plan: tuple[int, float]) -> None:
    """Sends each signal, followed by its seconds to end in, and SIGKILL in the end; or at once, if
    asked to by Ctrl-C."""
    def impatient() -> bool:
      return signal.SIGINT in self._received

    for number, seconds in plan:
      if not impatient():
        self._send(number)
        self._wait(seconds, impatient)
    if impatient() and self._running():
      self._say("killing all processes.")
    self._send(signal.SIGKILL)
    self._wait(math.inf, lambda: False)

  def _send(self, number: int) -> None:
    self._sent.append(number)
    for worker in self._running():
      worker.send(number)
      if number == signal.SIGKILL:
        self._killed.append(worker.index)

  def _conclude(self, stopped_by: int | None, seconds: float) -> int:
    if stopped_by is not None:
      killed = (f"; {len(self._killed)} of {self.nproc} processes had to be killed"
                if self._killed else "")
      self._say(f"stopped by {_SIGNALS[stopped_by]} after {seconds:.1f} s"
                f"{killed}. Logs: {self.logs}")
      return 128 + stopped_by
    if not self._failed:
      return 0
    first = self._first()
    self._say(f"{first} after {seconds:.1f} s, and the job with it.")
    status = first.status or 0
    if not self._causes():
      for worker in self._left:
        self._say(f"{worker} before that: the others complain of a peer that is gone.")
    if status == -signal.SIGKILL:
      self._say("Nobody but the system or a person sends SIGKILL: when memory runs out, the kernel "
                "does (see `dmesg`, or the container's memory limit).")
    if killed := ", ".join(map(str, self._killed)):
      self._say(f"killed, as SIGTERM did not end them in {self.grace:g} s: process {killed}.")
    last = tail(first.log, _TAIL_LINES)
    print(f"--- last lines of {first.log}" + ("" if last else " (empty)"), *last, sep="\n",
          file=sys.stderr, flush=True)
    return 128 - status if status < 0 else status

  def _causes(self) -> list[Worker]:
    """The workers that failed and don't complain of a lost peer, in the order seen: peers of a
    killed process may fail before the launcher sees the kill, since the kernel closes a dying
    process's connections first."""
    return [worker for worker in self._failed
            if not is_follower(worker.status or 0, "\n".join(tail(worker.log, 12)))]

  def _first(self) -> Worker:
    return (self._causes() or self._failed)[0]

  @staticmethod
  def _say(text: str) -> None:
    with contextlib.suppress(OSError, ValueError):
      print(f"jaxpace run: {text}", file=sys.stderr, flush=True)


def _screen() -> int | None:
  """The descriptor of stdout; None where there is none (`>&-`)."""
  try:
    return sys.stdout.fileno()
  except (AttributeError, OSError, ValueError):
    return None
