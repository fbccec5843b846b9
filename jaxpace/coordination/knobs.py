"""Settings of a pacer: checked when it is made; and those that may be changed while the job runs,
carried in its state as arrays, without compiling the step again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxpace.core import fields
from jaxpace.core.durations import bounded
from jaxpace.core.types import Decision, Hold, Moment, Observation, Pacer, PacerState, pick

_NO_STEP = np.iinfo(np.int32).max
_ZERO, _NAN = np.float32(0), np.float32(np.nan)


# What can be wrong about a setting of a pacer, said in a sentence that names the fix.

def steps(name: str, value: Any, least: int) -> int:
  """Checks a number of steps, from `least` to a million."""
  return fields.whole(name, value, least, 1_000_000, of="steps")


def slots(value: Any) -> int:
  """Checks how many collectives of a step a pacer looks at: no more than have timestamps."""
  return fields.whole("slots", value, 1, 256, of="collectives")


def number(name: str, value: Any, least: float, most: float, hint: str, *,
           open_ended: bool = False) -> np.float32:
  """Checks a number in [least, most], or strictly between them if `open_ended`."""
  return np.float32(fields.number(name, value, least, most, hint, strictly=open_ended))


def delay(name: str, value: Any) -> np.float32:
  """Checks a longest delay, in seconds."""
  return number(name, value, 0, 10, "seconds, 20 ms is 20e-3")


def pacers(*candidates: Any) -> None:
  """Checks that these are pacers."""
  for candidate in candidates:
    if not isinstance(candidate, Pacer):
      hint = " Did you forget to call the factory?" if callable(candidate) else ""
      raise ValueError(f"{candidate!r} is not a Pacer. Pass what a factory returns, such as "
                       f"jaxpace.pace_early_ranks(), or jaxpace.Pacer(init, update).{hint}")


class Knobs(NamedTuple):
  """What `jaxpace.steerable` sets. A pacer that keeps one in its state, and reads it, can be
  steered by it."""

  threshold: jax.Array  # [] float32, a share of the median step; NaN: as the pacer was made
  max_delay: jax.Array  # [] float32 s; NaN: as the pacer was made


def init() -> Knobs:
  """Returns knobs that leave everything as the pacer was made."""
  return Knobs(jnp.full((), np.nan, jnp.float32), jnp.full((), np.nan, jnp.float32))


def chosen(knob: jax.Array, made: np.float32) -> jax.Array:
  """Returns the knob's value, or `made` where it is NaN: [] float32."""
  return jnp.where(jnp.isnan(knob), made, knob)


def turned(state: Any, kind: type, to: Callable[[Any], Any]) -> Any:
  """A pacer's or a balancer's state with all its nodes of a kind, knobs or steering, at `to(node)`.
  """
  return jax.tree.map(lambda node: to(node) if isinstance(node, kind) else node, state,
                      is_leaf=lambda node: isinstance(node, kind))


class Steering(NamedTuple):
  """What may be changed from outside, the same on all ranks: `jaxpace.Control` replaces the
  leaves."""

  enabled: jax.Array  # [] bool
  max_delay: jax.Array  # [] float32 s; NaN: as the pacer was made
  threshold: jax.Array  # [] float32, a share of the median step; NaN: as the pacer was made
  ranks: jax.Array  # [ranks] bool, those that may be delayed
  from_step: jax.Array  # [] int32, first step in which they may be
  until_step: jax.Array  # [] int32, one past the last


class Steered(NamedTuple):
  """State of `steerable`."""

  steering: Steering
  inner: PacerState
  # Of a pacer that holds collectives back the steering's leaves that holds go by, one step behind;
  # no `Steering`, which would be replaced.
  holding: tuple[jax.Array, ...] = ()


def as_made(ranks: int) -> Steering:
  """Returns the steering that changes nothing."""
  return Steering(jnp.ones((), jnp.bool_), jnp.full((), _NAN), jnp.full((), _NAN),
                  jnp.ones((ranks,), jnp.bool_), jnp.zeros((), jnp.int32),
                  jnp.full((), _NO_STEP, jnp.int32))


def steerable(pacer: Pacer) -> Pacer:
  """Makes a pacer that `jaxpace.Control` can change while the job runs: on and off, delay,
  threshold, ranks, steps.

  The settings are arrays in the state, so nothing is compiled again. Where pacing is not allowed
  the delay is exactly 0, and the pacer goes on observing; nothing is held back before
  collectives, either, which needs all ranks, and follows a change one step later. A longest delay
  cuts every pacer's delays and holds. The threshold, and a longest delay above the one that the
  pacer was made with, reach pacers that read their `jaxpace.Knobs`: `pace_early_ranks` does.

  Give it the whole pacer, `steerable(guard(...))` or `steerable(chain(...))`.

  >>> decision = Decision(jnp.float32(5e-3), {})
  >>> pacer = steerable(Pacer(lambda ranks: (), lambda seen, state: (decision, state)))
  >>> state = pacer.init(2)
  >>> seen = Observation(*[jnp.int32(0)] * 2, *[jnp.zeros(2)] * 2, jnp.zeros(1),
  ...                    *[jnp.zeros(())] * 2, jnp.zeros(1))
  >>> decision, state = pacer.update(seen, state)
  >>> print(f"{decision.delay:.3f}, allowed {decision.info['allowed']:.0f}")
  0.005, allowed 1
  >>> off = state._replace(steering=state.steering._replace(enabled=jnp.zeros((), jnp.bool_)))
  >>> print(f"{pacer.update(seen, off)[0].delay:.3f}")
  0.000

  Args:
    pacer: what to steer.

  Returns:
    A pacer. Its columns are the pacer's and `allowed`, 1 where this rank may be delayed in the next
    step, else 0.

  Raises:
    ValueError: `pacer` is not a Pacer.
  """
  pacers(pacer)

  def init(ranks: int) -> Steered:
    return Steered(as_made(ranks), pacer.init(ranks),
                   () if pacer.hold is None else tuple(as_made(ranks)))

  def update(observation: Observation, state: Steered) -> tuple[Decision, Steered]:
    steering = state.steering
    step = observation.step + np.int32(1)  # the decision is for the next
    now = _allows(steering, step)
    to = Knobs(steering.threshold, steering.max_delay)
    inner = turned(state.inner, Knobs, lambda _: to)
    decision, inner = pacer.update(observation, inner)
    mine = jnp.any(steering.ranks
                   & (np.arange(steering.ranks.shape[0], dtype=np.int32) == observation.rank))
    allowed = mine & now
    delay = jnp.where(allowed, _cut(decision.delay, steering), _ZERO)
    info = {**decision.info, "allowed": allowed.astype(jnp.float32)}
    return Decision(delay, info), Steered(steering, inner,
                                          () if pacer.hold is None else tuple(steering))

  inner_hold = pacer.hold
  if inner_hold is None:
    return Pacer(init, update)

  def hold(moment: Moment, state: Steered) -> tuple[Hold, Steered]:
    # Ranks that answer differently wait for each other for ever. So a change that hasn't come to
    # all of them yet is no matter in this step, and in the next one nobody is asked: ranks compare
    # what answers are made of, and the steering to come is a part of that, though of no effect.
    steering = Steering(*state.holding)
    asked, after = inner_hold(moment, state.inner)
    # One rank that holds holds all: it is allowed to all of them, or to none.
    allowed = _allows(steering, moment.step) & jnp.all(steering.ranks)
    changes = [jnp.any(old != new) for old, new in zip(steering, state.steering, strict=True)]
    allowed = jnp.where(jnp.any(jnp.stack(changes)), allowed, allowed)
    seconds = jnp.where(allowed, _cut(asked.seconds, steering), _ZERO)
    return (Hold(seconds, asked.listen & allowed),
            state._replace(inner=pick(allowed, after, state.inner)))

  return Pacer(init, update, hold)


def _allows(steering: Steering, step: jax.Array) -> jax.Array:
  """Whether pacing may act in a step: [] bool."""
  return steering.enabled & (step >= steering.from_step) & (step < steering.until_step)


def _cut(seconds: jax.Array, steering: Steering) -> jax.Array:
  return bounded(seconds, chosen(steering.max_delay, np.float32(np.inf)))
