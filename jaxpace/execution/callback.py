"""The portable clock: host callbacks. Tens of microseconds a stamp, and dispatch becomes synchronous."""

from __future__ import annotations

import functools
import time

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import io_callback

from jaxpace.execution import limits, operands, words

_WORDS = jax.ShapeDtypeStruct((2,), jnp.uint32)


def stamp(previous: jax.Array, *after: jax.Array) -> jax.Array:
  """Reads the clock on the host; see `jaxpace.execution.Clock`."""
  (previous, *after), axes = operands.prepare((previous, *after))
  return operands.vary(io_callback(_read, _WORDS, previous, *_witnesses(previous, after)), axes)


def delay(
    seconds: jax.Array, limit_s: float, previous: jax.Array, *after: jax.Array
) -> tuple[jax.Array, jax.Array]:
  """Sleeps in a host callback; see `jaxpace.execution.Clock`."""
  limit_ns = limits.nanoseconds(limit_s)
  before = stamp(previous, *after, seconds)
  (seconds, before), axes = operands.prepare((jnp.asarray(seconds, jnp.float32), before))

  def sleep(seconds, before):
    return operands.vary(io_callback(functools.partial(_sleep, limit_ns), _WORDS, seconds, before), axes)

  # A callback that would sleep 0 s still costs milliseconds. NaN > 0 is false.
  return before, jax.lax.cond(seconds > jnp.float32(0.0), sleep, lambda _, before: before, seconds, before)


def _witnesses(previous: jax.Array, after: list[jax.Array]) -> list[jax.Array]:
  """Returns one element of every array, one vector a dtype, that are ready only when the arrays are.

  Whole arrays would be copied to the host. A bare slice is not enough: XLA fuses it into what computes
  the array and computes that element alone, early. The operands of a conditional are whole.
  """
  if not after:
    return []
  never = previous[0] == jnp.uint32(0xFFFFFFFF)
  return jax.lax.cond(never, _last_elements, _first_elements, *after)


def _first_elements(*arrays: jax.Array) -> list[jax.Array]:
  return _by_dtype([array.reshape(-1)[:1] for array in arrays])


def _last_elements(*arrays: jax.Array) -> list[jax.Array]:
  return _by_dtype([array.reshape(-1)[-1:] for array in arrays])


def _by_dtype(elements: list[jax.Array]) -> list[jax.Array]:
  dtypes = dict.fromkeys(element.dtype for element in elements)
  return [jnp.concatenate([element for element in elements if element.dtype == dtype]) for dtype in dtypes]


# Below runs on the host, in a thread of the runtime: numpy only, since a JAX operation here may hang.


def _read(*_: np.ndarray) -> np.ndarray:
  return words.from_ns(time.monotonic_ns())


def _sleep(limit_ns: int, seconds: np.ndarray, before: np.ndarray) -> np.ndarray:
  wanted = min(float(seconds) * 1e9, float(limit_ns))
  deadline = int(words.to_ns(before)) + int(np.ceil(wanted))
  while (left := deadline - time.monotonic_ns()) > 0:
    time.sleep(left * 1e-9)
  return words.from_ns(time.monotonic_ns())
