"""Arithmetic on timestamps kept as two uint32 words.

x64 is off in most JAX programs, and a float32 of nanoseconds since boot is off by minutes after a
week. A timestamp is therefore `[..., 2]` uint32, (high, low) words of nanoseconds, and only
differences become float32 seconds. All functions are pure, jittable, and work element by element on
leading dimensions.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from jaxpace.core.durations import PER_HIGH, PER_LOW


def zero() -> jax.Array:
  """Returns the timestamp 0, uint32 [2]: what the first timestamp of a program is chained to."""
  return jnp.zeros((2,), jnp.uint32)


def is_zero(a: jax.Array) -> jax.Array:
  """Returns whether timestamps are 0: [...] bool, of [..., 2] uint32.

  Without a reduction, which would be a kernel of its own.
  """
  return (a[..., 0] | a[..., 1]) == jnp.uint32(0)


def add(a: jax.Array, b: jax.Array) -> jax.Array:
  """Adds two timestamps or durations with carry, modulo 2**64.

  Args:
    a: [..., 2] uint32.
    b: [..., 2] uint32.

  Returns:
    [..., 2] uint32.
  """
  low = a[..., 1] + b[..., 1]
  carry = (low < a[..., 1]).astype(jnp.uint32)
  return jnp.stack([a[..., 0] + b[..., 0] + carry, low], axis=-1)


def subtract(a: jax.Array, b: jax.Array) -> jax.Array:
  """Returns a - b with borrow, modulo 2**64: [..., 2] uint32 of both arguments' shape."""
  low = a[..., 1] - b[..., 1]
  borrow = (a[..., 1] < b[..., 1]).astype(jnp.uint32)
  return jnp.stack([a[..., 0] - b[..., 0] - borrow, low], axis=-1)


def seconds_between(earlier: jax.Array, later: jax.Array) -> jax.Array:
  """Measures the time from one timestamp to another.

  The difference is taken in 64-bit integers and rounded afterwards: within 2 units in the last
  place of float32 (2.4e-7 of the difference itself, however long the machine has been up).

  Args:
    earlier: [..., 2] uint32.
    later: [..., 2] uint32.

  Returns:
    [...] float32 seconds, negative where `later` is in fact the earlier one.
  """
  difference = subtract(later, earlier)
  negative = difference[..., 0] >= jnp.uint32(0x80000000)
  # The magnitude must be taken in integers: as floats, the words of -1 ns would cancel to 0.
  magnitude = jnp.where(
      negative[..., None], subtract(jnp.zeros_like(difference), difference), difference)
  high, low = (magnitude[..., i].astype(jnp.float32) for i in (0, 1))
  seconds = high * PER_HIGH + low * PER_LOW
  return jnp.where(negative, -seconds, seconds)


def of_seconds(seconds: jax.Array) -> jax.Array:
  """Makes a duration in words: whole nanoseconds, of [...] float32 seconds below a day.

  Returns:
    [..., 2] uint32; 0 for what is negative or NaN.
  """
  whole = jnp.where(seconds > np.float32(0), seconds * np.float32(1e9), np.float32(0))
  high = jnp.floor(whole * np.float32(2.0**-32))
  low = jnp.rint(whole - high * np.float32(2.0**32))
  return jnp.stack([high, low], axis=-1).astype(jnp.uint32)


def of_bits(value: jax.Array) -> jax.Array:
  """Makes an event's number of a float32 or a whole number of 32 bits: [...] -> [..., 2] uint32."""
  bits = jax.lax.bitcast_convert_type(value, jnp.uint32)
  return jnp.stack([jnp.zeros_like(bits), bits], axis=-1)


def to_ns(words: np.ndarray) -> np.ndarray:
  """Converts timestamps on the host: [..., 2] uint32 to [...] int64 nanoseconds, by numpy alone."""
  words = np.asarray(words)
  wide = words.astype(np.uint64)
  return ((wide[..., 0] << np.uint64(32)) | wide[..., 1]).astype(np.int64)


def from_ns(nanoseconds: int | np.ndarray) -> np.ndarray:
  """Converts on the host: [...] integer nanoseconds, taken modulo 2**64, to [..., 2] uint32.

  Inverse of `to_ns`.
  """
  wide = np.asarray(nanoseconds, np.int64).astype(np.uint64)
  return np.stack([wide >> np.uint64(32), wide & np.uint64(0xFFFFFFFF)], axis=-1).astype(np.uint32)
