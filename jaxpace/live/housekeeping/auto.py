"""Mode "auto": process 0 measures blocks of steps and chooses; all processes take up a mode at the
same step."""

from __future__ import annotations

import itertools
import logging
import secrets
import time
from collections.abc import Callable
from typing import Any, NamedTuple

from jaxpace.hosts import distributed
from jaxpace.live.housekeeping.modes import ALONE
from jaxpace.live.housekeeping.selection import Selection, Situation

_LOG = logging.getLogger("jaxpace")
_counter = itertools.count()  # The n-th housekeeper of one process is the n-th of the others.


class Block(NamedTuple):
  """Steps `first` to `until` - 1 are done in one mode."""

  mode: str
  first: int
  until: int


class Auto:
  """Says which mode each step is done in.

  A block is published while the one before it is done, so every process knows it long before its
  first step. What is measured in a block therefore acts two blocks later.

  Step time is taken on process 0, from one boundary to the next: all processes do the same steps,
  and a block is long against the few steps by which the loop may be ahead of its devices.

  Args:
    every: steps between two collections; blocks are multiples of it.
    first: step after which the first block begins, a multiple of `every`.
    timeout: seconds to wait for a block.
    clock: seconds, monotonic.
  """

  def __init__(self, every: int, first: int, timeout: float,
               clock: Callable[[], float] = time.monotonic):
    self._clock = clock
    # first steps of a block that don't count: freezing is itself a long pause
    self._settle = 2 if every >= 8 else 1
    self._selection = (Selection(every, secrets.randbits(32)) if distributed.process_index() == 0
                       else None)
    self._rounds: distributed.Rounds[str] | None = distributed.Rounds(
        f"housekeeper/{next(_counter)}", first=first, timeout=timeout, ahead=1, read=str,
        propose=None if self._selection is None else self._propose)
    self._block: Block | None = None
    self._since = 0.0
    self._rounds.at(0)

  def after(self, step: int, situation: Callable[[], Situation]) -> Block | None:
    """Returns the block that begins after `step` steps, or None where none does.

    Args:
      step: steps done.
      situation: tells what process 0 knows of pauses and slack; called at the end of a block.
    """
    if self._block is not None and step == self._block.first + self._settle:
      self._since = self._clock()
    if self._rounds is None or step < self._rounds.wake:
      return None
    if self._selection is not None and self._block is not None and step == self._block.until:
      counted = self._block.until - self._block.first - self._settle
      self._selection.record((self._clock() - self._since) / counted, situation())
    try:
      found = self._rounds.at(step)
      if found is None:
        return None
      if found.first != step:
        raise distributed.NotHeard(
            f"process 0 begins a block after step {found.first}: do `every`, `start` and "
            "`warmup` differ?")
    except distributed.NotHeard as error:
      self.close()
      _LOG.warning(
          "Housekeeping leaves the garbage collector alone from step %d on, in this process: %s.",
          step, error)
      return Block(ALONE, step, step + 1)
    self._block = Block(found.said, found.first, found.until)
    return self._block

  def summary(self) -> dict[str, Any] | None:
    """Returns what was found of each mode, on process 0; None on the others."""
    return None if self._selection is None else self._selection.summary()

  def close(self) -> None:
    """Ends the talk with the other processes."""
    if self._rounds is not None:
      self._rounds.close()
      self._rounds = None
    self._block = None

  def _propose(self, begins: int) -> tuple[int, Callable[[], str]]:
    assert self._selection is not None
    mode, steps = self._selection.propose()
    return begins + steps, lambda: mode
