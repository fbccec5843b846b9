"""The control file of a run, the note of what was applied when, and how process 0 follows them."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import pathlib
import queue
import threading
from typing import Any

from jaxpace.files.folders import Folder
from jaxpace.files.reading import UnreadableError, parse, read_bytes, read_end
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
  Folder(path.parent).write_text(path.name, json.dumps(request.to_json(), indent=1) + "\n")


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
"""How long the first look is waited for, and the thread at the end: a file system may hang."""


class ControlFileFollower:
  """Process 0's part: says what the file asks for. Reads and writes beside the loop: a file system
  that hangs holds up this thread alone."""

  def __init__(self, path: pathlib.Path, ranks: int, every_seconds: float):
    """Begins to follow the file.

    Args:
      path: the file.
      ranks: along the data axis; requests are checked against them.
      every_seconds: from one look to the next.
    """
    self._path, self._ranks, self._every_seconds = path, ranks, every_seconds
    self._applied = 0, ControlRequest()
    self._seen: Signature = None
    self._notes: queue.SimpleQueue[tuple[int, int, ControlRequest]] = queue.SimpleQueue()
    self._looked, self._closing = threading.Event(), threading.Event()
    self._thread = threading.Thread(target=self._work, name="jaxpace-control-file", daemon=True)
    self._thread.start()

  def applied(self) -> list[Any]:
    """Says what applies now, as JSON values: a version, 0 for settings as made and counted up with
    every change, and the request."""
    self._looked.wait(_PATIENCE_SECONDS)
    version, request = self._applied
    return [version, request.to_json()]

  def note(self, step: int, unix_ns: int, request: ControlRequest) -> None:
    """Has it written down beside the file what applies from which step on, some time soon."""
    self._notes.put((step, unix_ns, request))

  def close(self) -> None:
    """Ends the thread, once all is noted; where that takes long, leaves it."""
    self._closing.set()
    self._thread.join(_PATIENCE_SECONDS)

  def _work(self) -> None:
    over = False
    while not over:
      self._look()
      self._looked.set()
      over = self._closing.wait(self._every_seconds)
      while not self._notes.empty():
        step, unix_ns, request = self._notes.get()
        try:
          note(self._path, step, unix_ns, request)
        except OSError as error:
          _LOG.debug("It is not noted what applies from step %d on: %s", step, error)

  def _look(self) -> None:
    """Takes in what the file says, if it has changed; one that can't be followed changes
    nothing."""
    version, request = self._applied
    try:
      now = signature(self._path)
      if now == self._seen:
        return
      self._seen = now
      asked = read(self._path, self._ranks)
      if asked != request:
        self._applied = version + 1, asked
    except Exception as error:  # whatever the file holds, this thread goes on
      why = error if isinstance(error, RequestError) else (
          f"it can't be read: {type(error).__name__}: {error}")
      _LOG.warning("%s is not followed: %s. Pacing stays as it is: %s.", self._path, why, request)
