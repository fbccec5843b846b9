"""The control file of a run, the note of what was applied when, and how process 0 follows them."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import os
import pathlib
import queue
import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

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
"""How long an answer is waited for, once: the file system that takes longer is not waited for
again."""


class Toggle:
  """Counts arrivals of a signal; whoever listened to it before still does. `install` and `restore`:
  main thread."""

  def __init__(self, number: int | None):
    """Prepares; `number` is the signal, None for none."""
    self._number, self._installed = number, False
    self._before: Any = None
    self._pressed = self._seen = 0

  def install(self) -> None:
    """Begins to count; a warning where that can't be, outside of the main thread."""
    if self._number is None:
      return
    if threading.current_thread() is threading.main_thread():
      self._before = signal.signal(self._number, self._on_signal)
      self._installed = True
    else:
      _LOG.warning(
          "jaxpace.Control runs outside the main thread: signal %d does not switch pacing.",
          self._number)

  def restore(self) -> None:
    """Gives the signal back, unless someone else has taken it since."""
    if (self._number is None or not self._installed
        or threading.current_thread() is not threading.main_thread()):
      return
    if signal.getsignal(self._number) == self._on_signal:
      signal.signal(self._number, signal.SIG_DFL if self._before is None else self._before)
    self._installed = False

  def turned(self) -> bool:
    """Whether the signal has come an odd number of times since the last call. For one thread."""
    pressed = self._pressed
    odd = (pressed - self._seen) % 2 == 1
    self._seen = pressed
    return odd

  def _on_signal(self, number: int, frame: FrameType | None) -> None:
    self._pressed += 1
    if callable(self._before):
      self._before(number, frame)


class ControlFileFollower:
  """Process 0's part: says what the file and a signal ask for. Reads and writes beside the loop: a
  file system that hangs holds up this thread alone.

  Its methods may be called from any thread, `applied` from one, and come back within a second.
  """

  def __init__(self, path: pathlib.Path, ranks: int, toggle: Toggle):
    """Prepares; the thread starts with the first task. Requests are checked against `ranks` along
    the data axis."""
    self._path, self._ranks, self._toggle = path, ranks, toggle
    self._request, self._version = ControlRequest(), 0
    self._tasks: queue.SimpleQueue[tuple[Callable[[],
                                                  None],
                                         threading.Event] | None] = queue.SimpleQueue()
    self._looking: threading.Event | None = None  # set when the look that was asked for is done
    self._last: threading.Event | None = None
    self._seen: Signature = None
    self._found: ControlRequest | RequestError | None = None
    self._thread = threading.Thread(target=self._work, name="jaxpace-control-file", daemon=True)

  def applied(self) -> list[Any]:
    """Says what applies now, as JSON values: a version, 0 for settings as made and counted up with
    every change, and the request."""
    found = self.look()
    if isinstance(found, RequestError):
      _LOG.warning("%s is not followed: %s. Pacing stays as it is: %s.", self._path, found,
                   self._request)
    elif found is not None:
      self._change(found)
    if self._toggle.turned():
      self._change(dataclasses.replace(self._request, enabled=not self._request.enabled))
      self.write(self._request)
    return [self._version, self._request.to_json()]

  def _change(self, request: ControlRequest) -> None:
    if request != self._request:
      self._request = request
      self._version += 1

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
