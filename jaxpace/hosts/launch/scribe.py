"""A small process that writes what the workers say to their logs, and takes it from them when that
can't be written.

A worker that writes to a full disk itself ends of it: `print` raises. So it writes to a pipe; what
the disk doesn't take is counted, and said in the log once there is room again. The process has
nothing else to do, so neither a slow terminal nor a stopped launcher holds up a worker, and what
was said is written even if the launcher is killed.
"""

from __future__ import annotations

import contextlib
import os
import resource
import selectors
import signal
import socket
import time
from pathlib import Path

_PIECE = 1 << 16
_WRITE, _SYNC = b"w", b"s"
_SYNC_SECONDS, _END_SECONDS = 1.0, 5.0


class Scribe:
  """Stands between workers and their logs. `open`, `sync` and `close` belong to the launcher."""

  def __init__(self) -> None:
    """Forks the process. Call it before any thread, pipe or worker there is to inherit.

    Raises:
      OSError: it can't be made.
    """
    self._socket, theirs = socket.socketpair()
    self._pid = os.fork()
    if self._pid == 0:
      status = 1
      try:
        self._socket.close()
        _serve(theirs)
        status = 0
      finally:
        os._exit(status)
    theirs.close()

  def open(self, log: Path) -> int:
    """Makes a log, and returns the descriptor that a worker writes to; it is the caller's to close.

    Raises:
      OSError: the log can't be made.
    """
    # appends, so that a log that is cut while it grows has no hole
    file = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    try:
      read, write = os.pipe()
      try:
        socket.send_fds(self._socket, [_WRITE], [read, file])
      except OSError:
        os.close(write)
        raise
      finally:
        os.close(read)
    finally:
      os.close(file)
    return write

  def sync(self) -> None:
    """Waits until what the workers have said so far is in the logs; not long, where the disk
    hangs."""
    with contextlib.suppress(OSError):
      self._socket.settimeout(0)
      with contextlib.suppress(BlockingIOError):  # an answer that came too late the last time
        self._socket.recv(_PIECE)
      self._socket.settimeout(_SYNC_SECONDS)
      self._socket.sendall(_SYNC)
      self._socket.recv(1)

  def close(self) -> None:
    """Lets the process end, which it does once nobody can write any more; waits for that, but not
    long."""
    self._socket.close()
    deadline = time.monotonic() + _END_SECONDS
    with contextlib.suppress(ChildProcessError):
      while os.waitpid(self._pid, os.WNOHANG) == (0, 0) and time.monotonic() < deadline:
        time.sleep(0.01)


class _Log:
  """One worker's pipe and its file."""

  def __init__(self, pipe: int, file: int):
    self.pipe, self._file, self._lost = pipe, file, 0
    os.set_blocking(pipe, False)

  def take(self) -> bool | None:
    """Moves a piece on. Returns True, False where there is nothing at the moment, None where
    nothing will come."""
    try:
      data = os.read(self.pipe, _PIECE)
    except BlockingIOError:
      return False
    except OSError:
      return None
    if data:
      self._write(data)
    return True if data else None

  def _write(self, data: bytes) -> None:
    if self._lost:
      words = (f"\n[jaxpace launch: {self._lost:,} bytes are missing here, the log could not be "
               "written]\n").encode()
      if _put(self._file, words) < len(words):
        self._lost += len(data)
        return
      self._lost = 0
    self._lost += len(data) - _put(self._file, data)

  def close(self) -> None:
    os.close(self.pipe)
    os.close(self._file)


def _put(file: int, data: bytes) -> int:
  """Writes as much as the file takes; returns how much."""
  done = 0
  with contextlib.suppress(OSError):
    while done < len(data):
      done += os.write(file, data[done:])
  return done


def _serve(launcher: socket.socket) -> None:
  """What the process does: until the launcher is gone, and every worker with all that might write
  to its pipe."""
  os.setsid()
  for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGPIPE):
    signal.signal(number, signal.SIG_IGN)
  null = os.open(os.devnull, os.O_RDWR)
  for fd in (0, 1, 2):  # a reader of the launcher's output must not wait for this process
    os.dup2(null, fd)
  most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
  with contextlib.suppress(OSError, ValueError):  # two for each worker
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
  logs: dict[int, _Log] = {}
  with selectors.DefaultSelector() as selector:
    selector.register(launcher, selectors.EVENT_READ)
    while selector.get_map():
      for key, _ in selector.select():
        if key.fileobj is not launcher:
          _move(logs, selector, key.fd)
          continue
        try:
          word, descriptors, _, _ = socket.recv_fds(launcher, 1, 2)
        except OSError:
          word, descriptors = b"", []
        if not word:
          selector.unregister(launcher)
        elif word == _WRITE and len(descriptors) == 2:
          logs[descriptors[0]] = _Log(*descriptors)
          selector.register(descriptors[0], selectors.EVENT_READ)
        elif word == _SYNC:
          for pipe in list(logs):
            _move(logs, selector, pipe, pieces=64)
          with contextlib.suppress(OSError):
            launcher.send(word)


def _move(logs: dict[int, _Log], selector: selectors.BaseSelector, pipe: int,
          pieces: int = 1) -> None:
  """Moves so many pieces of one worker on."""
  log = logs.get(pipe)
  for _ in range(pieces if log else 0):
    assert log is not None
    went = log.take()
    if went is None:
      selector.unregister(pipe)
      del logs[pipe]
      log.close()
    if not went:
      return
