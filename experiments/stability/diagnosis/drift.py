"""Whether a run gets slower or faster as it goes: Mann-Kendall's test and Theil and Sen's slope, on
means of blocks.

Blocks of many steps are nearly independent even where neighbouring steps are not. Where speeds
wander about as slowly as the run is long, a wander cannot be told from a drift.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
from scipy import special

LEAST = 120
"""Steps below which nothing is said."""
ALPHA = 0.01
"""The share of runs without drift that are said to drift, if their blocks are independent."""
_BLOCKS = 24
_SHORTEST = 10  # steps of a block


class Drift(NamedTuple):
  """Change over the run, as a share of the mean step."""

  change: float  # from the first step to the last
  low: float  # 95 % interval
  high: float
  p: float  # of an order of blocks as uneven as this, two-sided, if nothing drifts
  blocks: int

  @property
  def drifts(self) -> bool:
    """Whether it is given up that nothing drifts."""
    return self.p < ALPHA


def drift(steps: np.ndarray) -> Drift | None:
  """Finds the drift of a run.

  Args:
    steps: [K] s in order; what is not finite is left out.

  Returns:
    None for fewer than `LEAST` steps, or a mean that is not positive.
  """
  steps = np.asarray(steps, np.float64)
  steps = steps[np.isfinite(steps)]
  if len(steps) < LEAST or not steps.mean() > 0:
    return None
  blocks = min(_BLOCKS, len(steps) // _SHORTEST)
  means = np.array([part.mean() for part in np.array_split(steps, blocks)])
  first, second = np.triu_indices(blocks, 1)
  signs = np.sign(means[second] - means[first])
  # of the sum of signs, all orders as likely
  deviation = math.sqrt(blocks * (blocks - 1) * (2 * blocks + 5) / 18)
  total = float(signs.sum())
  z = max(abs(total) - 1, 0.0) / deviation
  # All slopes between two blocks, in shares of the mean a run: blocks are 1 / blocks of a run
  # apart.
  slopes = np.sort((means[second] - means[first]) / (second - first)) * blocks / steps.mean()
  reach = 1.96 * deviation
  low = slopes[max(0, math.floor((len(slopes) - reach) / 2))]
  high = slopes[min(len(slopes) - 1, math.ceil((len(slopes) + reach) / 2))]
  return Drift(float(np.median(slopes)), float(low), float(high), float(2 * special.ndtr(-z)),
               blocks)


def without(steps: np.ndarray) -> np.ndarray:
  """The steps less a straight line through them: [K] s -> [K] s, the mean kept; what is not finite
  is left out."""
  steps = np.asarray(steps, np.float64)
  steps = steps[np.isfinite(steps)]
  at = np.arange(len(steps)) - (len(steps) - 1) / 2
  return steps - at * (at @ steps) / max(at @ at, 1.0)
