"""Pacing an early rank that does not know the other ranks' arrivals: a stricter rule, for use under
a guard only.

What a rank knows by itself are its own arrival A, own applied delay d and own wait w = e + C, where
e is how much later the last rank arrived and C the collective's own time. **It cannot tell e from
C.** The least of its waits so far is no way out: where C is constant, it contains the rank's least
earliness, which is just what a persistently early rank has to give away; what is left above it is
jitter, and no slack. So a bound on C must come from outside: `ceiling`, the longest that the
collective takes by itself (`jaxpace bench`, or a recorded run whose ranks shared).

Then a wait above the ceiling is proof of earliness. A step is *clear* on a rank if w > ceiling + d:
even a collective that took d longer than it ever should leaves room. In any other step the rank
pays for its delay in full, as if it alone had held the step back; and it earns only its share, one
in R, of what all may spend.

What that bounds. L = max(A + d) - max(A) is what delays hold a step back by, C the wait of the rank
that arrives last of all, l. Since A[l] <= max(A), L <= d[l]. If the step isn't clear on l, then l
pays d[l] >= L. If it is, then L <= d[l] < C - ceiling. No rank asks for more than it has, so what
it pays adds up to no more than it earned, the sum of cost / R x A, and

  sum of L  <=  cost x sum of max(A)  +  sum of max(0, C - ceiling)

whatever the arrivals. The first term is `cost` of the bare run, as with shared arrivals. The second
is what a fabric that exceeds its ceiling adds, and **nothing here can see it**: hence the guard,
which measures.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxpace.coordination import bucket, knobs, windows
from jaxpace.coordination.knobs import Knobs
from jaxpace.core import arrivals
from jaxpace.core.durations import bounded, valid
from jaxpace.core.types import Decision, Observation, Pacer

_ZERO, _NAN, _HALF = np.float32(0), np.float32(np.nan), np.float32(0.5)


class Settings(NamedTuple):
  """Those of `pace_early_ranks`, checked."""

  window: int
  threshold: np.float32  # share of the median step
  most: np.float32  # s
  quantile: float
  fill: np.float32  # share of the slack
  cost: np.float32  # share of the run
  noise: np.float32  # deviations
  ceiling: np.float32  # s, longest time of the first collective by itself


class Unshared(NamedTuple):
  """State of the rule on one rank."""

  low: windows.Quantile  # [] low quantile of own earliness, as far as it is proved
  spread: windows.Moments  # [] mean and deviation of it
  step_time: windows.Quantile  # [] median of own step time
  tokens: jax.Array  # [] float32 s, delay that may be asked for; this rank's own
  active: jax.Array  # [] bool
  knobs: Knobs  # [] threshold and max_delay, where they were changed while the job ran


def pacer(its: Settings) -> Pacer:
  """Makes the pacer that `pace_early_ranks(..., unshared=ceiling)` returns; same columns, without
  others' arrivals.

  The slack is the low quantile of the earliness that own waits prove: w - ceiling + d in clear
  steps, 0 in others. A delay fills at most half of it, or the next step would not be clear.
  """
  low, spread = windows.quantile(its.window, its.quantile), windows.deviation(its.window)
  typical, fill = windows.quantile(its.window, 0.5), np.minimum(its.fill, _HALF)

  def init(ranks: int) -> Unshared:
    return Unshared(low=low.init(), spread=spread.init(), step_time=typical.init(),
                    tokens=bucket.init(), active=jnp.zeros((), jnp.bool_), knobs=knobs.init())

  def update(observation: Observation, state: Unshared) -> tuple[Decision, Unshared]:
    ranks = np.float32(observation.arrivals.shape[0])
    arrival, delay = (arrivals.own(values, observation.rank)
                      for values in (observation.arrivals, observation.delays))
    share, most = (knobs.chosen(state.knobs.threshold, its.threshold),
                   knobs.chosen(state.knobs.max_delay, its.most))
    wait = observation.waits[0]
    clear = valid(wait) & valid(delay) & (wait > its.ceiling + delay)
    early = jnp.where(clear, wait - its.ceiling + delay, jnp.where(valid(wait), _ZERO, _NAN))
    low_now, spread_now = low.update(early, state.low), spread.update(early, state.spread)
    typical_now = typical.update(observation.step_time, state.step_time)

    slack, step_time = low.value(low_now), typical.value(typical_now)
    least = jnp.maximum(share * step_time, its.noise * spread.value(spread_now))
    # Comparisons with NaN are false.
    enough = slack > jnp.where(state.active, _HALF * least, least)
    active = clear & enough & (low_now.seen >= np.int32(its.window))

    tokens = _spend(arrival, delay, clear, its.cost / ranks, most, state.tokens)
    asked = jnp.where(active, bounded(jnp.minimum(fill * slack, tokens), most), _ZERO)
    info = {"slack": slack, "threshold": least, "tokens": tokens,
            "active": active.astype(jnp.float32)}
    return Decision(asked, info), Unshared(
        low=low_now, spread=spread_now, step_time=typical_now, tokens=tokens, active=active,
        knobs=state.knobs)

  return Pacer(init, update)


def _spend(arrival: jax.Array, delay: jax.Array, clear: jax.Array, share: np.float32,
           most: jax.Array, tokens: jax.Array) -> jax.Array:
  """Tokens after a step: earned by own arrival, paid for a delay unless the step was clear; all
  float32 s, [].

  An arrival or delay that isn't known forfeits all that there was, which was at least the delay.
  """
  paid = jnp.where(clear, _ZERO, delay)
  left = bucket.less(tokens + share * arrival, paid)
  return jnp.where(valid(arrival) & valid(delay), jnp.minimum(left, most),
                   jnp.minimum(tokens, _ZERO))
