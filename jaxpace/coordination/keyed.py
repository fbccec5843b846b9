"""Coins that every rank tosses alike without a message: a hash of a key and a number."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxpace.core import fields


def mixed(word: Any) -> Any:
  """Mixes the 32 bits of a word, of jax or numpy, so that each depends on all: the finaliser of
  MurmurHash3."""
  for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
    word = word ^ (word >> np.uint32(shift))
    word = word * np.uint32(factor)
  return word ^ (word >> np.uint32(16))


def coin(key: int, number: jax.Array) -> jax.Array:
  """Tosses the coin of a number, [] int32: [] bool, the top bit of a hash of it and of the run's
  key, the same on every rank, machine and backend."""
  with np.errstate(over="ignore"):
    salt = mixed(np.uint32((key + 0x9E3779B9) & 0xFFFFFFFF))
  return mixed(number.astype(jnp.uint32) ^ salt) >= np.uint32(0x80000000)


def uniform(key: jax.Array, step: jax.Array, salt: int) -> jax.Array:
  """Draws a number from (key, step, salt), the same wherever these are.

  The finaliser of MurmurHash3 (Appleby), twice, over the key, a Weyl sequence of the step and the
  salt. Good enough for coins and shifts, not for cryptography.

  >>> draw = jax.jit(lambda step: uniform(jnp.uint32(7), step, 1))
  >>> print(" ".join(f"{draw(jnp.int32(step)):.3f}" for step in range(4)))
  0.483 0.951 0.341 0.281

  Args:
    key: [] uint32.
    step: [] int32.
    salt: separates the draws of one step, 0 to 2**32 - 1.

  Returns:
    [] float32, one of 2**24 equally likely values in [0, 1).
  """
  word = mixed(key + np.uint32(0x9E3779B9) * step.astype(jnp.uint32))
  bits = mixed(word ^ np.uint32(0x85EBCA77 * salt % 2**32))
  return (bits >> np.uint32(8)).astype(jnp.float32) * np.float32(2**-24)


def checked(key: Any) -> np.uint32:
  """Checks a key.

  Raises:
    ValueError: not a whole number from 0 to 2**32 - 1.
  """
  return np.uint32(fields.whole("key", key, 0, 2**32 - 1, more=(
      " that differs from job to job, such as zlib.crc32(job_name.encode())")))
