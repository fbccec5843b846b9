"""What is done now and then beside the steps: when each is due, and how it is run without stopping the training."""

from __future__ import annotations

import collections
import dataclasses
import logging
import time
from collections.abc import Callable

_LOG = logging.getLogger("jaxpace")


@dataclasses.dataclass
class Chore:
  """A pause of the program's own that recurs every so many steps.

  Attributes:
    name: for the log and the counts.
    hook: what is called.
    every: steps from one time to the next; it is due at the multiples of it.
    movable: whether it may be run some steps before it is due, on one process and not on the others.
    durations: seconds of the last times.
    done: number of the last period it was run in.
  """

  name: str
  hook: Callable[[], object]
  every: int
  movable: bool
  durations: collections.deque[float] = dataclasses.field(default_factory=lambda: collections.deque(maxlen=3))
  done: int = -1

  @property
  def expected(self) -> float | None:
    """Seconds it will take, by the last times; None before the first."""
    return max(self.durations, default=None)

  def begin(self, step: int) -> None:
    """Counts periods from here: `step` steps have been done."""
    self.done = step // self.every

  def is_due(self, step: int, slack: float | None = None, stagger: float = 0.0) -> bool:
    """Whether to run it now, after `step` steps.

    It is due at every multiple of `every`. A movable one may be run earlier in the second half of its period, once,
    where this process is early by as much as it takes.

    Args:
      step: steps done; every process has the same count.
      slack: seconds this process is early by; None if that isn't known or not to be used.
      stagger: 0 to 1, part of the third quarter of the period to let go by, so that not all early processes start at
        once.
    """
    period = -(-step // self.every)
    if period <= self.done:
      return False
    if step == period * self.every:
      return True
    if not self.movable or slack is None or self.expected is None or slack < self.expected:
      return False
    return step >= period * self.every - self.every / 2 + stagger * self.every / 4


class Errors:
  """What hooks raised: counted by hook, and told once for each kind."""

  def __init__(self) -> None:
    self.counts: collections.Counter[str] = collections.Counter()
    self._told: set[tuple[str, type[BaseException]]] = set()

  def report(self, name: str, step: int, error: Exception) -> None:
    """Counts an error, and logs it the first time a hook raises one of this type."""
    self.counts[name] += 1
    key = (name, type(error))
    if key in self._told:
      return
    self._told.add(key)
    _LOG.warning("Housekeeping hook %r raised %s at step %d: %s. Training goes on; further ones of this kind are only "
                 "counted, in Housekeeper.errors.", name, type(error).__name__, step, error)
    _LOG.debug("Hook %r raised", name, exc_info=error)


def run(chore: Chore, step: int, errors: Errors) -> float:
  """Runs a chore. What it raises is reported; only KeyboardInterrupt, SystemExit and their like pass.

  Returns:
    Seconds it took.
  """
  chore.done = -(-step // chore.every)
  start = time.monotonic()
  try:
    chore.hook()
  except Exception as error:
    errors.report(chore.name, step, error)
  seconds = time.monotonic() - start
  chore.durations.append(seconds)
  return seconds
