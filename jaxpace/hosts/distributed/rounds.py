"""Process 0 announces, all apply at one step: rounds of a loop whose turns every process counts
alike."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Any, Generic, NamedTuple, TypeVar

from jaxpace.hosts.distributed.announcements import Announcements

NEVER = 1 << 62
"""A turn that doesn't come."""
_RETRY_SECONDS = 5.0
"""Before a message that could not be read is asked for again."""

T = TypeVar("T")
Propose = Callable[[int], tuple[int, Callable[[], Any]]]
"""Takes the turn at which a round begins; returns the one at which the next does, and what makes
the JSON value that applies in between. The former is called by the loop, the latter by the thread
of the announcements, soon."""


class Round(NamedTuple, Generic[T]):
  """What process 0 said of a round."""

  first: int  # turn from which on it applies
  until: int  # turn at which the next one begins
  said: T
  again: bool  # whether nothing was heard of process 0 for a time


class NotHeard(Exception):
  """What applies from a turn on did not come in time, or can't come. Raised once, until process 0
  is heard of again."""


class Rounds(Generic[T]):
  """Each round's beginning is known before: process 0 says, in the round before, what applies and
  how long.

  So no process is late, unless it hears nothing: then it waits, and goes on without. It joins in
  again at whatever round it hears of next.
  """

  def __init__(self, name: str, *, first: int, timeout: float, ahead: float,
               read: Callable[[Any], T], propose: Propose | None):
    """Prepares; see `Announcements` for `name`.

    Args:
      name: of the messages, the same in every process, and in a job used once.
      first: turn at which the first round begins, the same in every process.
      timeout: s, longest wait for process 0 at a round.
      ahead: share of a round by which the next one is said before it begins; 1 says it one turn
        after this one began.
      read: takes the JSON value that was said; a TypeError or ValueError is as if it could not be
        heard.
      propose: on process 0, which says what applies; None on the others.
    """
    self._messages = Announcements(name)
    self._timeout, self._ahead, self._read, self._propose = timeout, ahead, read, propose
    self._ask_at, self._begins = 0, first
    self._late = False  # whether a round's message did not come in time, and is waited for no more
    self._retry_at = 0.0
    self.number = 0
    """Of the round that begins next."""
    self.wake = 0
    """Turn before which `at` has nothing to do."""

  def at(self, turn: int) -> Round[T] | None:
    """Returns the round that begins at this turn, None where none does. To be called at `wake`, or
    at every turn.

    Raises:
      NotHeard: there should be one. What applied before still does; further calls look for it and
        don't wait.
    """
    try:
      if turn >= self._ask_at:
        self._ask_at = NEVER
        self._ask(max(self._begins, turn))
      return self._take(turn) if turn >= self._begins else None
    finally:
      self.wake = min(self._ask_at, self._begins)

  def key(self, number: int) -> str:
    """Where the coordination service keeps what was said of a round."""
    return self._messages.key(number)

  def close(self) -> None:
    """Ends the talk with the other processes."""
    self._messages.close()

  def _ask(self, begins: int) -> None:
    """Has the message of the next round made, or read."""
    if self._propose is None:
      self._messages.expect(self.number)
      return
    until, make = self._propose(begins)
    self._messages.say(self.number, lambda: json.dumps([begins, until, make()]))

  def _take(self, turn: int) -> Round[T] | None:
    if time.monotonic() < self._retry_at:
      return None
    try:
      number, text = self._messages.take(self.number, 0.0 if self._late else self._timeout)
      first, until, said = json.loads(text)
      found = Round(first, until, self._read(said), self._late and until > turn)
      # Behind the others: what comes next was said already, and is asked for at once.
      ask_at = max(turn + int((1 - self._ahead) * (until - turn)), turn + 1)
    except (TimeoutError, ConnectionError, ValueError, TypeError) as error:
      if not isinstance(error, TimeoutError):
        self._retry_at = time.monotonic() + _RETRY_SECONDS
        self._ask_at = self._begins = turn + 1
      if self._late:
        return None
      self._late = True
      raise NotHeard(str(error)) from error
    self.number, self._begins, self._ask_at, self._late = number + 1, until, ask_at, until <= turn
    return found
