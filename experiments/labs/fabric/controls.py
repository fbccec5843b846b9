"""What jobs on a shared trunk are compared under, besides the library's own pacers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jaxpace
from jaxpace.coordination import order, windows
from jaxpace.coordination.coin import uniform
from jaxpace.core.durations import valid
from jaxpace.core.types import Decision, Observation, Pacer

_ZERO, _ONE = np.float32(0), np.float32(1)


def move_at_random(key: int, floor: Sequence[float], slots: int = 16) -> Pacer:
  """Whoever is contended, leader or follower, moves with probability one half by a random part of
  the time it lost.

  The same dead band, 10 %, and the same bank as
  `jaxpace.interleave_jobs`, and it too waits until it sees what a shift did.

  Args:
    key: of the coin; differs from job to job.
    floor: s, each collective's time on a quiet link.
    slots: collectives it looks at.
  """
  given, typical = order.given_floor(floor, slots), windows.mean(64)
  assert given is not None

  def init(ranks: int) -> tuple[jax.Array, ...]:
    return jnp.float32(1), jnp.zeros((), jnp.int32), *typical.init()

  def update(seen: Observation,
             state: tuple[jax.Array, ...]) -> tuple[Decision, tuple[jax.Array, ...]]:
    bank, hold, *mean = state
    now = typical.update(seen.job_step_time, windows.Mean(*mean))
    period = typical.value(now)
    found = order.look(order.first(seen.job_transfers, slots), jnp.asarray(given))
    lost = found.contention * found.total
    want = uniform(np.uint32(key), seen.step, 1) * lost
    heads = uniform(np.uint32(key), seen.step, 2) < np.float32(0.5)
    bank = jnp.where(valid(period), jnp.minimum(bank + np.float32(0.01), _ONE), bank)
    acts = (heads & (hold == np.int32(0)) & (found.contention > np.float32(0.1))
            & (want <= bank * period))
    delay = jnp.where(acts, want, _ZERO)
    bank = jnp.where(acts, jnp.maximum(bank - delay / period, _ZERO), bank)
    hold = jnp.where(acts, np.int32(2), jnp.maximum(hold - np.int32(1), np.int32(0)))
    return Decision(delay, {"contention": found.contention}), (bank, hold, *now)

  return Pacer(init, update)


def guarded_turns(key: int, **settings: Any) -> Pacer:
  """`jaxpace.take_turns` under the guard, as its documentation recommends it."""
  return jaxpace.guard(jaxpace.take_turns(key, **settings), block=64, key=key, trust=True)
