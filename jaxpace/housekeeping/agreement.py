"""All processes take up a mode at the same step: process 0 publishes it a block ahead, the others read it in time."""

from __future__ import annotations

import concurrent.futures
import itertools
import json
import queue
import threading
from collections.abc import Callable
from typing import Any, NamedTuple

from jaxpace import distributed

_KEEP = 4  # messages that stay readable; older ones are deleted
_counter = itertools.count()  # The n-th housekeeper of one process is the n-th of the others.


class Block(NamedTuple):
  """Steps `first` to `until` - 1 are done in one mode."""

  mode: str
  first: int
  until: int


class Agreement:
  """Messages from process 0 to all, one a block, by number. Alone, it only keeps them.

  Reading and writing are done by a thread of its own, which talks to the coordination service and touches no device.
  """

  def __init__(self, timeout: float):
    self._name = f"jaxpace/housekeeper/{next(_counter)}"
    self._timeout = timeout
    self._together = distributed.process_count() > 1
    self._leads = distributed.process_index() == 0
    self._futures: dict[int, concurrent.futures.Future[Block]] = {}
    self._tasks: queue.SimpleQueue[tuple[concurrent.futures.Future[Block], Callable[[], Block]] | None] = (
        queue.SimpleQueue())
    if self._together:
      threading.Thread(target=self._work, name="jaxpace-housekeeper", daemon=True).start()

  def publish(self, number: int, block: Block) -> None:
    """On process 0: makes a block known, some time soon."""
    assert self._leads
    if not self._together:
      self._futures[number] = _done(block)
      return

    def send() -> Block:
      distributed.key_value_set(f"{self._name}/{number}", json.dumps(block._asdict()), overwrite=True)
      if number >= _KEEP:
        distributed.key_value_delete(f"{self._name}/{number - _KEEP}")
      return block

    self._submit(number, send)

  def expect(self, number: int) -> None:
    """On the other processes: begins to read a block, without waiting for it."""
    if self._leads:
      return

    def receive() -> Block:
      text = distributed.key_value_get(f"{self._name}/{number}", self._timeout)
      assert text is not None
      return Block(**json.loads(text))

    self._submit(number, receive)

  def get(self, number: int) -> Block:
    """Returns a block that was published or expected; waits for it if it has not come.

    Raises:
      TimeoutError: it didn't come in time.
      ConnectionError: the job's process 0 is gone.
    """
    try:
      return self._futures.pop(number).result(self._timeout)
    except concurrent.futures.TimeoutError:  # The same as TimeoutError.
      raise TimeoutError(f"process {distributed.process_index()} waited {self._timeout:g} s for housekeeping block "
                         f"{number} of process 0") from None

  def close(self) -> None:
    """Lets the thread go; it ends by itself."""
    self._tasks.put(None)

  def _submit(self, number: int, task: Callable[[], Block]) -> None:
    future: concurrent.futures.Future[Block] = concurrent.futures.Future()
    self._futures[number] = future
    self._tasks.put((future, task))

  def _work(self) -> None:
    while (item := self._tasks.get()) is not None:
      future, task = item
      try:
        future.set_result(task())
      except Exception as error:  # Told to whoever asks for this block.
        future.set_exception(error)


def _done(value: Any) -> concurrent.futures.Future[Any]:
  future: concurrent.futures.Future[Any] = concurrent.futures.Future()
  future.set_result(value)
  return future
