"""The mathematics of smaller gradients: what is left of them after encoding, sending, averaging and
decoding.

With error feedback a rank adds what its last message left out to its next gradient; int8 and fp16,
whose sums are encoded again by the rank that owns a piece, do so there too. (Seide et al., "1-bit
stochastic gradient descent", 2014; Stich et al., "Sparsified SGD with memory", 2018; Tang et al.,
"1-bit Adam", 2021.)
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxpace.simulation.strategies.settings import Compressed

_TINY, _MOST = np.float32(1e-30), np.float32(127)
_LARGEST = np.float32(65504)
"""The largest fp16: beyond it a cast would give infinity."""


class Errors(NamedTuple):
  """What messages have left out so far, to be added to the next ones."""

  ranks: jax.Array  # [R, n] of each rank's gradients
  sums: jax.Array  # [n] of the averages that were encoded again


def no_errors(ranks: int, size: int) -> Errors:
  """The errors before the first step, of gradients of `size` elements."""
  return Errors(jnp.zeros((ranks, size), jnp.float32), jnp.zeros((size,), jnp.float32))


def decoded(strategy: Compressed, values: jax.Array) -> jax.Array:
  """What is left of a gradient, [n] float32 -> [n] float32, after encoding and decoding it."""
  if strategy.codec == "fp16":
    return jnp.clip(values, -_LARGEST, _LARGEST).astype(jnp.float16).astype(jnp.float32)
  if strategy.codec == "int8":
    scale = jnp.maximum(jnp.max(jnp.abs(values)), _TINY) / _MOST
    return jnp.round(values / scale) * scale
  kept = jax.lax.top_k(jnp.abs(values), kept_elements(strategy, len(values)))[1]
  return jnp.zeros_like(values).at[kept].set(values[kept])


def kept_elements(strategy: Compressed, size: int) -> int:
  """How many elements of a gradient top_k sends: 1 at least."""
  return min(size, max(1, round(strategy.keep * size)))


def averaged(strategy: Compressed, gradients: jax.Array,
             errors: Errors) -> tuple[jax.Array, Errors]:
  """Averages the ranks' gradients as they arrive.

  Args:
    strategy: static.
    gradients: [R, n] float32.
    errors: as the last call left them.

  Returns:
    [n] float32, the same on all ranks, and the errors after the step.
  """
  wanted = gradients + errors.ranks
  sent = jax.vmap(lambda values: decoded(strategy, values))(wanted)
  mean = jnp.mean(sent, axis=0)
  if strategy.codec == "top_k":  # gathered, not summed on the way
    result, sums = mean, errors.sums
  else:
    result = decoded(strategy, mean + errors.sums)
    sums = mean + errors.sums - result
  return result, Errors(wanted - sent, sums) if strategy.error_feedback else errors
