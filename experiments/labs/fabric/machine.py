"""What a lab needs of the machine, and what labs that were killed have left on it."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Collection, Iterator, Sequence
from typing import IO

from experiments.labs.fabric import commands

STATE = pathlib.Path("/run") / commands.PREFIX
"""One directory for each lab: its hosts file, and a lock that its maker holds as long as it
lives."""
_NAMESPACES = pathlib.Path("/run/netns")  # where `ip netns` keeps the names
_AVAILABLE = pathlib.Path("/proc/sys/net/ipv4/tcp_available_congestion_control")
_PACKAGES = {"ip": "iproute2", "tc": "iproute2", "unshare": "util-linux", "setpriv": "util-linux",
             "mount": "mount",
             "hostname": "hostname", "sh": "dash"}  # of Debian and Ubuntu
_SYSTEM = "/usr/sbin:/sbin"  # where distributions keep ip and tc, and where PATH need not lead
_PATIENCE = 10.0  # s, for one command


class LabError(RuntimeError):
  """The machine can't do what the lab needs; the message is a sentence with the fix."""


def why_not(algorithms: Collection[str] = ()) -> str | None:
  """Returns why no lab can be built here, in a sentence, or None if nothing speaks against it.

  Whether the kernel has namespaces, bridges and the shaper shows only when a lab is built.

  Args:
    algorithms: TCP congestion controls that the lab asks for.
  """
  if not sys.platform.startswith("linux"):
    return (f"The lab is made of Linux network namespaces; this is {sys.platform}. Run it on "
            "Linux, in a VM for example.")
  absent = [program for program in _PACKAGES if find(program) is None]
  if absent:
    packages = " ".join(sorted({_PACKAGES[program] for program in absent}))
    return (f"{', '.join(absent)} not found in PATH or {_SYSTEM}. On Debian and Ubuntu: apt-get "
            f"install {packages}")
  if os.geteuid() != 0:
    return ("Only root may make network namespaces. Run it with sudo, or as root in a VM or a "
            "privileged container.")
  known = _AVAILABLE.read_text().split() if _AVAILABLE.exists() else []
  lacking = [name for name in algorithms if known and name not in known]
  if lacking:
    return (f"This kernel has no TCP congestion control {', '.join(lacking)}, it has "
            f"{', '.join(known)}. Try: modprobe tcp_{lacking[0]}.")
  return None


def find(program: str) -> str | None:
  """Returns the path of one of the programs that the lab runs, or None if it is not installed."""
  return shutil.which(program) or shutil.which(program, path=_SYSTEM)


def found(command: Sequence[str]) -> list[str]:
  """Returns a command with the path of its program, wherever PATH leads."""
  return [find(command[0]) or command[0], *command[1:]]


def run(command: Sequence[str]) -> str:
  """Runs one of the lab's own short commands and returns what it prints.

  Raises:
    LabError: it fails.
  """
  try:
    done = subprocess.run(found(command), stdin=subprocess.DEVNULL, capture_output=True, text=True,
                          timeout=_PATIENCE)
  except subprocess.TimeoutExpired as error:
    raise LabError(f"`{' '.join(command)}` did not end within {_PATIENCE:g} s.") from error
  if done.returncode:
    raise LabError(explain(command, done.stderr))
  return done.stdout


def explain(command: Sequence[str], said: str) -> str:
  """Puts the failure of one of the lab's commands into a sentence that names the usual cause."""
  failed = f"`{' '.join(command)}` failed: {' '.join(said.split()) or 'it said nothing'}"
  if (command[0] == "tc"
      and ("kind is unknown" in said or "No such file" in said or "not supported" in said)):
    return (f"This kernel has no tbf qdisc, with which the trunk is shaped. Try: modprobe sch_tbf. "
            f"({failed})")
  if "not permitted" in said or "Permission denied" in said:
    return (f"{failed}. Root here may not make network namespaces: a container needs --privileged, "
            "or at least the capabilities NET_ADMIN and SYS_ADMIN.")
  for kind in ("bridge", "veth"):
    if kind in command and ("Unknown device type" in said or "not supported" in said):
      return f"This kernel has no {kind}. Try: modprobe {kind}. ({failed})"
  return failed


def namespaces(lab: str | None = None) -> list[str]:
  """Names of the namespaces that exist of one lab, or of all labs."""
  names = sorted(os.listdir(_NAMESPACES)) if _NAMESPACES.is_dir() else []
  return [name for name in names if (owner := commands.lab_of(name)) and lab in (None, owner)]


def pids(names: Sequence[str]) -> set[int]:
  """Processes that are in any of the namespaces."""
  found: set[int] = set()
  for name in names:
    with contextlib.suppress(LabError):  # it vanished meanwhile
      found |= {int(word) for word in run(["ip", "netns", "pids", name]).split()}
  return found - {os.getpid()}


def remove(lab: str, grace: float = 0.0) -> list[str]:
  """Ends all processes of a lab and removes it.

  Args:
    lab: its name.
    grace: seconds between SIGTERM and SIGKILL; 0 kills at once.

  Returns:
    What could not be removed, in sentences; empty if all is gone.
  """
  names = namespaces(lab)
  deadline = time.monotonic() + grace
  if grace and _signal(pids(names), signal.SIGTERM):
    while pids(names) and time.monotonic() < deadline:
      time.sleep(0.02)
  for _ in range(100):  # one that forks while it is shot at needs another round
    if not _signal(pids(names), signal.SIGKILL):
      break
    time.sleep(0.02)
  problems = []
  for name in names:
    try:
      run(["ip", "netns", "delete", name])
    except LabError as error:
      problems.append(str(error))
  if not namespaces(lab):
    shutil.rmtree(STATE / lab, ignore_errors=True)
    with contextlib.suppress(OSError):
      STATE.rmdir()  # the last lab's
  return problems


def _signal(processes: Collection[int], number: int) -> bool:
  for pid in processes:
    with contextlib.suppress(ProcessLookupError):
      os.kill(pid, number)
  return bool(processes)


def claim(lab: str) -> IO[bytes]:
  """Makes the lab's state directory and takes its lock; closing the file, or dying, lets it go.

  Raises:
    LabError: the directory can't be made.
  """
  try:
    (STATE / lab).mkdir(parents=True)
    lock = (STATE / lab / "lock").open("wb")
  except OSError as error:
    raise LabError(f"{STATE / lab} can't be made: {error.strerror}.") from error
  fcntl.flock(lock, fcntl.LOCK_EX)
  return lock


def abandoned() -> Iterator[str]:
  """Labs whose maker is dead."""
  known = {owner for name in namespaces() if (owner := commands.lab_of(name))}
  if STATE.is_dir():
    known |= set(os.listdir(STATE))
  for lab in sorted(known):
    try:
      with (STATE / lab / "lock").open("rb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
      continue  # alive
    except OSError:
      pass  # no lock at all
    yield lab
