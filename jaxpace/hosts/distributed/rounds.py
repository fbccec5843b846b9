"""Process 0 announces, all apply at one step: rounds of a loop whose turns every process counts
alike."""

from __future__ import annotations

import concurrent.futures
import contextlib
import itertools
import json
import queue
import threading
import time
from collections.abc import Callable
from typing import Any, NamedTuple

from jaxpace.hosts.distributed.client import (
  key_value_delete,
  key_value_directory,
  key_value_get,
  key_value_set,
  process_count,
  process_index,
)

KEPT = 8
"""Messages that stay readable. A process that lags more behind gets the newest one instead."""
_SLICE_SECONDS = 0.5  # a longer wait would keep the thread from ending
_SLICES_A_LOOK = 10  # of so many waits one is followed by a look at which messages there are
_CLOSE_SECONDS = 5.0

NEVER = 1 << 62
"""A turn that doesn't come."""
_RETRY_SECONDS = 5.0
"""Before a message that could not be read is asked for again."""

Propose = Callable[[int], tuple[int, Callable[[], Any]]]
"""Takes the turn at which a round begins; returns the one at which the next does, and what makes
the JSON value that applies in between. The former is called by the loop, the latter by the thread
that talks to the coordination service, soon."""
_Message = tuple[int, str]
"""Its round's number, and what process 0 said."""


class Round(NamedTuple):
  """What process 0 said of a round."""

  first: int  # turn from which on it applies
  until: int  # turn at which the next one begins
  said: Any
  again: bool  # whether nothing was heard of process 0 for a time


class Rounds:
  """Each round's beginning is known before: process 0 says, half a round before, what applies and
  how long. The first round begins at turn 0.

  So no process is late, unless it hears nothing: then it waits, and goes on without. It joins in
  again at whatever round it hears of next.

  A thread talks to the coordination service, ahead of need; it touches no device. The methods
  belong to one thread, that of the training loop, and only `at` waits.
  """

  def __init__(self, name: str, *, timeout: float, read: Callable[[Any], Any],
               propose: Propose | None):
    """Prepares; the thread starts with the first message.

    Args:
      name: directory of the messages, the same in every process, and in a job used once.
      timeout: s, longest wait for process 0 at a round.
      read: takes the JSON value that was said; a TypeError or ValueError is as if it could not be
        heard.
      propose: on process 0, which says what applies; None on the others.
    """
    self.name = f"jaxpace/{name}"
    self._timeout, self._read, self._propose = timeout, read, propose
    self._answer: concurrent.futures.Future[_Message] = concurrent.futures.Future()
    self._tasks: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
    self._closing = threading.Event()
    self._thread = threading.Thread(target=self._work, name=f"jaxpace-{name}", daemon=True)
    self._ask_at = self._begins = 0
    self._late = False  # whether a round's message did not come in time, and is waited for no more
    self._retry_at = 0.0
    self.number = 0
    """Of the round that begins next."""
    self.wake = 0
    """Turn before which `at` has nothing to do."""

  def at(self, turn: int) -> Round | None:
    """Returns the round that begins at this turn, None where none does. To be called at `wake`, or
    at every turn.

    Raises:
      ConnectionError: there should be one, and it did not come in time, or can't come. Raised once,
        until process 0 is heard of again: what applied before still does; further calls look for
        it and don't wait.
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
    return f"{self.name}/{number}"

  def close(self) -> None:
    """Ends the talk with the other processes."""
    self._closing.set()
    self._tasks.put(None)
    if self._thread.is_alive():
      self._thread.join(_CLOSE_SECONDS)

  def _ask(self, begins: int) -> None:
    """Has the message of the next round made, or read, by the thread."""
    number, answer = self.number, concurrent.futures.Future[_Message]()
    self._answer = answer
    if self._propose is None:
      def task() -> _Message:
        return self._heard(number)
    else:
      until, make = self._propose(begins)

      def task() -> _Message:
        return self._said(number, json.dumps([begins, until, make()]))

    def answers() -> None:
      try:
        answer.set_result(task())
      except Exception as error:  # raised where the round begins
        answer.set_exception(error)

    self._tasks.put(answers)
    if self._thread.ident is None:
      self._thread.start()

  def _work(self) -> None:
    while (task := self._tasks.get()) is not None:
      task()

  def _said(self, number: int, text: str) -> _Message:
    """On process 0: makes a message known."""
    if process_count() > 1:
      key_value_set(self.key(number), text, overwrite=True)
      if number >= KEPT:
        key_value_delete(self.key(number - KEPT))
    return number, text

  def _heard(self, number: int) -> _Message:
    """On the other processes: reads a message, once it is there; where it is gone, the newest."""
    for tries in itertools.count(1):
      if self._closing.is_set():
        break
      with contextlib.suppress(TimeoutError):
        text = key_value_get(self.key(number), _SLICE_SECONDS)
        assert text is not None, "who is alone says it"
        return number, text
      if tries % _SLICES_A_LOOK == 0:
        kept = {int(key.rpartition("/")[2]): text
                for key, text in key_value_directory(self.name).items()
                if key.rpartition("/")[2].isdecimal()}
        if (newest := max(kept, default=number)) > number:
          return newest, kept[newest]
    raise ConnectionError("closed meanwhile")

  def _message(self) -> _Message:
    """The message that was asked for, as soon as it is there.

    Raises:
      TimeoutError: it didn't come in time.
      ConnectionError: it can't come: process 0 is gone, or could not make it.
    """
    timeout = 0.0 if self._late else self._timeout
    concurrent.futures.wait([self._answer], timeout)
    if not self._answer.done():
      raise TimeoutError(f"process {process_index()} waited {timeout:g} s for "
                         f"{self.key(self.number)} of process 0")
    error = self._answer.exception()
    if error is None or isinstance(error, ConnectionError):
      return self._answer.result()
    raise ConnectionError(f"{self.key(self.number)}: {type(error).__name__}: {error}") from error

  def _take(self, turn: int) -> Round | None:
    if time.monotonic() < self._retry_at:
      return None
    try:
      number, text = self._message()
      first, until, said = json.loads(text)
      found = Round(first, until, self._read(said), self._late and until > turn)
      # Behind the others: what comes next was said already, and is asked for at once.
      ask_at = max(turn + (until - turn) // 2, turn + 1)
    except (TimeoutError, ConnectionError, ValueError, TypeError) as error:
      if not isinstance(error, TimeoutError):
        self._retry_at = time.monotonic() + _RETRY_SECONDS
        self._ask_at = self._begins = turn + 1
      if self._late:
        return None
      self._late = True
      raise ConnectionError(str(error)) from error
    self.number, self._begins, self._ask_at, self._late = number + 1, until, ask_at, until <= turn
    return found
