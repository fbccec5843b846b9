"""Numbered messages from process 0 to all, sent and read ahead of their use: so all apply a thing
at one step.

Process 0 says what applies from a step on well before that step; the others begin to read it then.
At the step itself each asks for the message, which is there already, or waits for it: none can be
late.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import itertools
import queue
import threading
from collections.abc import Callable

from jaxpace.hosts.distributed.client import process_count, process_index
from jaxpace.hosts.distributed.store import (
  key_value_delete,
  key_value_directory,
  key_value_get,
  key_value_set,
)

KEPT = 8
"""Messages that stay readable. A process that lags more behind gets the newest one instead."""
_SLICE_SECONDS = 0.5  # a longer wait would keep the thread from ending
_SLICES_A_LOOK = 10  # of so many waits one is followed by a look at which messages there are
_CLOSE_SECONDS = 5.0

_Answer = concurrent.futures.Future[tuple[int, str]]


class Announcements:
  """Messages by number. A thread talks to the coordination service; it touches no device.

  `say`, `expect`, `take` and `close` belong to one thread, that of the training loop, and only
  `take` waits.
  """

  def __init__(self, name: str):
    """Prepares; the thread starts with the first message.

    Args:
      name: directory of the messages, the same in every process, and in a job used once.
    """
    self.name = f"jaxpace/{name}"
    self._answers: dict[int, _Answer] = {}
    self._tasks: queue.SimpleQueue[tuple[_Answer,
                                         Callable[[],
                                                  tuple[int, str]]] | None] = queue.SimpleQueue()
    self._closing = threading.Event()
    self._thread = threading.Thread(target=self._work, name=f"jaxpace-{name}", daemon=True)

  def say(self, number: int, make: Callable[[], str]) -> None:
    """On process 0: makes a message known, some time soon. `make()` is called by the thread."""

    def send() -> tuple[int, str]:
      text = make()
      if process_count() > 1:
        key_value_set(self.key(number), text, overwrite=True)
        if number >= KEPT:
          key_value_delete(self.key(number - KEPT))
      return number, text

    self._submit(number, send)

  def expect(self, number: int) -> None:
    """On the other processes: begins to read a message, without waiting for it. One that is gone:
    the newest."""

    def receive() -> tuple[int, str]:
      for tries in itertools.count(1):
        if self._closing.is_set():
          break
        with contextlib.suppress(TimeoutError):
          text = key_value_get(self.key(number), _SLICE_SECONDS)
          assert text is not None, "who is alone says it"
          return number, text
        if (tries % _SLICES_A_LOOK == 0 and (newer := self._newest()) is not None
            and newer[0] > number):
          return newer
      raise ConnectionError("closed meanwhile")

    self._submit(number, receive)

  def take(self, number: int, timeout: float) -> tuple[int, str]:
    """Returns a message that was said or expected, once, with its number; waits for it if it has
    not come.

    Args:
      number: which. Where that is gone by now it is a later one.
      timeout: longest wait in seconds; 0 only looks. After a time-out it may be asked for again.

    Raises:
      TimeoutError: it didn't come in time.
      ConnectionError: it can't come: process 0 is gone, or could not make it.
    """
    answer = self._answers[number]
    if not answer.done() and timeout > 0:
      concurrent.futures.wait([answer], timeout)
    if not answer.done():
      raise TimeoutError(
          f"process {process_index()} waited {timeout:g} s for {self.key(number)} of process 0")
    del self._answers[number]
    error = answer.exception()
    if error is None or isinstance(error, ConnectionError):
      return answer.result()
    raise ConnectionError(f"{self.key(number)}: {type(error).__name__}: {error}") from error

  def close(self) -> None:
    """Ends the thread."""
    self._closing.set()
    self._tasks.put(None)
    if self._thread.is_alive():
      self._thread.join(_CLOSE_SECONDS)

  def key(self, number: int) -> str:
    """Where the coordination service keeps a message."""
    return f"{self.name}/{number}"

  def _newest(self) -> tuple[int, str] | None:
    """The last message that the service keeps."""
    kept = {key.rpartition("/")[2]: text for key, text in key_value_directory(self.name).items()}
    numbers = [int(number) for number in kept if number.isdecimal()]
    return (max(numbers), kept[str(max(numbers))]) if numbers else None

  def _submit(self, number: int, task: Callable[[], tuple[int, str]]) -> None:
    answer: _Answer = concurrent.futures.Future()
    self._answers[number] = answer
    self._tasks.put((answer, task))
    if self._thread.ident is None:
      self._thread.start()

  def _work(self) -> None:
    while (item := self._tasks.get()) is not None:
      answer, task = item
      try:
        answer.set_result(task())
      except Exception as error:  # Told to whoever asks for this message.
        answer.set_exception(error)
