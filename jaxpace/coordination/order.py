"""Who was first on a shared link: what a job's own bucket times say about other jobs' work."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxpace.core.durations import LONGEST, valid

_ZERO, _ONE, _NAN = np.float32(0), np.float32(1), np.float32(np.nan)
_EDGE = np.float32(1.1)
"""A bucket that took less than this times its floor had the link to itself, but for noise."""
_RISE = np.float32(0.15)
"""Rise of n from the first bucket to the last that tells who was first, where both were shared."""
_SMALL = np.float32(0.1)
"""Buckets below this share of the largest are left out: a scalar's time is latency, not
bandwidth."""


class LinkOrder(NamedTuple):
  """What one step's bucket times say. All NaN or False where nothing is known."""

  # [] float32, time beyond the floors, as a share of the floors, of the buckets that are known
  contention: jax.Array
  # [] float32 s, W: others' work that was on the link when this job began, and had to be shared
  # with
  ahead: jax.Array
  clears: jax.Array  # [] bool, whether that work was done before this job's last bucket
  # [] bool, not so, and its last bucket was held up more than its first: it was there first
  leads: jax.Array
  # [] bool, not so, and its first bucket was held up more than its last: it came later
  trails: jax.Array
  total: jax.Array  # [] float32 s, sum of the floors


def look(times: jax.Array, floors: jax.Array) -> LinkOrder:
  """Reads the order of the jobs from bucket times.

  n = times / floors is the number of jobs on the link, averaged over the bucket. Under fair
  sharing, while one bucket of floor f is sent with n jobs on the link, the others together send (n
  - 1) f. Those that were there when this job began are there until they finish, so as long as n has
  not fallen; after that, a rise is somebody who came later. Hence W = sum of floors * (running
  minimum of n - 1).

  Where all buckets were shared the running minimum never clears, and jobs that began within a
  bucket of each other look alike, but for their ends: who began first finds its first bucket shared
  for less of its time than its last.

  >>> found = look(jnp.array([20e-3, 15e-3, 10e-3, 20e-3]), jnp.full((4,), 10e-3))
  >>> print(f"{found.ahead:.3f} s ahead, contention {found.contention:.3f}, clears: {found.clears}")
  0.015 s ahead, contention 0.625, clears: True

  Args:
    times: [B] float32 s, in the order in which the buckets are sent; NaN where it isn't known: n is
      then taken to be no more than before.
    floors: [B] float32 s, on a quiet link; NaN where there is no bucket.
  """
  sent = valid(floors) & (floors > _ZERO)
  sent &= floors >= _SMALL * jnp.max(jnp.where(sent, floors, _ZERO))
  ok = sent & valid(times)
  n = jnp.where(ok, jnp.minimum(times / jnp.where(ok, floors, _ONE), np.float32(1e6)),
                np.float32(np.inf))
  least = jax.lax.cummin(n)
  total, looked_at = (jnp.sum(jnp.where(these, floors, _ZERO)) for these in (sent, ok))

  def beyond(number: jax.Array, these: jax.Array) -> jax.Array:
    return jnp.sum(jnp.where(these, floors * jnp.maximum(number - _ONE, _ZERO), _ZERO))

  known = jnp.any(ok)
  at = jnp.arange(n.shape[0], dtype=jnp.int32)
  ends = [jnp.sum(jnp.where(at == place, jnp.where(ok, n, _ZERO), _ZERO))
          for place in (jnp.min(jnp.where(ok, at, np.int32(n.shape[0]))),
                        jnp.max(jnp.where(ok, at, np.int32(-1))))]
  contention = jnp.where(known, beyond(n, ok) / jnp.where(known, looked_at, _ONE), _NAN)
  clears = known & (least[-1] < _EDGE)
  unclear = known & ~clears
  ahead = jnp.where(known, beyond(least, sent & jnp.isfinite(least)), _NAN)
  return LinkOrder(contention, ahead, clears, unclear & (ends[1] > ends[0] + _RISE),
                   unclear & (ends[0] > ends[1] + _RISE),
              total)


def first(times: jax.Array, count: int) -> jax.Array:
  """Cuts or fills with NaN: [S] float32 s -> [count]."""
  times = times[:count]
  return jnp.pad(times, (0, count - times.shape[0]), constant_values=_NAN)


def given_floor(floor: Sequence[float] | float | None, count: int) -> np.ndarray | None:
  """Checks floors that are known beforehand.

  Returns:
    [count] float32 s, NaN for collectives it does not name; None for None.

  Raises:
    ValueError: not positive times.
  """
  if floor is None:
    return None
  try:
    values = ([float(floor)] * count if isinstance(floor, (int, float))
              else [float(value) for value in floor])
  except (TypeError, ValueError):
    values = []
  if not values or not all(math.isfinite(value) and 0 < value <= LONGEST for value in values):
    raise ValueError(f"floor={floor!r} must be seconds above 0: one number, or one for each "
                     "collective in the order of the step, such as [4e-3, 4e-3, 1e-3].")
  return np.asarray([*values, *[np.nan] * count][:count], np.float32)
