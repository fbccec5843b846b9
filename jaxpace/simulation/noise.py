"""What makes a rank's steps differ: components that add up, each a pytree of numbers with a pure
`sample`.

Numbers may be traced arrays, so that one compiled simulation runs under many settings (`jax.vmap`).
Which components there are is static. Draws depend on (key, step) alone, not on how a run is cut
into parts.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

Key = jax.Array
_ZERO, _ONE = np.float32(0), np.float32(1)


# A component is a NamedTuple of numbers whose `sample(key, step, state, ranks)` gives what a step
# adds on every rank, [R] float32, and the state after: a share of its compute, or seconds of gap if
# it is one of `IN_GAP`. One that remembers something has `init(key, ranks)` too, which makes its
# state at the start of a run, a pytree of [R, ...]; the state of others is ().

class Normal(NamedTuple):
  """Independent normal jitter."""

  deviation: Any  # [] share of the compute

  def sample(self, key: Key, step: jax.Array, state: Any, ranks: int) -> tuple[jax.Array, Any]:
    return _f32(self.deviation) * jax.random.normal(key, (ranks,), jnp.float32), state


class Exponential(NamedTuple):
  """Independent exponential extra time."""

  mean: Any  # [] share of the compute

  def sample(self, key: Key, step: jax.Array, state: Any, ranks: int) -> tuple[jax.Array, Any]:
    return _f32(self.mean) * jax.random.exponential(key, (ranks,), jnp.float32), state


class Heavy(NamedTuple):
  """Independent Pareto extra time (Lomax): P(extra > x) = (1 + x / scale) ** -tail; mean scale /
  (tail - 1)."""

  scale: Any  # [] share of the compute
  tail: Any  # [] above 1; below 2 the variance is infinite

  def sample(self, key: Key, step: jax.Array, state: Any, ranks: int) -> tuple[jax.Array, Any]:
    # exp(E / tail) - 1 with E exponential: without the loss of digits of a power of a uniform
    # number.
    drawn = jax.random.exponential(key, (ranks,), jnp.float32)
    return _f32(self.scale) * jnp.expm1(drawn / _f32(self.tail)), state


class Wandering(NamedTuple):
  """Each rank's speed wanders by itself: AR(1), begun in its stationary state."""

  deviation: Any  # [] share of the compute
  steps: Any  # [] correlation time, steps

  def init(self, key: Key, ranks: int) -> jax.Array:
    return jax.random.normal(key, (ranks,), jnp.float32)

  def sample(self, key: Key, step: jax.Array, state: jax.Array,
             ranks: int) -> tuple[jax.Array, jax.Array]:
    state = _wandered(key, state, self.steps)
    return _f32(self.deviation) * state, state


class Common(NamedTuple):
  """Noise of the whole job, the same on all ranks: AR(1); `steps` 0 for independent steps."""

  deviation: Any  # [] share of the compute
  steps: Any = 0.0  # [] correlation time, steps

  def init(self, key: Key, ranks: int) -> jax.Array:
    return jax.random.normal(key, (), jnp.float32)

  def sample(self, key: Key, step: jax.Array, state: jax.Array,
             ranks: int) -> tuple[jax.Array, jax.Array]:
    state = _wandered(key, state, self.steps)
    return jnp.broadcast_to(_f32(self.deviation) * state, (ranks,)), state


def _wandered(key: Key, state: jax.Array, steps: Any) -> jax.Array:
  """AR(1) of unit variance, one step on; `steps` 0 for independent ones."""
  memory = _f32(steps)
  keep = jnp.where(memory > _ZERO, jnp.exp(-_ONE / jnp.maximum(memory, np.float32(1e-6))), _ZERO)
  return keep * state + jnp.sqrt(_ONE - keep * keep) * jax.random.normal(key, state.shape,
                                                                         jnp.float32)


class Slow(NamedTuple):
  """Ranks that are slower throughout."""

  extra: Any  # [R] share of the compute

  def sample(self, key: Key, step: jax.Array, state: Any, ranks: int) -> tuple[jax.Array, Any]:
    return jnp.broadcast_to(_f32(self.extra), (ranks,)), state


class Drift(NamedTuple):
  """Ranks warm up and slow down: extra_r (1 - exp(-step / steps)), extra_r drawn once, normal, not
  below 0."""

  extra: Any  # [] share of the compute in the end, mean over ranks
  spread: Any  # [] deviation of it over ranks, as a share of it
  steps: Any  # [] time constant, steps

  def init(self, key: Key, ranks: int) -> jax.Array:
    return jnp.maximum(_ONE + _f32(self.spread) * jax.random.normal(key, (ranks,), jnp.float32),
                       _ZERO)

  def sample(self, key: Key, step: jax.Array, state: jax.Array,
             ranks: int) -> tuple[jax.Array, jax.Array]:
    risen = -jnp.expm1(-step.astype(jnp.float32) / _f32(self.steps))
    return _f32(self.extra) * risen * state, state


class Pauses(NamedTuple):
  """Pauses at random: garbage collection, interrupts. Aligned: all ranks in the same steps, as
  often as one did."""

  probability: Any  # [] of one in a step, on each rank
  seconds: Any  # [] length
  # [] whether all ranks pause together: the coupling that alignment removes, removed
  aligned: Any = False

  def sample(self, key: Key, step: jax.Array, state: Any, ranks: int) -> tuple[jax.Array, Any]:
    drawn = jax.random.uniform(key, (ranks,), jnp.float32)
    drawn = jnp.where(jnp.asarray(self.aligned, bool), drawn[0], drawn)
    return jnp.where(drawn < _f32(self.probability), _f32(self.seconds), _ZERO), state


class Schedule(NamedTuple):
  """A pause every so many steps, begun at a step of each rank's own; aligned: all at once.
  Checkpoints, logging."""

  every: Any  # [] steps from one to the next, at least 1
  seconds: Any  # [] length
  aligned: Any = False  # []

  def init(self, key: Key, ranks: int) -> jax.Array:
    return jax.random.uniform(key, (ranks,), jnp.float32)

  def sample(self, key: Key, step: jax.Array, state: jax.Array,
             ranks: int) -> tuple[jax.Array, jax.Array]:
    every = jnp.asarray(self.every, jnp.int32)
    own = jnp.floor(state * every.astype(jnp.float32)).astype(jnp.int32)
    phase = jnp.where(jnp.asarray(self.aligned, bool), np.int32(0), own)
    return (jnp.where((step + phase) % every == every - np.int32(1), _f32(self.seconds), _ZERO),
            state)


class Bursts(NamedTuple):
  """Pauses that come in bursts: now and then a rank falls into a bad state in which it pauses often
  (Gilbert)."""

  begins: Any  # [] probability, in a step, of falling into the bad state
  length: Any  # [] mean steps in it, at least 1
  probability: Any  # [] of a pause in each of its steps
  seconds: Any  # [] length of a pause

  def init(self, key: Key, ranks: int) -> jax.Array:
    bad = _f32(self.begins) / (_f32(self.begins) + _ONE / _f32(self.length))
    return jax.random.uniform(key, (ranks,), jnp.float32) < bad

  def sample(self, key: Key, step: jax.Array, state: jax.Array,
             ranks: int) -> tuple[jax.Array, jax.Array]:
    drawn = jax.random.uniform(key, (2, ranks), jnp.float32)
    state = jnp.where(state, drawn[0] >= _ONE / _f32(self.length), drawn[0] < _f32(self.begins))
    return jnp.where(state & (drawn[1] < _f32(self.probability)), _f32(self.seconds), _ZERO), state


class Traffic(NamedTuple):
  """Others' traffic on the fabric, now on, now off: transfers take 1 / (1 - load) as long while it
  lasts."""

  begins: Any  # [] probability, in a step, that it begins
  length: Any  # [] mean steps it lasts, at least 1
  load: Any  # [] share of the bottleneck link it takes, below 1

  def init(self, key: Key) -> jax.Array:
    begins, ends = _f32(self.begins), _ONE / _f32(self.length)
    return jax.random.uniform(key, (), jnp.float32) * (begins + ends) < begins

  def sample(self, key: Key, state: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns the factor on transfers, [] float32 of at least 1, and the state after it."""
    drawn = jax.random.uniform(key, (), jnp.float32)
    state = jnp.where(state, drawn >= _ONE / _f32(self.length), drawn < _f32(self.begins))
    return jnp.where(state, _ONE / (_ONE - _f32(self.load)), _ONE), state


COMPONENTS = {"normal": Normal, "exponential": Exponential, "heavy": Heavy, "wandering": Wandering,
              "common": Common, "slow": Slow, "drift": Drift, "pauses": Pauses,
              "schedule": Schedule, "bursts": Bursts}
"""By the name they have in a config."""


IN_GAP = (Pauses, Schedule, Bursts)
"""Components that strike the gap before a step, in seconds."""


def init(noise: tuple[Any, ...], key: Key, ranks: int, causes: tuple[str, ...] = (),
         together: int = 1
         ) -> tuple[Any, ...]:
  """Every component's state at the start of a run; `causes` and `together` as for
  `sample`."""
  keys = jax.random.split(key, max(len(noise), 1))
  return tuple(part.init(k, ranks // together if causes and causes[i] else ranks)
               if hasattr(part, "init") else ()
               for i, (part, k) in enumerate(zip(noise, keys, strict=False)))


def sample(noise: tuple[Any, ...], key: Key, step: jax.Array, states: tuple[Any, ...],
           ranks: int, causes: tuple[str, ...] = (), together: int = 1
           ) -> tuple[jax.Array, jax.Array, dict[str, jax.Array], tuple[Any, ...]]:
  """Adds up what all components do in one step.

  Args:
    step: [] int32.
    states: as `init` or the last `sample` left them.
    causes: of each component, or empty; static. "" has none.
    together: neighbouring ranks that pauses with a cause strike together, those of a process;
      static, divides R.

  Returns:
    [R] float32 share of the compute to add, [R] float32 s of gap to add, [R] float32 s of that by
    cause, and the states after the step.
  """
  share, gap = jnp.zeros((ranks,), jnp.float32), jnp.zeros((ranks,), jnp.float32)
  by_cause: dict[str, jax.Array] = {}
  if not noise:
    return share, gap, by_cause, states
  keys = jax.random.split(jax.random.fold_in(key, step), len(noise))
  after = []
  for place, (part, own, state) in enumerate(zip(noise, keys, states, strict=True)):
    cause = causes[place] if causes else ""
    extra, state = part.sample(own, step, state, ranks // together if cause else ranks)
    if cause:
      extra = jnp.repeat(extra, together)
      by_cause[cause] = by_cause.get(cause, _ZERO) + extra
    share, gap = (share, gap + extra) if isinstance(part, IN_GAP) else (share + extra, gap)
    after.append(state)
  return share, gap, by_cause, tuple(after)


def _f32(value: Any) -> jax.Array:
  return jnp.asarray(value, jnp.float32)
