"""What a process says of itself, in one short string, and what the others make of hearing it."""

from __future__ import annotations

import contextlib
import json
import threading
import time
from typing import NamedTuple

import msgspec

from jaxpace.hosts import distributed

STACK_CHARACTERS = (3000, 1000)
"""Longest stack that is sent; in a large job. The store lives in process 0, and all processes may
send one at once."""
LARGE_JOB = 64


class Heartbeat(NamedTuple):
  """One process's own account of itself. Ages are by its own clock, so no two clocks are
  compared."""

  process: int
  host: str
  pid: int
  number: int  # counts up: a heartbeat that stays the same is an old one
  entered: int  # steps whose function was called, the one it is in included
  completed: int  # steps known to have completed
  phase: str  # where the loop is: "step", "between steps", "compiling", "data", or a pause's name
  age: float  # s since a step last completed, or a pause ended
  excused: float  # s since it last announced that it would take long; 0 while it does
  waiting: bool  # whether `age` is past its timeout
  stack: str = ""  # of the loop's thread, where it is asked for
  left: bool = False  # whether its loop has ended: this is its last heartbeat
  marks: str = ""  # where its devices are within the step, where that is asked for and known

  def to_text(self) -> str:
    """Returns it as one line of JSON."""
    return json.dumps(self)

  @staticmethod
  def from_text(text: str) -> Heartbeat | None:
    """Reads `to_text`; None for anything else."""
    try:
      return msgspec.convert(json.loads(text), Heartbeat)
    except ValueError:
      return None


class LastHeartbeat(NamedTuple):
  """A process's last heartbeat and how long, by the listener's clock, none has followed."""

  heartbeat: Heartbeat
  silence: float  # s
  # whether its loop has ended, as it says or because it is gone: it is not watched any more
  left: bool = False


Heard = dict[int, tuple[Heartbeat, float, bool]]
"""Of every process that ever published one its last heartbeat; since when that has been the same,
s by the listener's clock; and whether its loop has ended."""


def hear(heard: Heard, heartbeats: list[Heartbeat], now: float) -> Heard:
  """Takes in everything that is in the store at the moment: a process heard before that is not in
  it has left, as has one that says so."""
  after = {process: (one, since, True) for process, (one, since, _) in heard.items()}
  for one in heartbeats:
    known, since, _ = heard.get(one.process, (None, now, False))
    if known is None or (known.number, known.pid) != (one.number, one.pid):
      known, since = one, now
    after[one.process] = known, since, one.left
  return after


_CLOSE_SECONDS = 1.0


class StoreThread:
  """Carries this process's heartbeat to the store and the others' from there, so that nobody else
  waits for the store. Methods may be called from any thread.

  A call to the store can't be given a time limit, and where process 0 is stopped it returns only
  when that goes on. Then this thread waits, and the watchdog sees that it does.
  """

  def __init__(self, name: str, process: int, stale: str | None = None):
    """Prepares; `name` is the keys' directory, the same in every process, and `stale` that of an
    earlier watchdog, from which this process's last heartbeat may go."""
    self._name, self._process, self._stale = name, process, stale
    self._lock = threading.Lock()
    self._wanted = threading.Event()
    self._heartbeat: Heartbeat | None = None
    self._read = False
    self._last: Heartbeat | None = None  # to be left behind, once it is over
    self._heard: Heard = {}
    self._began: float | None = None  # when the call under way began
    self._thread = threading.Thread(target=self._run, name="jaxpace-watchdog-courier", daemon=True)
    self.reads = 0

  def start(self) -> None:
    """Starts the thread."""
    self._thread.start()

  def carry(self, heartbeat: Heartbeat, read: bool) -> None:
    """Has a heartbeat published, and the others' fetched if `read`. Does not wait."""
    with self._lock:
      self._heartbeat, self._read = heartbeat, self._read or read
    self._wanted.set()

  def last_heartbeats(self) -> dict[int, LastHeartbeat]:
    """Returns the last heartbeat of every process that was heard of."""
    with self._lock:
      now, heard = time.monotonic(), self._heard
    return {process: LastHeartbeat(heartbeat, now - since, left)
            for process, (heartbeat, since, left) in heard.items()}

  def stuck(self) -> float:
    """Returns for how long the store has not answered, in seconds; 0 while it does."""
    with self._lock:
      return 0.0 if self._began is None else time.monotonic() - self._began

  def close(self, last: Heartbeat) -> None:
    """Leaves a last heartbeat behind and ends the thread; where the store does not answer, leaves
    both as they are.

    The others know this process's newest step from it alone: the one before may be half a second,
    and many steps, old.
    """
    self._last = last
    self._wanted.set()
    self._thread.join(_CLOSE_SECONDS)

  def _run(self) -> None:
    if self._stale is not None:
      with contextlib.suppress(Exception):
        distributed.key_value_delete(f"{self._stale}/{self._process}")
    while self._last is None:
      self._wanted.wait()
      self._wanted.clear()
      with self._lock:
        heartbeat, read, self._heartbeat, self._read = self._heartbeat, self._read, None, False
      if heartbeat is not None and self._last is None:
        self._trip(heartbeat, read)
    with contextlib.suppress(Exception):  # the job may have ended
      self._publish(self._last)

  def _publish(self, heartbeat: Heartbeat) -> None:
    distributed.key_value_set(f"{self._name}/{self._process}", heartbeat.to_text(), overwrite=True)

  def _trip(self, heartbeat: Heartbeat, read: bool) -> None:
    with self._lock:
      self._began = time.monotonic()
    try:
      self._publish(heartbeat)
      texts = distributed.key_value_directory(self._name).values() if read else None
    except Exception:  # the job may have ended
      texts = None
    with self._lock:
      self._began = None
      if texts is not None:
        self._heard = hear(self._heard, [one for text in texts
                                         if (one := Heartbeat.from_text(text)) is not None],
                           time.monotonic())
        self.reads += 1
