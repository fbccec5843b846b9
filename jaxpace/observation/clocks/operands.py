"""What a timer is made to wait for: the operands of a stamp."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp

from jaxpace.core.varying import vary, varying


def prepare(arrays: Sequence[jax.Array]) -> list[jax.Array]:
  """Makes arrays fit to be operands of one custom call or callback.

  PRNG keys become their key data. Gradients are cut, since timers have no derivative. Under
  `jax.shard_map(check_vma=True)` all operands of a primitive must vary over the same mesh axes, so
  each is cast to the union.

  Args:
    arrays: any shapes and dtypes.

  Returns:
    The arrays.
  """
  plain = [jax.lax.stop_gradient(_plain(array)) for array in arrays]
  axes = frozenset[str]().union(*(varying(array) for array in plain))
  return [vary(array, axes) for array in plain]


def _plain(array: jax.Array) -> jax.Array:
  array = jnp.asarray(array)
  return jax.random.key_data(array) if jnp.issubdtype(array.dtype, jax.dtypes.prng_key) else array
