"""Processes of a launch: started so that they cannot outlive it, found again wherever they went."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from jaxpace.hosts.launch.environment import LAUNCH_ID

_PR_SET_PDEATHSIG = 1


def _die_with(parent: int) -> Callable[[], None] | None:
  """Returns what a new worker calls before it becomes the user's program: the kernel kills it when
  `parent` dies."""
  if not sys.platform.startswith("linux"):
    return None
  # looked up here: nothing may be loaded after the fork
  prctl = ctypes.CDLL(None, use_errno=True).prctl

  def before_exec() -> None:
    prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # it died before the line above
      os._exit(1)

  return before_exec


class Worker:
  """One process of the job, leader of its own session and process group."""

  def __init__(self, index: int, command: Sequence[str], env: Mapping[str, str], log: Path):
    """Starts the process with stdout and stderr in `log` and an empty stdin.

    Args:
      index: process index.
      command: program and arguments.
      env: whole environment.
      log: log file, which must not be there.

    Raises:
      OSError: if the program cannot be started or the log not be made.
    """
    self.index = index
    self.log = log
    self.status: int | None = None  # as `subprocess` has it
    self.ended_ns = 0
    # appends, so that a log that is cut while it grows has no hole
    out = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    try:
      self._process = subprocess.Popen(
          list(command), env=dict(env), stdin=subprocess.DEVNULL, stdout=out,
          stderr=subprocess.STDOUT,
          start_new_session=True, preexec_fn=_die_with(os.getpid()))  # the launcher has no threads
    finally:
      os.close(out)
    self.pid = self._process.pid

  def poll(self) -> bool:
    """Returns whether the process ended since the last call; `status` and `ended_ns` are set then.

    It stays a zombie until `release`: as long as it is one, the kernel gives its number, which is
    that of its group, to nobody else, and signals to the group cannot reach a stranger.
    """
    if self.status is not None:
      return False
    if hasattr(os, "waitid"):
      ended = os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
      if ended:
        self.status = ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status
    else:
      self.status = self._process.poll()
    self.ended_ns = time.monotonic_ns()
    return self.status is not None

  def release(self) -> None:
    """Lets go of the process; call it when nothing more is sent to its group."""
    self._process.wait()

  def send(self, number: int) -> None:
    """Sends a signal to the process and to all others of its group."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
      os.killpg(self.pid, number)


def members(launch_id: str) -> set[int]:
  """Returns the pids of all living processes with the mark of a launch in their environment, those
  in a session of their own included. Empty where there is no /proc."""
  mark = f"{LAUNCH_ID}={launch_id}".encode()
  found = set()
  for entry in Path("/proc").glob("[0-9]*"):
    with contextlib.suppress(OSError):  # it ended meanwhile, or is not ours to look at
      if (int(entry.name) != os.getpid()
          and mark in (entry / "environ").read_bytes().split(b"\0")):
        found.add(int(entry.name))
  return found


def clear_away(launch_id: str, grace: float) -> None:
  """Ends what is left of a launch: SIGTERM, and SIGKILL after `grace` seconds.

  Args:
    launch_id: the launch's mark in the environment of its processes.
    grace: seconds between the two.
  """
  _signal_all(launch_id, signal.SIGTERM)
  deadline = time.monotonic() + grace
  while members(launch_id) and time.monotonic() < deadline:
    time.sleep(0.02)
  for _ in range(50):  # one that forks while it is shot at needs another round
    if not _signal_all(launch_id, signal.SIGKILL):
      break
    time.sleep(0.02)


def _signal_all(launch_id: str, number: int) -> int:
  found = members(launch_id)
  for pid in found:
    with contextlib.suppress(ProcessLookupError, PermissionError):
      os.kill(pid, number)
  return len(found)
