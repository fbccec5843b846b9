"""One recorder at a time in a run directory."""

from __future__ import annotations

import contextlib
import os
import pathlib
import socket

from jaxpace.files.folders import Folder
from jaxpace.trace.processes import gone

try:
  import fcntl
except ImportError:  # Windows
  fcntl = None  # type: ignore[assignment]

LOCK_FILE = ".lock"


class BusyError(OSError):
  """Another recorder writes to the directory; the message says which."""


class DirectoryLock:
  """Held by process 0 of a recorded job, from `take` to `release`. The system frees it when the
  process dies.

  Where the file system knows no locks nothing is locked. A child forked meanwhile inherits the
  lock, but not its claim: once the process named in the file is gone, the lock is void.
  """

  def __init__(self, folder: Folder, descriptor: int | None):
    self._folder, self._descriptor, self._pid = folder, descriptor, os.getpid()

  @staticmethod
  def take(directory: pathlib.Path) -> DirectoryLock:
    """Locks a directory.

    Args:
      directory: run directory; it must exist.

    Raises:
      BusyError: another recorder, in this process or another, has it.
      OSError: the directory can't be written.
    """
    folder = Folder(directory)
    if fcntl is None:
      return DirectoryLock(folder, None)
    while True:
      descriptor = folder.open_own(LOCK_FILE, os.O_RDWR)
      try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
      except BlockingIOError:
        owner = os.read(descriptor, 200).decode(errors="replace").split()
        os.close(descriptor)
        if _may_run(owner):
          raise BusyError(_busy(directory, owner)) from None
        return DirectoryLock(folder, None)
      except OSError:
        os.close(descriptor)
        return DirectoryLock(folder, None)
      # else its last owner removed it between our opening and locking it
      if _is_at(descriptor, folder):
        os.ftruncate(descriptor, 0)
        os.write(descriptor, f"{os.getpid()} {socket.gethostname()}\n".encode())
        return DirectoryLock(folder, descriptor)
      os.close(descriptor)

  def release(self) -> None:
    """Lets the next recorder in. Further calls, and calls in a forked child, do nothing."""
    if self._descriptor is None or os.getpid() != self._pid:
      return
    with contextlib.suppress(OSError):
      self._folder.unlink(LOCK_FILE)
    with contextlib.suppress(OSError):
      os.close(self._descriptor)
    self._descriptor = None


def _is_at(descriptor: int, folder: Folder) -> bool:
  try:
    return os.path.samestat(os.fstat(descriptor), folder.stat(LOCK_FILE))
  except FileNotFoundError:
    return False


def _may_run(owner: list[str]) -> bool:
  """Whether the owner may still run; one on another host, or that hasn't said its name yet, may."""
  if len(owner) != 2 or owner[1] != socket.gethostname():
    return True
  try:
    return not gone(int(owner[0]), owner[1])
  except ValueError:
    return False


def _busy(directory: pathlib.Path, owner: list[str]) -> str:
  who = f"process {owner[0]} on {owner[1]}" if len(owner) == 2 else "another process"
  if owner[:1] == [str(os.getpid())]:
    return (f"another Recorder of this process is recording to {directory}. Open one Recorder for "
            "a job, or give each a directory of its own.")
  return (f"{who} is recording to {directory} at this moment. Give each job a directory of its "
          "own. If the two are processes of one job, each takes itself for the whole of it: call "
          "jaxpace.distributed.initialize() (or jax.distributed.initialize()) first.")
