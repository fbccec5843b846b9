"""An interval for a mean that holds however often it is looked at, for values whose sign a coin
chose.

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
