"""The threads beside the loop: process 0's says what applies from a round on, the others' hear it."""

from __future__ import annotations

import contextlib
import json
import logging
import queue
import signal
import threading
from types import FrameType
from typing import Any, NamedTuple

from jaxpace import distributed
from jaxpace.control.request import Request

_LOG = logging.getLogger("jaxpace")
_SLICE_SECONDS = 1.0  # a longer wait would keep the thread from ending
_CLOSE_SECONDS = 5.0


class Message(NamedTuple):
  """What process 0 says about a round."""

  next_call: int  # the call of the loop that is the next round
  version: int  # 0 for settings as made, counted up with every change
  request: Request  # what applies from this round on

  def to_text(self) -> str:
    return json.dumps([self.next_call, self.version, self.request.to_json()])

  @staticmethod
  def from_text(text: str) -> Message:
    next_call, version, request = json.loads(text)
    return Message(next_call, version, Request.from_json(request))


class Listener:
  """Answers the loop's questions, one a round. `ask`, `answer`, `start` and `close` belong to the loop's thread."""

  def __init__(self, name: str, toggle_signal: int | None):
    """Prepares; `name` is the keys' directory, the same in every process."""
    self.name = name
    self.ranks: int | None = None
    self._signal, self._handled = toggle_signal, False
    self._before: Any = None
    self.toggled = False
    self._questions: queue.SimpleQueue[tuple[int, int] | None] = queue.SimpleQueue()
    self._answers: dict[int, Message] = {}
    self._changed = threading.Condition()
    self._failure: str | None = None
    self._closing = threading.Event()
    self._thread = threading.Thread(target=self._run, name="jaxpace-control", daemon=True)

  def start(self) -> None:
    if self._signal is not None:
      if threading.current_thread() is threading.main_thread():
        self._before = signal.signal(self._signal, self._on_signal)
        self._handled = True
      else:
        _LOG.warning("jaxpace.Control runs outside the main thread: signal %d does not switch pacing.", self._signal)
    self._thread.start()

  def ask(self, number: int, next_call: int) -> None:
    """Asks what applies from a round on; `next_call` is process 0's choice of the round after."""
    self._questions.put((number, next_call))

  def answer(self, number: int, timeout: float) -> Message:
    """Returns the answer, waiting for it.

    Raises:
      TimeoutError: it did not come.
      ConnectionError: it can't come any more.
    """
    with self._changed:
      if not self._changed.wait_for(lambda: number in self._answers or self._failure, timeout):
        raise TimeoutError(f"process 0 has not said within {timeout:g} s what applies")
      if number not in self._answers:
        raise ConnectionError(self._failure)
      return self._answers.pop(number)

  def close(self) -> None:
    """Ends the thread and gives the signal back."""
    self._closing.set()
    self._questions.put(None)
    if self._thread.is_alive():
      self._thread.join(_CLOSE_SECONDS)
    if self._signal is not None and self._handled and threading.current_thread() is threading.main_thread():
      if signal.getsignal(self._signal) == self._on_signal:
        signal.signal(self._signal, signal.SIG_DFL if self._before is None else self._before)
      self._handled = False

  def key(self, number: int) -> str:
    return f"{self.name}/{number}"

  def _on_signal(self, number: int, frame: FrameType | None) -> None:
    self.toggled = True
    if callable(self._before):
      self._before(number, frame)

  def _answered(self, number: int, message: Message) -> None:
    with self._changed:
      self._answers[number] = message
      self._changed.notify_all()

  def _run(self) -> None:
    try:
      self._listen()
    except Exception as error:
      with self._changed:
        self._failure = f"{type(error).__name__}: {error}"
        self._changed.notify_all()

  def _listen(self) -> None:
    raise NotImplementedError


class Follower(Listener):
  """Every process but 0."""

  def _listen(self) -> None:
    while not self._closing.is_set():
      question = self._questions.get()
      while question is not None and not self._closing.is_set():
        with contextlib.suppress(TimeoutError):
          text = distributed.key_value_get(self.key(question[0]), _SLICE_SECONDS)
          assert text is not None
          self._answered(question[0], Message.from_text(text))
          break
