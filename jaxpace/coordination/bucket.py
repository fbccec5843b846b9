"""The token bucket that bounds what delays can cost, exactly, whatever the ranks do.

Every rank keeps the same bucket, for it is filled and emptied by what all ranks know: the arrivals
and applied delays of the last step. See `jaxpace.coordination.early_ranks` for the proof of the
bound.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from jaxpace.core import arrivals

_ZERO = np.float32(0)
_ROUNDING = np.float32(2.0**-21)
"""Share of the tokens withheld a step: more than all rounding of float32 below can have added
(eight units in the last place), so the bound holds in the arithmetic that is really done."""


def init() -> jax.Array:
  """Returns an empty bucket: [] float32 s."""
  return jnp.zeros((), jnp.float32)


def update(seen: jax.Array, delays: jax.Array, cost: np.float32, most: np.float32 | jax.Array,
           tokens: jax.Array
           ) -> jax.Array:
  """Fills the bucket by `cost` of the time to the last undelayed arrival, and pays for what the
  delays held back.

  Args:
    seen: [ranks] float32 s, undelayed arrivals of the step.
    delays: [ranks] float32 s, applied in the step, of any origin.
    cost: share of the time that may be spent.
    most: s the bucket holds at most.
    tokens: [] float32 s before the step.

  Returns:
    [] float32 s after it: negative while in debt, and no gain and no credit kept where a rank is
    missing, for the step may then have been held back by all that was in the bucket.
  """
  filled = tokens + cost * arrivals.latest(seen)
  paid = less(filled, arrivals.lateness(seen, delays))
  return jnp.where(arrivals.all_known(seen, delays), jnp.minimum(paid, most),
                   jnp.minimum(tokens, _ZERO))


def less(filled: jax.Array, paid: jax.Array) -> jax.Array:
  """Takes `paid` out of `filled`, and what float32 may have rounded up: [] float32 s."""
  return filled - jnp.abs(filled) * _ROUNDING - paid
