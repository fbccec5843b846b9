"""The longest delay a step may be given."""

from __future__ import annotations

import math

LONGEST_S = 60.0
"""No delay may be longer, whatever the limit: a step that sleeps for a minute looks like a hang."""


def nanoseconds(limit_s: float) -> int:
  """Checks the limit of a delay and converts it to nanoseconds.

  Raises:
    ValueError: it is not a finite number of seconds from 0 to `LONGEST_S`.
  """
  if not (math.isfinite(limit_s) and 0.0 <= limit_s <= LONGEST_S):
    raise ValueError(
        f"The limit of a delay is {limit_s} but must be a number of seconds from 0 to "
        f"{LONGEST_S:.0f}. Delays are a few milliseconds: 20 ms is 20e-3.")
  return round(limit_s * 1e9)
