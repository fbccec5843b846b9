"""The control file, looked at in a thread of its own: a file system that hangs holds up that thread
and nobody else."""

from __future__ import annotations

import logging
import pathlib
import queue
import threading
from collections.abc import Callable

from jaxpace.live.control import file
from jaxpace.live.control.request import ControlRequest, RequestError

_LOG = logging.getLogger("jaxpace")
_PATIENCE_SECONDS = 1.0
"""How long an answer is waited for, once: the file system that takes longer is not waited for
again."""


class ControlFileFollower:
  """Reads and writes beside the loop. Its methods may be called from any thread, and come back
  within a second."""

  def __init__(self, path: pathlib.Path, ranks: int):
    """Prepares; the thread starts with the first task. Requests are checked against `ranks` along
    the data axis."""
    self._path, self._ranks = path, ranks
    self._tasks: queue.SimpleQueue[tuple[Callable[[],
                                                  None],
                                         threading.Event] | None] = queue.SimpleQueue()
    self._looking: threading.Event | None = None  # set when the look that was asked for is done
    self._last: threading.Event | None = None
    self._seen: file.Signature = None
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
        file.write(self._path, request)
        self._seen = file.signature(self._path)
      except OSError as error:
        _LOG.warning("%s can't be written, it does not say that a signal switched pacing: %s",
                     self._path, error)

    self._do(replace).wait(_PATIENCE_SECONDS if self._looking is None else 0)

  def note(self, step: int, unix_ns: int, request: ControlRequest) -> None:
    """Has it written down beside the file what applies from which step on, some time soon."""

    def append() -> None:
      try:
        file.note(self._path, step, unix_ns, request)
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
    now = file.signature(self._path)
    if now == self._seen:
      return
    self._seen = now
    try:
      self._found = file.read(self._path, self._ranks)
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
