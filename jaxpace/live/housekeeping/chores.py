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
  """

  name: str
  hook: Callable[[], object]
  every: int


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
  start = time.monotonic()
  try:
    chore.hook()
  except Exception as error:
    errors.report(chore.name, step, error)
  return time.monotonic() - start
