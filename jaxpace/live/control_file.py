"""The control file of a run, and the note of what was applied when."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import pathlib
import queue
import threading
from collections.abc import Callable
from typing import Any

from jaxpace.files import atomic_write
from jaxpace.files.documents import parse
from jaxpace.files.folders import Folder
from jaxpace.files.reading import UnreadableError, read_bytes, read_end
from jaxpace.live.control_request import ControlRequest, RequestError

NAME = "control.json"
APPLIED = "control.applied.jsonl"
_LONGEST = 1 << 20
"""Bytes: ranges of ranks are short, and reading more would hold up the interpreter, and so the
loop."""

Signature = tuple[int, int, int] | None
"""What changes when the file is replaced or written: inode, time, size. None: there is no file."""


def locate(path: str | os.PathLike[str]) -> pathlib.Path:
  """Returns the control file: `path` itself if its name ends in .json, else the one in the run
  directory `path`."""
  path = pathlib.Path(os.path.abspath(path))
  return path if path.suffix == ".json" else path / NAME


def signature(path: pathlib.Path) -> Signature:
  """Returns what differs between two versions of the file, without reading it."""
  try:
    stat = path.stat()
  except OSError:
    return None
  return stat.st_ino, stat.st_mtime_ns, stat.st_size


def read(path: pathlib.Path, ranks: int | None = None) -> ControlRequest:
  """Reads a control file; where there is none, everything is as the pacer was made.

  Raises:
    RequestError: it can't be read, is no JSON, or asks for something that can't be.
  """
  try:
    text = read_bytes(path, _LONGEST).decode("utf-8")
  except FileNotFoundError:
    return ControlRequest()
  except UnreadableError as error:
    raise RequestError(f"it {error}") from error
  except (OSError, UnicodeDecodeError) as error:
    raise RequestError(f"it can't be read: {getattr(error, 'strerror', None) or error}") from error
  try:
    asked: Any = json.loads(text)
  except (ValueError, RecursionError) as error:
    raise RequestError(f"it is not JSON: {error}") from error
  return ControlRequest.from_json(asked, ranks)


def write(path: pathlib.Path, request: ControlRequest) -> None:
  """Replaces the file as a whole: the job reads the old one or the new one, never half of one.

  Raises:
    OSError: it can't be written.
  """
  atomic_write.write_text(path, json.dumps(request.to_json(), indent=1) + "\n")


def note(path: pathlib.Path, step: int, unix_ns: int, request: ControlRequest) -> None:
  """Appends to the note beside the control file what applies from which step on.

  Raises:
    OSError: it can't be written.
  """
  line = json.dumps({"step": step, "unix_ns": unix_ns, "settings": request.to_json()})
  Folder(path.parent).append(APPLIED, line + "\n")


def last_note(path: pathlib.Path) -> tuple[int, ControlRequest] | None:
  """Returns the step of the last note, and what applies from it on; None where there is none."""
  with contextlib.suppress(OSError, ValueError, KeyError, IndexError, TypeError):
    entry = parse(read_end(path.with_name(APPLIED), _LONGEST).splitlines()[-1])
    return int(entry["step"]), ControlRequest.from_json(entry["settings"])
  return None


_LOG = logging.getLogger("jaxpace")
_PATIENCE_SECONDS = 1.0
"""How long an answer is waited for, once: the file system that takes longer is not waited for
again."""


class ControlFileFollower:
  """Reads and writes beside the loop: a file system that hangs holds up this thread alone.

  Its methods may be called from any thread, and come back within a second.
  """

  def __init__(self, path: pathlib.Path, ranks: int):
    """Prepares; the thread starts with the first task. Requests are checked against `ranks` along
    the data axis."""
    self._path, self._ranks = path, ranks
    self._tasks: queue.SimpleQueue[tuple[Callable[[],
                                                  None],
                                         threading.Event] | None] = queue.SimpleQueue()
    self._looking: threading.Event | None = None  # set when the look that was asked for is done
    self._last: threading.Event | None = None
    self._seen: Signature = None
    self._found: ControlRequest | RequestError | None = None
    self._thread = threading.Thread(target=self._work, name="jaxpace-control-file", daemon=True)

  def look(self) -> ControlRequest | RequestError | None:
    """Returns what the file says, or why it can't be followed, if it has changed since the last
    call; else None.

    Where the file system takes long: None, and the answer of this look at a later call.
    """
    if self._looking is None:
      self._looking = self._do(self._read)
      self._looking.wait(_PATIENCE_SECONDS)
    if not self._looking.is_set():
      return None
    self._looking, found, self._found = None, self._found, None
    return found

  def write(self, request: ControlRequest) -> None:
    """Has the file replaced; trouble is a warning. Waits for it, but not long."""

    def replace() -> None:
      try:
        write(self._path, request)
        self._seen = signature(self._path)
      except OSError as error:
        _LOG.warning("%s can't be written, it does not say that a signal switched pacing: %s",
                     self._path, error)

    self._do(replace).wait(_PATIENCE_SECONDS if self._looking is None else 0)

  def note(self, step: int, unix_ns: int, request: ControlRequest) -> None:
    """Has it written down beside the file what applies from which step on, some time soon."""

    def append() -> None:
      try:
        note(self._path, step, unix_ns, request)
      except OSError as error:
        _LOG.debug("It is not noted what applies from step %d on: %s", step, error)

    self._do(append)

  def close(self) -> None:
    """Ends the thread, once what was asked for is done; where that takes long, leaves it."""
    self._tasks.put(None)
    if self._last is not None:
      self._last.wait(_PATIENCE_SECONDS)

  def _do(self, task: Callable[[], None]) -> threading.Event:
    self._last = threading.Event()
    self._tasks.put((task, self._last))
    if self._thread.ident is None:
      self._thread.start()
    return self._last

  def _read(self) -> None:
    now = signature(self._path)
    if now == self._seen:
      return
    self._seen = now
    try:
      self._found = read(self._path, self._ranks)
    except RequestError as error:
      self._found = error
    except Exception as error:  # whatever the file holds, this thread goes on
      self._found = RequestError(f"it can't be read: {type(error).__name__}: {error}")

  def _work(self) -> None:
    while (item := self._tasks.get()) is not None:
      task, done = item
      try:
        task()
      except Exception as error:
        _LOG.debug("The control file", exc_info=error)
      finally:
        done.set()
