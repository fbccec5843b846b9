"""Bare worlds, hundreds at a time: the simulator's own draws made beforehand, then only its events,
all sizes at once.

Without pacers a step's draws do not depend on the step before, so they need not wait for it. What
is left is one number a bucket, when its last rank is ready, and the trunk. Step times are those of
`jaxpace.simulation.jobs.several` where the trunk loses nothing (a test holds this), for a small
part of its time.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from experiments.paper import world as worlds
from jaxpace.simulation.job import Job, Shape, mechanics

EDGE = np.float32(1e-7)
"""s, as in jaxpace.simulation.jobs: what rounding leaves of a phase."""
_MORE = 2
"""Steps drawn for the neighbour for each of the job's; after that they begin again."""


class Moments(Protocol):
  """Worlds [W] -> mean step and CV at N sizes, [W, N] each."""

  def __call__(self, key: jax.Array, made: worlds.World, couplings: worlds.Couplings = ..., /
               ) -> tuple[np.ndarray, np.ndarray]: ...


class Drafts(NamedTuple):
  """A job's steps as drawn. K steps, B buckets."""

  ready: Any  # [K, B] s after the last exit, the last rank's
  transfers: Any  # [K, B] s


def drafts(shape: Shape, steps: int, key: jax.Array, job: Job,
           buckets: int = worlds.BUCKETS) -> Drafts:
  """Draws the steps of a job without a pacer, as `jaxpace.simulation.jobs.several` does."""
  parts = mechanics(shape, None, buckets=buckets, max_delay=1.0, by_rank=False)

  def step(state: Any, _: None) -> tuple[Any, Drafts]:
    draft = parts.draw(key, job, state)
    after = state._replace(step=state.step + np.int32(1), noise=draft.noise, traffic=draft.traffic)
    return after, Drafts(jnp.max(draft.ready, axis=0), draft.transfers)

  return jax.lax.scan(step, parts.init(key, job), None, length=steps)[1]


def play(ours: Drafts, theirs: Drafts, start: jax.Array, shared: jax.Array) -> jax.Array:
  """Plays two jobs on one trunk.

  Args:
    ours: [K, B].
    theirs: [K', B], repeated.
    start: [] s, when the neighbour begins.
    shared: [] speed of each while both send, as a share of its own.

  Returns:
    [K] s, our steps.
  """
  steps, buckets = ours.ready.shape
  count = jnp.array([steps, theirs.ready.shape[0]], jnp.int32)
  ready = jnp.concatenate([ours.ready.ravel(), theirs.ready.ravel()])
  work = jnp.concatenate([ours.transfers.ravel(), theirs.transfers.ravel()])
  base = jnp.array([0, steps * buckets], jnp.int32)
  zero, one = jnp.zeros((2,), jnp.int32), jnp.ones((2,), jnp.float32)

  def unfinished(carry: Any) -> jax.Array:
    return ~carry[-1]

  def turn(carry: Any) -> Any:
    step, bucket, sending, left, clock, _, _ = carry
    speed = jnp.where(sending & jnp.all(sending), shared, one)
    wait = jnp.min(left / speed)
    clock, left = clock + wait, left - wait * speed
    ended = left <= EDGE
    sent = ended & sending
    over = sent & (bucket == np.int32(buckets - 1))
    took = clock[0]
    step, clock = step + over.astype(jnp.int32), jnp.where(over, np.float32(0), clock)
    bucket = jnp.where(over, zero, bucket + sent.astype(jnp.int32))
    at = base + (step % count) * np.int32(buckets) + bucket
    left = jnp.where(sent, jnp.maximum(ready[at] - clock, np.float32(0)),
                     jnp.where(ended, work[at], left))
    return step, bucket, jnp.where(ended, ~sending, sending), left, clock, took, over[0]

  def one_step(carry: Any, _: None) -> tuple[Any, jax.Array]:
    # A loop of its own for each step: with all steps in one, each event would copy all times.
    carry = jax.lax.while_loop(unfinished, turn, (*carry, jnp.float32(0), jnp.zeros((), bool)))
    return carry[:-2], carry[-2]

  first = ready[base] + jnp.stack([jnp.float32(0), start])
  begin = (zero, zero, jnp.zeros((2,), bool), first, jnp.zeros((2,), jnp.float32))
  return jax.lax.scan(one_step, begin, None, length=steps)[1]


def simulator(steps: int, seeds: int, pauses: tuple[float, float],
              sizes: Sequence[int] = worlds.NODES) -> Moments:
  """Makes a function (key, worlds [W], couplings) -> mean step and CV at all sizes, [W, N] each.

  The same key gives every world the same draws, those of `paced.simulator`.

  Args:
    steps: of each run, the first `WARMUP` not counted.
    seeds: runs of each world, from random starts of the neighbour.
    pauses: of one in a step on each rank, and its seconds.
    sizes: N numbers of nodes.
  """

  def drawn(nodes: int, couplings: worlds.Couplings, key: jax.Array, world: worlds.World
            ) -> tuple[Drafts, Drafts, jax.Array]:
    first, second = jax.random.split(key)
    keys = jax.random.split(first, 2)
    ours = drafts(Shape(nodes * worlds.PER_NODE, worlds.PER_NODE), steps, keys[0],
                  worlds.job(world, nodes, pauses, couplings))
    theirs = drafts(Shape(1, overlap=False), _MORE * steps, keys[1], worlds.neighbour(world, nodes))
    return ours, theirs, jax.random.uniform(second) * worlds.alone(world, nodes)

  def times(key: jax.Array, world: worlds.World, couplings: worlds.Couplings) -> jax.Array:
    keys = jax.random.split(key, seeds)
    each = [jax.vmap(jax.vmap(functools.partial(drawn, n, couplings), in_axes=(0, None)),
                     in_axes=(None, 0))
            for n in sizes]
    made = [drawn_all(keys, world) for drawn_all in each]
    ours, theirs, start = jax.tree.map(lambda *leaves: jnp.stack(leaves, axis=1), *made)
    shared = worlds.together(world, couplings)
    lanes = jax.vmap(jax.vmap(jax.vmap(play, in_axes=(0, 0, 0, None)), in_axes=(0, 0, 0, None)))
    return lanes(ours, theirs, start, shared)  # [W, N, seeds, steps]

  run = jax.jit(times)

  def moments(key: jax.Array, made: worlds.World, couplings: worlds.Couplings = worlds.ON, /
              ) -> tuple[np.ndarray, np.ndarray]:
    kept = np.asarray(run(key, made, jax.tree.map(jnp.float32, couplings)))[
        ..., worlds.WARMUP:].astype(np.float64)
    mean = kept.mean(axis=-1)
    return mean.mean(axis=-1), (kept.std(axis=-1) / mean).mean(axis=-1)

  return moments
