"""What counts as a duration, and as a delay, whatever a clock or a message has delivered."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

PER_HIGH, PER_LOW = np.float32(2.0**32 * 1e-9), np.float32(1e-9)
"""Seconds that one unit of a timestamp's high and low 32 bits stands for."""


def elapsed_seconds(nanoseconds: np.ndarray) -> np.ndarray:
  """Makes of differences of timestamps what `jaxpace.observation.clocks.words.seconds_between`
  makes of them in a step: [...] float32 s, of [...] int64 ns, in numpy alone.

  To the last bit below 2**32 ns; beyond, the compiler may round once where this does twice.
  """
  size = np.abs(nanoseconds)
  seconds = ((size >> 32).astype(np.float32) * PER_HIGH
             + (size & 0xFFFFFFFF).astype(np.float32) * PER_LOW)
  return np.where(nanoseconds < 0, -seconds, seconds)


LONGEST = np.float32(86400.0)
"""s. More than a day between two collectives is a clock that wrapped or a torn message."""


def valid(seconds: jax.Array) -> jax.Array:
  """Says which values are durations: finite, not negative, at most `LONGEST`.

  Args:
    seconds: [...] float32 s.

  Returns:
    [...] bool; False for NaN.
  """
  return (seconds >= np.float32(0)) & (seconds <= LONGEST)


def bounded(delay: jax.Array, most: np.float32 | jax.Array) -> jax.Array:
  """Makes a delay that may be asked for out of anything.

  Args:
    delay: [...] float32 s.
    most: s, finite.

  Returns:
    [...] float32 s in [0, most]; 0 for NaN.
  """
  return jnp.where(delay > np.float32(0), jnp.minimum(delay, most), np.float32(0))
