"""Processes of a launch: started so that they cannot outlive it, found again wherever they went."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path

from jaxpace.hosts.launch.environment import LAUNCH_ID
from jaxpace.hosts.launch.scribe import Scribe

_PR_SET_PDEATHSIG = 1
_PROC = Path("/proc")


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

  def __init__(self, index: int, command: Sequence[str], env: Mapping[str, str], log: Path,
               scribe: Scribe):
    """Starts the process with stdout and stderr in `log` and an empty stdin.

    Args:
      index: process index.
      command: program and arguments.
      env: whole environment.
      log: log file, which must not be there.
      scribe: writes it.

    Raises:
      OSError: if the program cannot be started or the log not be written.
    """
    self.index = index
    self.log = log
    self.status: int | None = None
    self.ended_ns: int | None = None
    out = scribe.open(log)
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
      if ended is None:
        return False
      self.status = ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status
    elif self._process.poll() is None:
      return False
    else:
      self.status = self._process.returncode
    self.ended_ns = time.monotonic_ns()
    return True

  def release(self) -> None:
    """Lets go of the process; call it when nothing more is sent to its group."""
    self._process.wait()

  def send(self, number: int) -> None:
    """Sends a signal to the process and to all others of its group."""
    send_to_group(self.pid, number)


def send_to_group(group: int, number: int) -> None:
  """Sends a signal to a process group; one that is gone or not ours is passed over."""
  with contextlib.suppress(ProcessLookupError, PermissionError):
    os.killpg(group, number)


def members(groups: Collection[int], launch_id: str) -> set[int]:
  """Returns the pids of all living processes of a launch.

  On Linux these are the members of the groups and, found by their environment, children that went
  into a group or session of their own. Elsewhere there is no such list: the ids of those groups
  that have members are returned, which `signal_all` knows how to reach.

  Args:
    groups: process groups of the workers.
    launch_id: the launch's mark in their environment.
  """
  if not (_PROC / "self" / "stat").exists():
    return {group for group in groups if _group_exists(group)}
  mark = f"{LAUNCH_ID}={launch_id}".encode()
  found = set()
  for entry in os.listdir(_PROC):
    if not entry.isdecimal() or int(entry) == os.getpid():
      continue
    try:
      # the name in parentheses may hold anything, spaces and parentheses too
      state, _, group = (_PROC / entry / "stat").read_text(errors="replace").rpartition(")")[
          2].split()[:3]
      if state in "ZXx":
        continue
      if int(group) in groups or mark in (_PROC / entry / "environ").read_bytes().split(b"\0"):
        found.add(int(entry))
    except (OSError, ValueError):
      continue  # it ended meanwhile, or is not ours to look at
  return found


def _group_exists(group: int) -> bool:
  try:
    os.killpg(group, 0)
  except ProcessLookupError:
    return False
  except PermissionError:
    pass
  return True


def signal_all(groups: Collection[int], launch_id: str, number: int) -> int:
  """Sends a signal to every process of a launch.

  Returns:
    How many there were (outside Linux: how many groups).
  """
  found = members(groups, launch_id)
  for group in groups:
    send_to_group(group, number)
  if (_PROC / "self" / "stat").exists():
    for pid in found:
      with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, number)
  return len(found)


def clear_away(groups: Collection[int], launch_id: str, grace: float) -> int:
  """Ends what is left of a launch: SIGTERM, and SIGKILL after `grace` seconds.

  Args:
    groups: process groups of the workers.
    launch_id: the launch's mark in their environment.
    grace: seconds between the two.

  Returns:
    How many processes were left.
  """
  left = signal_all(groups, launch_id, signal.SIGTERM)
  deadline = time.monotonic() + grace
  while left and members(groups, launch_id) and time.monotonic() < deadline:
    time.sleep(0.02)
  for _ in range(50):  # one that forks while it is shot at needs another round
    if not left or not signal_all(groups, launch_id, signal.SIGKILL):
      break
    time.sleep(0.02)
  return left


class OrphanReaper:
  """A small process that outlives a launcher killed with SIGKILL and clears away what that leaves
  behind.

  It reads a pipe that only the launcher holds open: the end of the launcher, whatever the reason,
  is the end of the pipe. (On Linux the kernel kills the workers themselves besides; their children
  only this process can find.)
  """

  def __init__(self, launch_id: str, grace: float):
    """Forks the process. Call it before any thread or worker is started."""
    read, self._write = os.pipe()
    self._pid = os.fork()
    if self._pid == 0:
      status = 1
      try:
        os.close(self._write)
        self._watch(read, launch_id, grace)
        status = 0
      finally:
        os._exit(status)
    os.close(read)

  @staticmethod
  def _watch(read: int, launch_id: str, grace: float) -> None:
    os.setsid()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
      signal.signal(number, signal.SIG_IGN)
    null = os.open(os.devnull, os.O_RDWR)
    for fd in (0, 1, 2):  # a reader of the launcher's output must not wait for this process
      os.dup2(null, fd)
    with os.fdopen(read, "rb") as pipe:
      words = pipe.read().decode().split()
    if "done" not in words:
      clear_away({int(word) for word in words}, launch_id, grace)

  def add(self, group: int) -> None:
    """Tells of a new process group."""
    self._say(str(group))

  def dismiss(self) -> None:
    """Ends the watch: the launcher has cleared away by itself."""
    self._say("done")
    os.close(self._write)
    with contextlib.suppress(ChildProcessError):
      os.waitpid(self._pid, 0)

  def _say(self, word: str) -> None:
    with contextlib.suppress(OSError):  # killed by someone: the launch goes on without it
      os.write(self._write, f"{word}\n".encode())
