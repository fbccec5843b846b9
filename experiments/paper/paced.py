"""Worlds with the live pacers in them: two jobs on one trunk, many worlds at a time.

As `jaxpace.simulation.jobs.several`, whose draws, pacers and step times these are where the trunk
loses nothing (a test holds this). There a step is closed, pacers and all, wherever any of many
worlds has an event; here events are played, a few numbers each, until some job of a world has ended
its step, and only then are steps closed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from experiments.paper import world as worlds
from experiments.paper.quick import EDGE
from jaxpace.core.types import Pacer
from jaxpace.simulation.job import Draft, Job, JobState, Mechanics, Shape, mechanics

_ZERO = np.float32(0)


class Outcome(NamedTuple):
  """Of one world at one size."""

  mean: Any  # [] mean step, in units of compute
  cv: Any  # [] of the step
  cost: Any  # [] mean L of the delays, as a share of the mean step
  delay: Any  # [] mean delay, as a share of the mean step


Simulate = Callable[[jax.Array, worlds.World, worlds.Couplings], Outcome]


class _Events(NamedTuple):
  """Both jobs between two events. J = 2 jobs, B buckets."""

  sending: jax.Array  # [J] bool, else waiting for the last rank
  bucket: jax.Array  # [J] int32
  left: jax.Array  # [J] s of waiting, or of sending at full speed
  clock: jax.Array  # [J] s since the last exit
  exits: jax.Array  # [J, B] s
  over: jax.Array  # [J] bool: has ended its step


def simulator(nodes: int, steps: int, seeds: int, pauses: tuple[float, float],
              ours: Pacer | None = None, theirs: Pacer | None = None) -> Simulate:
  """Makes the simulation of many worlds at one size: a function (key, worlds [W], couplings []) ->
  outcomes [W].

  The same key gives every world the same draws.

  Args:
    nodes: N.
    steps: of each run, the first `WARMUP` not counted.
    seeds: runs of each world, from random starts of the neighbour.
    pauses: of one in a step on each rank, and its seconds.
    ours, theirs: pacers of the job and its neighbour.
  """
  parts = [mechanics(shape, pacer, buckets=worlds.BUCKETS, max_delay=10.0, by_rank=False)
           for shape, pacer in ((Shape(nodes * worlds.PER_NODE, worlds.PER_NODE), ours),
                                (Shape(1, overlap=False), theirs))]

  def one(key: jax.Array, world: worlds.World, couplings: worlds.Couplings) -> tuple[Any, ...]:
    first, second = jax.random.split(key)
    start = jax.random.uniform(second) * worlds.alone(world, nodes)
    kept = _play(parts, jax.random.split(first, 2),
                 [worlds.job(world, nodes, pauses, couplings), worlds.neighbour(world, nodes)],
                 worlds.together(world, couplings), start.astype(jnp.float32),
                 steps)[:, worlds.WARMUP:]
    mean = jnp.mean(kept[0])
    return mean, jnp.std(kept[0]) / mean, jnp.mean(kept[1]) / mean, jnp.mean(kept[2]) / mean

  def world_of(key: jax.Array, world: worlds.World, couplings: worlds.Couplings) -> Outcome:
    each = jax.vmap(one, in_axes=(0, None, None))(jax.random.split(key, seeds), world, couplings)
    return Outcome(*(jnp.mean(values) for values in each))

  return jax.jit(jax.vmap(world_of, in_axes=(None, 0, None)))


def _play(parts: list[Mechanics], keys: jax.Array, jobs: list[Job], shared: jax.Array,
          start: jax.Array, steps: int
          ) -> jax.Array:
  """[3, steps] of the first job: step time, cost, mean delay."""
  states = [part.init(key, job) for part, key, job in zip(parts, keys, jobs, strict=True)]
  drafts = [part.draw(key, job, state)
            for part, key, job, state in zip(parts, keys, jobs, states, strict=True)]
  drafts[1] = drafts[1]._replace(ready=drafts[1].ready + start)
  zero = jnp.zeros((2,), jnp.float32)
  events = _Events(jnp.zeros((2,), bool), jnp.zeros((2,), jnp.int32), _ready(drafts)[:, 0], zero,
                   jnp.zeros((2, worlds.BUCKETS), jnp.float32), jnp.zeros((2,), bool))

  def turn(carry: Any) -> Any:
    states, drafts, events, kept = carry
    events = _until_over(drafts, events, shared)
    closed = [_close(part, key, job, state, draft, exits, over)
              for part, key, job, state, draft, exits, over in zip(
                  parts, keys, jobs, states, drafts, events.exits, events.over, strict=True)]
    row = closed[0][2]
    place = jnp.where(events.over[0], states[0].step, np.int32(steps))
    kept = kept.at[:, place].set(jnp.stack([row.step_time, row.cost, row.delay]), mode="drop")
    drafts = [draft for _, draft, _ in closed]
    begun = jnp.where(events.over, _ready(drafts)[:, 0], events.left)
    events = events._replace(left=begun, clock=jnp.where(events.over, _ZERO, events.clock))
    return [state for state, _, _ in closed], drafts, events, kept

  carry = (states, drafts, events, jnp.zeros((3, steps), jnp.float32))
  return jax.lax.while_loop(lambda c: c[0][0].step < np.int32(steps), turn, carry)[-1]


def _ready(drafts: list[Draft]) -> jax.Array:
  """When the last rank is ready: [J, B] s."""
  return jnp.stack([jnp.max(draft.ready, axis=0) for draft in drafts])


def _until_over(drafts: list[Draft], events: _Events, shared: jax.Array) -> _Events:
  """Plays until one of the jobs has sent its last bucket."""
  ready, work = _ready(drafts), jnp.stack([draft.transfers for draft in drafts])
  buckets = work.shape[1]
  slots, each = jnp.arange(buckets, dtype=jnp.int32), jnp.arange(2, dtype=jnp.int32)

  def turn(e: _Events) -> _Events:
    speed = jnp.where(e.sending & jnp.all(e.sending), shared, np.float32(1))
    wait = jnp.min(e.left / speed)
    clock, left = e.clock + wait, e.left - wait * speed
    ended = left <= EDGE
    sent = ended & e.sending
    exits = jnp.where(sent[:, None] & (slots == e.bucket[:, None]), clock[:, None], e.exits)
    over = sent & (e.bucket == np.int32(buckets - 1))
    bucket = jnp.where(over, np.int32(0), e.bucket + sent.astype(jnp.int32))
    left = jnp.where(sent, jnp.maximum(ready[each, bucket] - clock, _ZERO),
                     jnp.where(ended, work[each, bucket], left))
    return _Events(jnp.where(ended, ~e.sending, e.sending), bucket, left, clock, exits, over)

  begin = events._replace(over=jnp.zeros((2,), bool))
  return jax.lax.while_loop(lambda e: ~jnp.any(e.over), turn, begin)


def _close(part: Mechanics, key: jax.Array, job: Job, state: JobState, draft: Draft,
           exits: jax.Array, over: jax.Array
           ) -> tuple[JobState, Draft, Any]:
  """Ends a job's step and draws its next one, if it is over."""
  begun = jnp.concatenate([jnp.zeros((1,), jnp.float32), exits[:-1]])
  after, row = part.finish(state, draft, jnp.maximum(draft.ready, begun[None]), exits)
  following = part.draw(key, job, after)
  state, draft = jax.tree.map(lambda new, old: jnp.where(over, new, old), (after, following),
                              (state, draft))
  return state, draft, row
