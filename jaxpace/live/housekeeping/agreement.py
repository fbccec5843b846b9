"""All processes take up a mode at the same step: process 0 says it a block ahead, the others read it in time."""

from __future__ import annotations

import itertools
import json
from typing import NamedTuple

from jaxpace.hosts import distributed

_counter = itertools.count()  # The n-th housekeeper of one process is the n-th of the others.


class Block(NamedTuple):
  """Steps `first` to `until` - 1 are done in one mode."""

  mode: str
  first: int
  until: int


class Agreement:
  """Blocks from process 0 to all, by number; see `distributed.Announcements`."""

  def __init__(self, timeout: float):
    self._timeout = timeout
    self._announcements = distributed.Announcements(f"housekeeper/{next(_counter)}")

  def publish(self, number: int, block: Block) -> None:
    """On process 0: makes a block known, some time soon."""
    self._announcements.say(number, lambda: json.dumps(block._asdict()))

  def expect(self, number: int) -> None:
    """On the other processes: begins to read a block, without waiting for it."""
    self._announcements.expect(number)

  def get(self, number: int) -> Block:
    """Returns a block that was published or expected; waits for it if it has not come.

    Raises:
      TimeoutError: it didn't come in time.
      ConnectionError: the job's process 0 is gone.
    """
    return Block(**json.loads(self._announcements.get(number, self._timeout)))

  def close(self) -> None:
    """Ends the talk with the other processes."""
    self._announcements.close()
