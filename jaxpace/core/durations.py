"""What counts as a duration, and as a delay, whatever a clock or a message has delivered; and what
the arrivals of one step say: who was early, by how much delays made the step longer, what the
transfer took.

Ranks that are missing are NaN, here as in an `Observation`; a value that is no duration counts as
missing.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

_ZERO, _ONE, _NAN = np.float32(0), np.float32(1), np.float32(np.nan)

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
  """Says which values are durations, [...] float32 s -> [...] bool: finite, not negative, at most
  `LONGEST`; NaN is none."""
  return (seconds >= _ZERO) & (seconds <= LONGEST)


def bounded(delay: jax.Array, most: np.float32 | jax.Array) -> jax.Array:
  """Makes a delay that may be asked for out of anything: [...] float32 s -> [...] in [0, most], 0
  for NaN."""
  return jnp.where(delay > _ZERO, jnp.minimum(delay, most), _ZERO)


def all_known(arrivals: jax.Array, delays: jax.Array) -> jax.Array:
  """Says whether every rank's arrival and applied delay are known: [ranks], [ranks] -> [] bool."""
  return jnp.all(valid(arrivals) & valid(delays))


def own(values: jax.Array, rank: jax.Array) -> jax.Array:
  """Picks a rank's own value: [ranks] float32, [] int32 -> [] float32; NaN if there is no rank."""
  ranks = values.shape[0]
  exists = (rank >= np.int32(0)) & (rank < np.int32(ranks))
  place = jnp.clip(rank, np.int32(0), np.int32(ranks - 1))
  return jnp.where(exists, jax.lax.dynamic_index_in_dim(values, place, keepdims=False), _NAN)


def greatest(values: jax.Array) -> jax.Array:
  """Returns the greatest of values: [ranks] float32 -> [] float32.

  One of them, at least, must be positive or +0. Without a sign, floats order as their bits do; NaN,
  as JAX makes it, is above all. XLA for CPU reduces integers in vectors, but floats one by one, for
  the sake of NaN: five times as long at 1,024 ranks.
  """
  most = jnp.max(jax.lax.bitcast_convert_type(values, np.int32))
  return jax.lax.bitcast_convert_type(most, np.float32)


def latest(arrivals: jax.Array) -> jax.Array:
  """Returns the latest of the known arrivals: [ranks] -> [] float32 s; NaN if none is known."""
  # There is a -0: abs.
  last = greatest(jnp.where(valid(arrivals), jnp.abs(arrivals), -_ONE))
  return jnp.where(last >= _ZERO, last, _NAN)


def earliness(arrivals: jax.Array) -> jax.Array:
  """How much earlier than the last rank each one arrived, by undelayed arrivals: [ranks] float32 s
  -> [ranks] float32 s, max over ranks of A - A; 0 for the last rank, NaN for missing ones."""
  return jnp.where(valid(arrivals), latest(arrivals) - arrivals, _NAN)


def lateness(arrivals: jax.Array, delays: jax.Array) -> jax.Array:
  """By how much the applied delays held the step back: L = max(A + d) - max(A).

  Computed as max(d - earliness), which does not cancel. It is 0 where every delay fits into its
  rank's earliness, and never more than the longest delay.

  Args:
    arrivals: [ranks] float32 s, undelayed.
    delays: [ranks] float32 s, applied.

  Returns:
    [] float32 s; NaN if anything is missing, for the missing rank may have been the last.
  """
  beyond = greatest(jnp.maximum(delays - earliness(arrivals), _ZERO))
  return jnp.where(all_known(arrivals, delays), jnp.maximum(beyond, _ZERO), _NAN)


def transfer(wait: jax.Array, arrivals: jax.Array, delays: jax.Array, rank: jax.Array) -> jax.Array:
  """Estimates the collective's own time from one rank's wait: own wait - own earliness.

  With delays, a rank is early by max(A + d) - own (A + d). Exits are not quite common, so a single
  estimate can be off by their spread.

  Args:
    wait: [] float32 s, own exit - enter.
    arrivals: [ranks] float32 s, undelayed.
    delays: [ranks] float32 s, applied.
    rank: [] int32, own index along the axis.

  Returns:
    [] float32 s, not negative; NaN if the wait or any rank is missing.
  """
  early = own(earliness(arrivals + delays), rank)
  known = valid(wait) & all_known(arrivals, delays)
  return jnp.where(known, jnp.maximum(wait - early, _ZERO), _NAN)


def transfers_now(waits: jax.Array, arrivals: jax.Array, delays: jax.Array) -> jax.Array:
  """Estimates every collective's own time from the mean over ranks of their waits.

  The mean wait less the mean earliness is what the last rank waited; only what each rank alone
  would have cut off at zero isn't. Made of what is shared, it is the same on all ranks.

  Args:
    waits: [S] float32 s, means over ranks; NaN where not known.
    arrivals: [ranks] float32 s, undelayed, at the first collective.
    delays: [ranks] float32 s, applied.

  Returns:
    [S] float32 s, not negative; NaN where unknown.
  """
  if not waits.shape[0]:
    return waits
  early = jnp.where(all_known(arrivals, delays), jnp.mean(earliness(arrivals + delays)), _NAN)
  waits = jnp.where(valid(waits), waits, _NAN)
  return waits.at[0].set(jnp.maximum(waits[0] - early, _ZERO))
