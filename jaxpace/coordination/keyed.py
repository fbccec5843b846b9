"""Coins that every rank tosses alike without a message: a hash of a key and a number."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp

from jaxpace.coordination import plain


def mixed(word: Any, xp: Any = jnp) -> Any:
  """Mixes the 32 bits of a word so that each depends on all: the finaliser of MurmurHash3.

  Args:
    word: [] uint32; a Python int in [0, 2^32) where `xp` is `plain`.
    xp: `jax.numpy`, or `jaxpace.coordination.plain`.

  Returns:
    The same kind.
  """
  whole = xp.uint32(0xFFFFFFFF)
  for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
    word = word ^ (word >> xp.uint32(shift))
    word = (word * xp.uint32(factor)) & whole
  return word ^ (word >> xp.uint32(16))


def coin(key: int, number: Any, xp: Any = jnp) -> Any:
  """Tosses the coin of this number.

  Args:
    key: of the run, 0 to 2^32 - 1.
    number: [] int32; a Python int where `xp` is `plain`.
    xp: `jax.numpy`, or `jaxpace.coordination.plain`.

  Returns:
    [] bool: the top bit of a hash of both, the same on every rank, machine and backend.
  """
  salt = mixed((key + 0x9E3779B9) & 0xFFFFFFFF, plain)
  return mixed(xp.uint32(number) ^ xp.uint32(salt), xp) >= xp.uint32(0x80000000)
