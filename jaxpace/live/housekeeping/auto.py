"""Mode "auto": process 0 measures blocks of steps and chooses; all processes take up a mode at the same step."""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Callable
from typing import Any

from jaxpace.hosts import distributed
from jaxpace.live.housekeeping.agreement import Agreement, Block
from jaxpace.live.housekeeping.modes import ALONE
from jaxpace.live.housekeeping.selection import Selection, Situation

_LOG = logging.getLogger("jaxpace")


class Auto:
  """Says which mode each step is done in.

  A block is published while the one before it is done, so every process knows it long before its first step. What is
  measured in a block therefore acts two blocks later.

  Step time is taken on process 0, from one boundary to the next: all processes do the same steps, and a block is long
  against the few steps by which the loop may be ahead of its devices.

  Args:
    every: steps between two collections; blocks are multiples of it.
    first: step after which the first block begins, a multiple of `every`.
    timeout: seconds to wait for a block.
    clock: seconds, monotonic.
  """

  def __init__(self, every: int, first: int, timeout: float, clock: Callable[[], float] = time.monotonic):
    self._agreement = Agreement(timeout)
    self._clock = clock
    self._settle = 2 if every >= 8 else 1  # first steps of a block that don't count: freezing is itself a long pause
    self._selection = Selection(every, secrets.randbits(32)) if distributed.process_index() == 0 else None
    self._next: int | None = first
    self._number = 0  # of the block that begins there
    self._block: Block | None = None
    self._proposed = first
    self._since = 0.0
    self._prepare(0)

  def after(self, step: int, situation: Callable[[], Situation]) -> Block | None:
    """Returns the block that begins after `step` steps, or None where none does.

    Args:
      step: steps done.
      situation: tells what process 0 knows of pauses and slack; called at the end of a block.
    """
    if self._block is not None and step == self._block.first + self._settle:
      self._since = self._clock()
    if step != self._next:
      return None
    if self._selection is not None and self._block is not None:
      counted = self._block.until - self._block.first - self._settle
      self._selection.record((self._clock() - self._since) / counted, situation())
    try:
      block = self._agreement.get(self._number)
      if block.first != step:
        raise ValueError(f"process 0 begins a block after step {block.first}: do `every`, `start` and `warmup` differ?")
    except (TimeoutError, ConnectionError, ValueError, TypeError) as error:
      self._next = self._block = None
      _LOG.warning("Housekeeping leaves the garbage collector alone from step %d on, in this process: %s.", step, error)
      return Block(ALONE, step, step + 1)
    self._block, self._next = block, block.until
    self._number += 1
    self._prepare(self._number)
    return block

  def summary(self) -> dict[str, Any] | None:
    """Returns what was found of each mode, on process 0; None on the others."""
    return None if self._selection is None else self._selection.summary()

  def close(self) -> None:
    """Ends the talk with the other processes."""
    self._agreement.close()

  def _prepare(self, number: int) -> None:
    if self._selection is None:
      self._agreement.expect(number)
      return
    mode, steps = self._selection.propose()
    self._agreement.publish(number, Block(mode, self._proposed, self._proposed + steps))
    self._proposed += steps
