"""Judges shifts of a job's phase by their coin: acted upon or not, by chance, and the next steps
compared.

A shift persists, so on and off blocks can't judge it: "off" keeps what "on" gained. The unit here
is the trigger, the moment at which a shift would be asked for. A fair coin then says whether it is
(heads), or whether nothing is done for the `STEPS` steps that follow (tails). Their mean time, the
delay included, is the outcome; less what the outcomes of both kinds were before, its sign is the
coin's if shifts do nothing. So twice the signed outcome is one value for
`jaxpace.coordination.coins`, and its mean estimates the effect.

Until an effect is shown every other trigger is a test, so a shift is asked with probability 0.75;
once a gain is shown, one trigger in five, so with probability 0.9. Shifts that only keep jobs
apart, made shortly after another one, are tested once in 64: they are part of what is tested, and
over TCP one that is left out costs more than all others earn in a few hundred steps, for the jobs
are in step again before the test ends. Off where harm is shown, or after `patience` tests that
showed nothing, for `retry` steps, twice as many each time; then it begins again without evidence
and at a stricter level, level / (k (k + 1)) for the k-th time.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxpace.coordination import coins
from jaxpace.core.durations import valid
from jaxpace.core.types import pick

STEPS = 8
"""Steps that are compared."""
LAG = 1
"""Decisions between a trigger and the first one that sees a step after it."""
_SPARE = np.float32(0.2)
"""Share of triggers that are still tests once a gain is shown."""
_FIRST = np.float32(0.5)
"""Share of triggers that are tests before."""
_RARE = np.float32(1 / 64)
"""Share of triggers that are tests while jobs that were parted are kept apart."""
_CLIP = np.float32(0.5)
"""Periods; an outcome beyond is a pause, not a shift."""
_PRIOR = np.float32(0.02)
"""Typical value of a test, in periods; a poor guess costs power, not validity."""
_LONGEST = 2**29

_ZERO, _ONE, _NAN = np.float32(0), np.float32(1), np.float32(np.nan)


class ShiftTest(NamedTuple):
  """State of the test; all []."""

  age: jax.Array  # int32, decisions since the trigger of the test that runs; 0 where none does
  heads: jax.Array  # bool, it is one in which the shift was asked for
  base: jax.Array  # float32 s, step time at its trigger
  total: jax.Array  # float32 s, of the steps since; below 0 once one is unknown
  tests: jax.Array  # int32, tests counted
  mean: jax.Array  # float32 periods, of their values
  squares: jax.Array  # float32, sum of squares about it
  typical: jax.Array  # float32 periods, mean outcome of either kind, tests before this one
  shown: jax.Array  # bool, a gain was shown
  off: jax.Array  # int32, decisions for which it is still off
  wait: jax.Array  # int32, of the next stretch off
  tries: jax.Array  # float32, beginnings without evidence


def init(retry: int) -> ShiftTest:
  """Returns the state before the first step."""
  zero, none, no = jnp.float32(0), jnp.int32(0), jnp.zeros((), jnp.bool_)
  return ShiftTest(none, no, zero, zero, none, zero, zero, zero, no, none, jnp.int32(retry),
                   jnp.float32(1))


def effect(state: ShiftTest, level: float) -> tuple[jax.Array, jax.Array, jax.Array]:
  """Effect of a shift on the mean time of the steps that follow it, as a share of the period, below
  zero for a gain; and the ends of an interval that holds it however often it is looked at: three []
  float32, NaN where unknown."""
  log_odds = jnp.log(state.tries * (state.tries + _ONE)) - np.float32(np.log(level))
  # Values are near `_PRIOR`: so the mixture is made for sums of squares about 64 of those.
  half = coins.half_width(state.tests, state.squares, coins.prior(_PRIOR * _PRIOR),
                               log_odds)
  known, bounded = state.tests > np.int32(0), jnp.isfinite(half)
  return (jnp.where(known, state.mean, _NAN), jnp.where(bounded, state.mean - half, _NAN),
          jnp.where(bounded, state.mean + half, _NAN))


def advance(step_time: jax.Array, period: jax.Array, state: ShiftTest, patience: int, retry: int,
            level: float
            ) -> ShiftTest:
  """Goes on by one decision: enters the newest step time, and at the end of a test judges.

  Args:
    step_time: [] float32 s, of the job, delay included, `LAG` steps old; NaN unknown.
    period: [] float32 s, typical.
    patience: tests after which what has shown no gain is off.
    retry: decisions for which it is off the first time after a gain.
    level: chance of ever deciding falsely.
  """
  runs = state.age > np.int32(0)
  counts = runs & (state.age > np.int32(LAG))
  known = valid(step_time) & (state.total >= _ZERO)
  total = jnp.where(known, state.total + step_time, -_ONE)
  state = state._replace(total=jnp.where(counts, total, state.total),
                         off=jnp.maximum(state.off - np.int32(1), np.int32(0)))
  over = runs & (state.age >= np.int32(LAG + STEPS))

  outcome = (state.total * np.float32(1 / STEPS) - state.base) / period
  good = over & (state.total >= _ZERO) & jnp.isfinite(outcome)
  outcome = jnp.clip(jnp.where(good, outcome, _ZERO), -_CLIP, _CLIP)
  value = np.float32(2) * jnp.where(state.heads, _ONE, -_ONE) * (outcome - state.typical)
  n = (state.tests + np.int32(1)).astype(jnp.float32)
  mean, squares = coins.entered(value, n, state.mean, state.squares)
  entered = state._replace(tests=state.tests + np.int32(1), mean=mean, squares=squares,
                           typical=state.typical + (outcome - state.typical) / n)
  state = pick(good, entered, state)

  _, low, high = effect(state, level)
  gain, harm = good & (high < _ZERO), good & (low > _ZERO)
  full = good & (state.tests >= np.int32(patience))
  stop = harm | (full & ~gain)
  # evidence is dropped, so that what was true a while ago isn't believed for ever
  again = stop | (full & gain)
  fresh = jnp.where(again, np.int32(0), state.tests)
  wait = jnp.where(gain, np.int32(retry), state.wait)
  return state._replace(
      age=jnp.where(over, np.int32(0), jnp.where(runs, state.age + np.int32(1), np.int32(0))),
      tests=fresh, mean=jnp.where(again, _ZERO, state.mean),
      squares=jnp.where(again, _ZERO, state.squares), shown=(state.shown | gain) & ~stop,
      off=jnp.where(stop, wait, state.off),
      wait=jnp.where(stop, jnp.minimum(np.int32(2) * wait, np.int32(_LONGEST)), wait),
      tries=jnp.where(stop, state.tries + _ONE,
                      jnp.where(gain & full, state.tries + _ONE, state.tries)))


def trigger(wanted: jax.Array, awake: jax.Array, base: jax.Array, draw: jax.Array, state: ShiftTest
            ) -> tuple[jax.Array, jax.Array, ShiftTest]:
  """Says whether a shift that is wanted is asked for, and begins a test where there is none.

  Args:
    awake: [] bool, whether the last shift was a short while ago, so that this one only corrects it.
    base: [] float32 s, the newest step time without own delay.
    draw: [] float32, uniform in [0, 1), of this decision.

  Returns:
    Whether to act, [] bool; whether this is the trigger of a test, [] bool; and the state.
  """
  runs, live = state.age > np.int32(0), wanted & (state.off == np.int32(0))
  share = jnp.where(awake, _RARE, jnp.where(state.shown, _SPARE, _FIRST))
  begins = live & ~runs & (draw < share)
  heads = draw < np.float32(0.5) * share
  act = live & jnp.where(runs, state.heads, ~begins | heads)
  begun = state._replace(age=jnp.int32(1), heads=heads, base=base, total=jnp.float32(0))
  return act, begins, pick(begins, begun, state)
