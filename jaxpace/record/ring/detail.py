"""Which steps are written in full: one in so many, and what is unusual."""

from __future__ import annotations

import collections

import numpy as np

from jaxpace.core.detail import is_detailed

SLOW = 1.5
"""A step that takes so many times the running median opens the table for the next ones."""
AROUND = 4
"""Steps that are written in full after a slow one."""
_MEDIAN_OF = 64
_LEAST = 8
_SHARE = 0.1
"""Of all steps, those written in full because of slow ones."""
FIRST = 64
"""Steps at a recording's beginning that are written in full, so that a short run can be judged."""


class Detail:
  """Chooses steps: those that all ranks draw, the first ones, and those around slow ones."""

  def __init__(self, every: int = 1):
    """Begins; `every` may be changed as programs are met."""
    self.every = every
    self._recent: collections.deque[float] = collections.deque(maxlen=_MEDIAN_OF)
    self._until = -1
    self._spent, self._seen = 0.0, 0

  def choose(self, steps: np.ndarray, seconds: np.ndarray) -> np.ndarray:
    """[n] bool: which steps to write in full.

    Args:
      steps: [n] numbers, rising.
      seconds: [n] how long each took from the end of the one before; NaN where not known.
    """
    if self.every <= 1:
      return np.ones(len(steps), bool)
    chosen = is_detailed(steps, self.every) | (steps <= self._until)
    chosen[:max(0, FIRST - self._seen)] = True
    known = seconds[np.isfinite(seconds)]
    recent = np.concatenate([np.array(self._recent), known])[-_MEDIAN_OF:]
    usual = float(np.median(recent)) if len(recent) >= _LEAST else np.inf
    for at in np.flatnonzero(seconds > SLOW * usual).tolist():
      # A job that is always unusual has its share, and no more.
      if self._spent <= _LEAST + _SHARE * (self._seen + at):
        self._until = int(steps[at]) + AROUND
        chosen |= (steps >= steps[at]) & (steps <= self._until)
        self._spent += 1 + AROUND
    self._seen += len(steps)
    self._recent.extend(known.tolist())
    return chosen
