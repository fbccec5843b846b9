"""What is done now and then beside the steps: when each is due, and how it is run without stopping
the training."""

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
    every: steps from one time to the next.
    movable: whether it may be run some steps before it is due, on one process and not on the
      others.
    durations: seconds of the last times.
    origin: step from which the periods count.
    done: number of the last period it was run in.
  """

  name: str
  hook: Callable[[], object]
  every: int
  movable: bool
  durations: collections.deque[float] = dataclasses.field(
      default_factory=lambda: collections.deque(maxlen=3))
  origin: int = 0
  done: int = -1

  @property
  def expected(self) -> float | None:
    """Seconds it will take, by the last times; None before the first."""
    return max(self.durations, default=None)

  def begin(self, step: int, origin: int = 0) -> None:
    """What was due at `step` or before is no longer; periods count from `origin`."""
    self.origin = origin
    self.done = (step - origin) // self.every

  def is_due(self, step: int, slack: float | None = None, stagger: float = 0.0) -> bool:
    """Whether to run it now, after `step` steps.

    It is due at the end of every period. A movable one may be run earlier in the second half of its
    period, once, where this process is early by as much as it takes.

    Args:
      step: steps done; every process has the same count.
      slack: seconds this process is early by; None if that isn't known or not to be used.
      stagger: 0 to 1, part of the third quarter of the period to let go by, so that not all early
        processes start at once.
    """
    period = self.period(step)
    if period <= self.done:
      return False
    end = self.origin + period * self.every
    if step == end:
      return True
    if not self.movable or slack is None or self.expected is None or slack < self.expected:
      return False
    return step >= end - self.every / 2 + stagger * self.every / 4

  def period(self, step: int) -> int:
    """Returns the number of the period that a step belongs to; its last step ends it."""
    return -(-(step - self.origin) // self.every)


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
    _LOG.warning("Housekeeping hook %r raised %s at step %d: %s. Training goes on; further ones of "
                 "this kind are only counted, in Housekeeper.errors.", name, type(error).__name__,
                 step, error)
    _LOG.debug("Hook %r raised", name, exc_info=error)


def run(chore: Chore, step: int, errors: Errors) -> float:
  """Runs a chore. What it raises is reported; only KeyboardInterrupt, SystemExit and their like
  pass.

  Returns:
    Seconds it took.
  """
  chore.done = chore.period(step)
  start = time.monotonic()
  try:
    chore.hook()
  except Exception as error:
    errors.report(chore.name, step, error)
  seconds = time.monotonic() - start
  chore.durations.append(seconds)
  return seconds
