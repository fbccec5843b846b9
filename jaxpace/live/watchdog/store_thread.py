"""The thread that talks to the key-value store, so that nobody else waits for it.

A call to the store can't be given a time limit, and where process 0 is stopped it returns only when
that goes on. Then this thread waits, and the watchdog sees that it does.
"""

from __future__ import annotations

import contextlib
import threading
import time

from jaxpace.hosts import distributed
from jaxpace.live.watchdog.heartbeat import Heartbeat, LastHeartbeat, Membership

_CLOSE_SECONDS = 1.0


class StoreThread:
  """Carries this process's word to the store and the others' from there. Methods may be called from
  any thread."""

  def __init__(self, name: str, process: int, stale: str | None = None):
    """Prepares.

    Args:
      name: the keys' directory, the same in every process.
      process: this process's index.
      stale: directory of an earlier watchdog, from which this process's last word may go.
    """
    self._name, self._process, self._stale = name, process, stale
    self._lock = threading.Lock()
    self._wanted = threading.Event()
    self._heartbeat: Heartbeat | None = None
    self._read = False
    self._last: Heartbeat | None = None  # to be left behind
    self._membership = Membership()
    self._began: float | None = None  # when the call under way began
    self._closing = False
    self._ended = threading.Event()
    self._thread = threading.Thread(target=self._run, name="jaxpace-watchdog-courier", daemon=True)
    self.failure: str | None = None
    self.reads = 0

  def start(self) -> None:
    """Starts the thread."""
    self._thread.start()

  def carry(self, heartbeat: Heartbeat, read: bool) -> None:
    """Has a word published, and the others' fetched if `read`. Does not wait."""
    with self._lock:
      self._heartbeat, self._read = heartbeat, self._read or read
    self._wanted.set()

  def last_heartbeats(self) -> dict[int, LastHeartbeat]:
    """Returns the last word of every process that was heard of."""
    with self._lock:
      return self._membership.last_heartbeats(time.monotonic())

  def stuck(self) -> float:
    """Returns for how long the store has not answered, in seconds; 0 while it does."""
    with self._lock:
      return 0.0 if self._began is None else time.monotonic() - self._began

  def close(self, last: Heartbeat) -> None:
    """Leaves a last word behind and ends the thread; where the store does not answer, leaves them
    as they are.

    The others know this process's newest step from it alone: its word before may be half a second,
    and many steps, old.
    """
    self._last = last
    self._closing = True
    self._wanted.set()
    if self._thread.is_alive():
      self._ended.wait(_CLOSE_SECONDS)

  def _run(self) -> None:
    try:
      if self._stale is not None:
        with contextlib.suppress(Exception):
          distributed.key_value_delete(f"{self._stale}/{self._process}")
      while not self._closing:
        self._wanted.wait()
        self._wanted.clear()
        with self._lock:
          heartbeat, read, self._heartbeat, self._read = self._heartbeat, self._read, None, False
        if heartbeat is not None and not self._closing:
          self._trip(heartbeat, read)
      if self._last is not None:
        with contextlib.suppress(Exception):  # the job may have ended
          distributed.key_value_set(f"{self._name}/{self._process}", self._last.to_text(),
                                    overwrite=True)
    finally:
      self._ended.set()

  def _trip(self, heartbeat: Heartbeat, read: bool) -> None:
    with self._lock:
      self._began = time.monotonic()
    try:
      distributed.key_value_set(f"{self._name}/{self._process}", heartbeat.to_text(),
                                overwrite=True)
      texts = distributed.key_value_directory(self._name).values() if read else None
      self.failure = None
    except Exception as error:
      texts, self.failure = None, f"{type(error).__name__}: {error}"
    with self._lock:
      self._began = None
      if texts is not None:
        self._membership.update([one for text in texts
                                 if (one := Heartbeat.from_text(text)) is not None],
                                time.monotonic())
        self.reads += 1
