"""What a process says of itself, in one short string, and what the others make of hearing it."""

from __future__ import annotations

import json
from typing import NamedTuple

STACK_CHARACTERS = 3000
"""Longest stack that is sent: the store lives in process 0, and all processes may send one at
once."""
STACK_CHARACTERS_IN_LARGE_JOBS = 1000
LARGE_JOB = 64


class Heartbeat(NamedTuple):
  """One process's own account of itself. Ages are by its own clock, so no two clocks are
  compared."""

  process: int
  host: str
  pid: int
  number: int  # counts up: a word that stays the same is an old one
  entered: int  # steps whose function was called, the one it is in included
  completed: int  # steps known to have completed
  phase: str  # where the loop is: "step", "between steps", "compiling", "data", or a pause's name
  age: float  # s since a step last completed, or a pause ended
  excused: float  # s since it last announced that it would take long; 0 while it does
  waiting: bool  # whether `age` is past its timeout
  stack: str = ""  # of the loop's thread, where it is asked for
  left: bool = False  # whether its loop has ended: this is its last word
  marks: str = ""  # where its devices are within the step, where that is asked for and known

  def to_text(self) -> str:
    """Returns it as one line of JSON."""
    return json.dumps(self)

  @staticmethod
  def from_text(text: str) -> Heartbeat | None:
    """Reads `to_text`; None for anything else."""
    try:
      heartbeat = Heartbeat(*json.loads(text))
    except (TypeError, ValueError):
      return None
    numbers = (heartbeat.process, heartbeat.pid, heartbeat.number, heartbeat.entered,
               heartbeat.completed, heartbeat.age, heartbeat.excused)
    texts = (heartbeat.host, heartbeat.phase, heartbeat.stack, heartbeat.marks)
    well_formed = (all(isinstance(n, int | float) for n in numbers)
                   and all(isinstance(t, str) for t in texts))
    return heartbeat if well_formed else None


class LastHeartbeat(NamedTuple):
  """A process's last word and how long, by the listener's clock, nothing new has come from it."""

  heartbeat: Heartbeat
  silence: float  # s
  # whether its loop has ended, by its last word or because that is gone: it is not watched any more
  left: bool = False


class Membership:
  """Remembers the words heard and since when they have been the same. No I/O; `now` is the
  listener's clock."""

  def __init__(self) -> None:
    self._heartbeats: dict[int, Heartbeat] = {}
    self._since: dict[int, float] = {}
    self._left: set[int] = set()

  def update(self, heartbeats: list[Heartbeat], now: float) -> None:
    """Takes in everything that is in the store at the moment.

    Args:
      words: all of them; a process heard before that is not among them has left, as has one that
        says so.
      now: seconds.
    """
    for heartbeat in heartbeats:
      known = self._heartbeats.get(heartbeat.process)
      if known is None or (known.number, known.pid) != (heartbeat.number, heartbeat.pid):
        self._heartbeats[heartbeat.process], self._since[heartbeat.process] = heartbeat, now
    self._left = (set(self._heartbeats)
                  - {heartbeat.process for heartbeat in heartbeats if not heartbeat.left})

  def last_heartbeats(self, now: float) -> dict[int, LastHeartbeat]:
    """Returns the last word of every process that ever said one."""
    return {process: LastHeartbeat(heartbeat, now - self._since[process], process in self._left)
            for process, heartbeat in self._heartbeats.items()}
