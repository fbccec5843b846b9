"""Ranks late in all steps looked at: their own past knows no other level, so no onset shows against
it. Pure."""

from __future__ import annotations

import numpy as np

from jaxpace.diagnosis.stream_levels import LEARN, Levels, wandering
from jaxpace.diagnosis.stream_signals import ALLOWANCE

# Fitted on the fault lab's runs of seeds 0 to 2; measurements/stream_lab_seed4 is what they are
# worth on others.
LEAST = 2 * ALLOWANCE
"""Share of the step by which the median step of such a rank is late."""
_MOST = 0.6
"""Part of the steps in which it is late by more than the allowance."""
_SURE = 5.0
"""Standard errors of the median, at least: one in a million, and neighbouring steps may be
alike."""
_BEGINNING, _HALF = 4, 0.5
"""In the first quarter of its steps it was late by half of that at least: or it became late."""


def late_from_start(past: np.ndarray, seen: np.ndarray, levels: Levels, ranks: int) -> list[int]:
  """Finds the ranks that have been late since the first step looked at.

  Args:
    past: [S, M] values of the signals, seconds, in their order as long as they are no more than M.
    seen: [S] values that ever went in.
    levels: what is usual.
    ranks: R, whose lateness are the first of the signals.
  """
  if not levels.step_time > 0:
    return []
  middle = levels.middle[:ranks] / levels.step_time
  known = (seen[:ranks] >= LEARN) & (seen[:ranks] <= past.shape[1])
  found = []
  for rank in np.flatnonzero(known & (middle >= LEAST)).tolist():
    own = past[rank, :int(seen[rank])].astype(np.float64) / levels.step_time
    own = own[np.isfinite(own)]
    if not own.size or (own > ALLOWANCE).mean() < _MOST:
      continue
    deviation = float(np.median(np.abs(own - middle[rank]))) / 0.6745
    wander = float(wandering(own[None], np.ones((1, own.size), bool))[0])
    error = 1.25 * deviation * np.sqrt(wander / own.size)
    if (middle[rank] >= _SURE * error
        and np.median(own[:own.size // _BEGINNING]) >= _HALF * middle[rank]):
      found.append(rank)
  return found


__all__ = ["LEAST", "late_from_start"]
