"""Coins that every rank tosses alike without a message, by a hash of a key and a number; and an
interval for a mean that holds however often it is looked at, for values whose sign a coin chose.

Let d[1], d[2], ... be differences whose sign, were there no effect, a fair coin had chosen, their
size being whatever it is: those of pairs of blocks, with and without a treatment in an order that a
coin chose. Given the sizes, each is then +|d| or -|d| alike, so for every number l

    E[exp(l d - l^2 d^2 / 2)] = exp(-l^2 d^2 / 2) cosh(l d) <= 1,

and the product over all values is a supermartingale. Averaged over l ~ Normal(0, 1/rho), with S =
sum d, V = sum d^2:

    M = sqrt(rho / (V + rho)) exp(S^2 / (2 (V + rho))),        P(M ever reaches 1/level) <= level

(Robbins' normal mixture; self-normalised: de la Peña 1999, Howard and others 2021). Nothing is
assumed about the sizes: neither a distribution nor independence nor steadiness, so autocorrelation,
drifts, pauses and heavy tails cost power and never validity. The variance is the data's own and
there is no fewest number of values: S^2 <= n V, so a handful can never reach 1/level.

The interval holds every mean m for which M, made of d - m, is below 1/level. It is exact where the
effect is m in every pair; where it varies about m from pair to pair it is that of a mean of values
whose errors are symmetric.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxpace.core import fields

TYPICAL_PAIRS = 128
"""Pairs for which the mixture is made: the interval is near its narrowest there, and within a tenth
from 40 to 800."""

_ROUNDS = 16


def prior(variance: Any) -> Any:
  """Returns rho for values of about this variance: [] float32 s^2 -> [] float32 s^2, positive.

  Must be chosen from what was known before the first value. A poor guess costs power, not validity.
  """
  return variance * (TYPICAL_PAIRS / 8.0)


def entered(value: jax.Array, count: jax.Array, mean: jax.Array, squares: jax.Array
            ) -> tuple[jax.Array, jax.Array]:
  """Enters a value into a mean and the sum of squares about it, by Welford's recursion: [] float32
  each, `count` with this value."""
  error = value - mean
  after = mean + error / count
  return after, squares + error * (value - after)


def log_odds(count: jax.Array, mean: jax.Array, squares: jax.Array, rho: jax.Array) -> jax.Array:
  """Evidence against a mean of zero: log M.

  Args:
    count: [] int32, values n.
    mean: [] float32 of the values.
    squares: [] float32, sum of squares about it.
    rho: [] float32, see `prior`.

  Returns:
    [] float32; 0 for no values, log(20) is what a level of 5 % asks for.
  """
  n = jnp.float32(count)
  spread = squares + n * mean * mean + rho
  return 0.5 * jnp.log(rho / spread) + (n * mean) * (n * mean) / (2.0 * spread)


def half_width(count: Any, squares: Any, rho: Any, odds: Any, xp: Any = jnp) -> Any:
  """Half the interval's width about the mean.

  With u = |mean - m|, w = n u^2 and squares Q about the mean: S^2 = n w and V = Q + w, so M reaches
  1/level where n w = 2 (Q + w + rho) L(w), L(w) = log(1/level) + log((Q + w + rho) / rho) / 2. The
  fixed point of w = 2 (Q + rho) L / (n - 2 L) is found from below; the error halves every round, at
  worst.

  Args:
    count: [] int32, values n.
    squares: [] float32, sum of squares about their mean, Q.
    rho: [] float32, see `prior`.
    odds: [] float32, log(1/level).
    xp: `jax.numpy`, or `numpy` on the host.

  Returns:
    [] float32 in the unit of the values; infinite where there are too few of them to say anything.
  """
  n = xp.float32(count)
  spread = squares + rho
  w = xp.float32(0.0)
  enough = xp.bool_(True)
  for _ in range(_ROUNDS):
    log_now = odds + 0.5 * xp.log((spread + w) / rho)
    room = n - 2.0 * log_now
    enough = enough & (room >= 2.0)
    w = 2.0 * spread * log_now / xp.maximum(room, 2.0)
  return xp.where(enough, xp.sqrt(w / xp.maximum(n, 1.0)), float("inf"))


# The coins.

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
  """Checks a key: ValueError, if it is no whole number from 0 to 2**32 - 1."""
  return np.uint32(fields.whole("key", key, 0, 2**32 - 1, more=(
      " that differs from job to job, such as zlib.crc32(job_name.encode())")))
