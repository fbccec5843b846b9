"""What is made to wait for a timer."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax

from jaxpace.core.varying import vary, varying
from jaxpace.observation.clocks.clock import Clock


def gate(clock: Clock, timestamp: jax.Array, values: Sequence[jax.Array]) -> list[jax.Array]:
  """Makes values available only once a timestamp has been taken.

  They are the same, bit for bit, and so are gradients. Real dataflow: on CPU an
  `optimization_barrier` orders nothing at run time. And opaque to XLA: a mere `where(stamp_high ==
  0xFFFFFFFF, 0, value)` would be fused into the kernels around it, where other multiplications and
  additions are then contracted, or other conversions elided, than without it.

  Hold what is in memory in any case (operands and results of collectives, inputs of the step): then
  the kernels before and after are the very same. Holding a value in the middle of a fused kernel
  cuts that kernel in two. The values get XLA's default layout: hold no transposed matrix.

  Args:
    clock: the timestamp's.
    timestamp: uint32 [2].
    values: any shapes and dtypes, PRNG keys included.

  Returns:
    The values, each varying over the timestamp's mesh axes too.
  """
  return _held(clock, timestamp, list(values))


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _held(clock: Clock, timestamp: jax.Array, values: list[jax.Array]) -> list[jax.Array]:
  axes = [varying(timestamp) | varying(value) for value in values]
  held = list(values)
  for kind in dict.fromkeys(axes):
    places = [i for i, own in enumerate(axes) if own == kind]
    data = [vary(_data(values[i]), kind) for i in places]
    for place, value in zip(places, clock.gate(vary(timestamp, kind), data), strict=True):
      held[place] = _like(values[place], vary(value, kind))
  return held


@_held.defjvp
def _held_jvp(clock: Clock, primals: Any, tangents: Any) -> tuple[list[jax.Array], list[Any]]:
  """Holding back is the identity: so is its derivative, which waits for nothing."""
  held = _held(clock, *primals)
  slopes = [slope if slope.dtype == jax.dtypes.float0 else vary(slope, varying(value))
            for slope, value in zip(tangents[1], held, strict=True)]
  return held, slopes


def _is_key(value: jax.Array) -> bool:
  return jax.dtypes.issubdtype(value.dtype, jax.dtypes.prng_key)


def _data(value: jax.Array) -> jax.Array:
  return jax.random.key_data(value) if _is_key(value) else value


def _like(value: jax.Array, data: jax.Array) -> jax.Array:
  return jax.random.wrap_key_data(data, impl=jax.random.key_impl(value)) if _is_key(value) else data
