"""The pacer of the paper's section 5.3, in one reading.

"Each rank maintains a rolling window of observed collective wait times. When variability exceeds a
configurable threshold, the coordination layer activates pacing for early-arriving ranks ... by
introducing a bounded delay before entering the next iteration." What is early, and how long the
delay is, it leaves open. Here: a rank is early by what its wait was beyond the least of the window
(a wait holds the transfer too), and is delayed by half of that.
"""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

from jaxpace.coordination import windows
from jaxpace.core.durations import bounded, valid
from jaxpace.core.types import Decision, Observation, Pacer

_ZERO = np.float32(0)
WINDOW, THRESHOLD, SHARE = 64, 0.05, 0.5


class Literal(NamedTuple):
  """State of one rank."""

  waits: windows.Moments  # [] of its own waits at the step's first collective
  least: jnp.ndarray  # [] lowest recent one


def pacer(max_delay: float, window: int = WINDOW, threshold: float = THRESHOLD,
          share: float = SHARE) -> Pacer:
  """Makes it.

  Args:
    max_delay: s, the bound of its delays.
    window: steps.
    threshold: deviation of the waits over the window, as a share of their mean, above which it
      paces.
    share: of a rank's earliness, its delay.
  """
  varied, lowest = windows.deviation(window), windows.floor(window)

  def init(ranks: int) -> Literal:
    return Literal(varied.init(), lowest.init())

  def update(seen: Observation, state: Literal) -> tuple[Decision, Literal]:
    wait = seen.waits[0]
    state = Literal(varied.update(wait, state.waits), lowest.update(wait, state.least))
    early = jnp.where(valid(wait), wait - lowest.value(state.least), _ZERO)
    paces = varied.value(state.waits) > np.float32(threshold) * state.waits.mean
    delay = jnp.where(paces, bounded(np.float32(share) * early, np.float32(max_delay)), _ZERO)
    return Decision(delay, {}), state

  return Pacer(init, update)
