"""One recorder at a time in a run directory."""

from __future__ import annotations

import contextlib
import fcntl
import functools
import os
import pathlib
import socket
import weakref

from jaxpace.files.folders import Folder

LOCK_FILE = ".lock"


class BusyError(OSError):
  """Another recorder writes to the directory; the message says which."""


class DirectoryLock:
  """Held by process 0 of a recorded job, from `take` to `release`. The system frees it when the
  process dies.

  Where the file system knows no locks nothing is locked. A forked child closes its copy of the
  descriptor, so that it does not keep the lock when its parent is dead.
  """

  def __init__(self, folder: Folder):
    self._folder, self._descriptor = folder, -1
    os.register_at_fork(after_in_child=functools.partial(_let_go, weakref.ref(self)))

  @staticmethod
  def take(directory: pathlib.Path) -> DirectoryLock:
    """Locks a directory.

    Args:
      directory: run directory; it must exist.

    Raises:
      BusyError: another recorder, in this process or another, has it.
      OSError: the directory can't be written.
    """
    lock = DirectoryLock(Folder(directory))
    # Its last owner may remove the file between our opening and locking it.
    while not lock._locked(directory):
      pass
    return lock

  def release(self) -> None:
    """Lets the next recorder in. Further calls, and calls in a forked child, do nothing."""
    if self._descriptor >= 0:
      with contextlib.suppress(OSError):
        self._folder.unlink(LOCK_FILE)
      self._close()

  def _locked(self, directory: pathlib.Path) -> bool:
    """Whether the file that is locked, if locks are known here, is the one in the directory."""
    self._descriptor = self._folder.open_own(LOCK_FILE, os.O_RDWR)
    try:
      fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
      owner = os.read(self._descriptor, 200).decode(errors="replace").split()
      self._close()
      raise BusyError(_busy(directory, owner)) from None
    except OSError:
      self._close()
      return True
    if not _is_at(self._descriptor, self._folder):
      self._close()
      return False
    os.ftruncate(self._descriptor, 0)
    os.write(self._descriptor, f"{os.getpid()} {socket.gethostname()}\n".encode())
    return True

  def _close(self) -> None:
    descriptor, self._descriptor = self._descriptor, -1
    with contextlib.suppress(OSError):
      os.close(descriptor)


def _let_go(lock: weakref.ref[DirectoryLock]) -> None:
  """In a forked child."""
  if (mine := lock()) is not None and mine._descriptor >= 0:
    mine._close()


def _is_at(descriptor: int, folder: Folder) -> bool:
  try:
    return os.path.samestat(os.fstat(descriptor), folder.stat(LOCK_FILE))
  except FileNotFoundError:
    return False


def _busy(directory: pathlib.Path, owner: list[str]) -> str:
  who = f"process {owner[0]} on {owner[1]}" if len(owner) == 2 else "another process"
  if owner[:1] == [str(os.getpid())]:
    return (f"another Recorder of this process is recording to {directory}. Open one Recorder for "
            "a job, or give each a directory of its own.")
  return (f"{who} is recording to {directory} at this moment. Give each job a directory of its "
          "own. If the two are processes of one job, each takes itself for the whole of it: call "
          "jaxpace.distributed.initialize() (or jax.distributed.initialize()) first.")
