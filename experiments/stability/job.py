"""A job of thousands of accelerators over days: groups that share a model, barriers, pauses,
thermal drift.

A group of G accelerators holds the model between them and meets at B barriers in each step; R such
groups average their gradients once a step, or once every H steps. A group is a rank of
`jaxpace.simulation.job`; inside it

    share = mean over barriers of max over members of (jitter + level),

jitter normal and new at each barrier, level the member's own: thermal drift since the job started,
and speed that wanders. So the maximum over a group's members, then that over groups, is what
everybody waits for.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxpace.simulation import allreduce
from jaxpace.simulation import noise as noises
from jaxpace.simulation.job import Job, Shape, simulation


class Machine(NamedTuple):
  """The accelerators and what strikes them. Seconds; shares are of a step's compute."""

  group: int  # G accelerators that hold one model
  barriers: int  # B in each step, inside a group
  compute: float  # s of a step, forward and backward, without noise
  gap: float  # s between steps
  gradient: float  # bytes that each accelerator averages with its like in the other groups
  rate: float  # B/s of its card
  latency: float  # s a message
  jitter: float  # deviation of one accelerator's step, independent
  drift: float  # share by which a warm accelerator is slower, mean
  spread: float  # deviation of that over accelerators, as a share of it
  warm: float  # s, time constant of the drift
  wander: float  # deviation of each accelerator's speed, wandering
  memory: float  # s, its correlation time
  pause: float  # s of a pause of one accelerator
  pause_rate: float  # pauses a second of one accelerator


class Policy(NamedTuple):
  """What can be chosen without touching any component."""

  interval: float  # s of work between two checkpoints
  aligned: bool = False  # whether all pause in the same step
  local: int = 1  # H, steps between two averages; above 1 training is another


class Members(NamedTuple):
  """Groups of members that meet several times a step; a component of `jaxpace.simulation.noise`."""

  jitter: Any  # [] deviation at one barrier, share of the compute of its stretch
  drift: Any  # []
  spread: Any  # []
  warm: Any  # [] steps of the job simulated, which are H of the machine's
  wander: Any  # []
  memory: Any  # [] likewise
  layout: Any  # [B H, G] of anything: its shape says how many barriers and members

  def init(self, key: jax.Array, ranks: int) -> Any:
    first, second = jax.random.split(key)
    shape = (ranks, self.layout.shape[1])
    extra = jnp.maximum(np.float32(1) + _f32(self.spread)
                        * jax.random.normal(first, shape, jnp.float32), np.float32(0))
    return extra, jax.random.normal(second, shape, jnp.float32)

  def sample(self, key: jax.Array, step: jax.Array, state: Any,
             ranks: int) -> tuple[jax.Array, Any]:
    extra, place = state
    first, second = jax.random.split(key)
    keep = jnp.exp(np.float32(-1) / _f32(self.memory))
    place = (keep * place + jnp.sqrt(np.float32(1) - keep * keep)
             * jax.random.normal(first, place.shape, jnp.float32))
    risen = -jnp.expm1(-step.astype(jnp.float32) / _f32(self.warm))
    level = _f32(self.drift) * risen * extra + _f32(self.wander) * place
    drawn = jax.random.normal(second, (self.layout.shape[0], *place.shape), jnp.float32)
    slowest = jnp.max(_f32(self.jitter) * drawn + level, axis=2)
    return jnp.mean(slowest, axis=0), (extra, place)


class Series(NamedTuple):
  """Runs from a cold start. S runs, K averages of H steps each; seconds a step, the mean of the
  H."""

  times: np.ndarray  # [S, K]
  # [S, K] mean over groups of what they compute; the rest is waiting, pausing and transfer
  busy: np.ndarray


def ideal(machine: Machine) -> float:
  """s of a step of one group without noise and without others to average with."""
  return machine.compute + machine.gap


def transfer(machine: Machine, groups: int) -> float:
  """s of averaging over groups: a ring, for each place in the group its own."""
  return allreduce.ring(groups, machine.gradient, machine.latency, 1 / machine.rate)


def pausing(machine: Machine, aligned: bool) -> float:
  """Probability of a pause of a group in a step: of any of its members; aligned: of all
  together."""
  one = -np.expm1(-machine.pause_rate * ideal(machine))
  return float(one if aligned else -np.expm1(machine.group * np.log1p(-one)))


def job(machine: Machine, groups: int, policy: Policy) -> Job:
  """The job whose ranks are groups and whose steps are H of the machine's."""
  every, step = policy.local, ideal(machine)
  members = Members(
      np.float32(machine.jitter * machine.barriers**0.5), np.float32(machine.drift),
      np.float32(machine.spread), np.float32(machine.warm / step / every),
      np.float32(machine.wander), np.float32(machine.memory / step / every),
      np.zeros((machine.barriers * every, machine.group), np.float32))
  pauses = noises.Pauses(
      np.float32(pausing(machine, policy.aligned)), np.float32(machine.pause),
      np.bool_(policy.aligned))
  return Job(
      forward=np.float32(0), backward=np.float32(machine.compute * every), update=np.float32(0),
      gap=np.float32(machine.gap * every),
      transfers=np.array([transfer(machine, groups)], np.float32),
      noise=(members, *[pauses] * every))


def series(machine: Machine, groups: int, policy: Policy, steps: int, runs: int,
           seed: int) -> Series:
  """Simulates runs from a cold start, all at once.

  Args:
    machine: what is simulated.
    groups: R.
    policy: its checkpoints don't matter here: see `experiments.stability.survival`.
    steps: of each run; a multiple of H.
    runs: S.
    seed: the same one, the same numbers.

  Raises:
    ValueError: steps are no multiple of H.
  """
  every = policy.local
  if every < 1 or steps % every:
    raise ValueError(f"steps={steps} must be a multiple of local={every}, which is 1 or more.")
  run = _compiled(groups, steps // every)
  times, busy = run(jax.random.split(jax.random.key(seed), runs), job(machine, groups, policy))
  return Series(np.asarray(times, np.float64) / every, np.asarray(busy, np.float64) / every)


@functools.lru_cache(maxsize=8)
def _compiled(groups: int, steps: int) -> Callable[[jax.Array, Job], tuple[jax.Array, jax.Array]]:
  """Many runs at once; numbers of a job may change without compiling anew."""
  plan = simulation(Shape(groups))

  def one(key: jax.Array, made: Job) -> tuple[jax.Array, jax.Array]:
    _, done = plan.run(key, made, plan.init(key, made), steps)
    return done.step_time, done.compute

  return jax.jit(jax.vmap(one, in_axes=(0, None)))


def _f32(value: Any) -> jax.Array:
  return jnp.asarray(value, jnp.float32)
