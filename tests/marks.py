"""Timestamps in a traced program, by the handler that compiled programs call."""

import jax
import jax.numpy as jnp
import numpy as np

from jaxpace.observation.clocks.native.library import MARK


def mark(values: list[jax.Array], *waited: jax.Array, program: int, tag: int) -> list[jax.Array]:
  """Writes an event to the ring of timestamps once all operands are there, and hands `values` on in
  their own memory."""
  call = jax.ffi.ffi_call(
      MARK, [jax.ShapeDtypeStruct(value.shape, value.dtype) for value in values],
      vmap_method="sequential",
      input_output_aliases={i: i for i in range(len(values))})
  return list(call(*values, *waited, mark=np.int64(program << 32 | tag)))


def start(program: int) -> jax.Array:
  """Writes the events that begin an execution, waiting for nothing; returns a word to wait for."""
  call = jax.ffi.ffi_call(MARK, jax.ShapeDtypeStruct((), jnp.uint32), vmap_method="sequential")
  return call(mark=np.int64(program << 32))
