"""Several jobs on one fabric, each with ranks, noise and a pacer of its own: their collectives
share the links.

A collective is a fluid in stretches, one for each set of messages that are on the way together: on
a quiet fabric it goes at full speed, takes a known share of every link meanwhile, and slows down
where others want more than is left, max-min fairly (`jaxpace.simulation.sharing`), by weights that
stay as they are while a stretch is sent. All messages of a stretch slow down alike. No packets, no
round trips, no losses; TCP's attraction, which makes the weight fall with what was sent, is
modelled on a single link for docs/measurements/two_jobs_simulated.md.

Event-driven inside one compiled loop, from one instant at which something begins or ends to the
next; times are float32 seconds since the job's last exit, never since the run began.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxpace.core.types import Pacer
from jaxpace.simulation.job import Draft, Job, JobState, Mechanics, Shape, Steps, mechanics
from jaxpace.simulation.sharing import progress

_ZERO, _ONE = np.float32(0), np.float32(1)
_EDGE = np.float32(1e-7)
"""Seconds of work below which a phase is done: what rounding leaves."""


class LinkShares(NamedTuple):
  """What the jobs' collectives want of the links they share: J jobs, L links, and P stretches of a
  collective. Float32."""

  # [J, P, L] share of a link that a job's collective takes at full speed; 0 of all as if each job
  # had the fabric to itself
  usage: Any
  # [J, P] of each job where they compete; equal for equal shares of speed
  weights: Any
  # [J, P] of each collective's own time the share that each stretch takes; the rows sum to 1,
  # unused ones last, 0
  parts: Any


RunJobs = Callable[[jax.Array, Sequence[Job], LinkShares, Any, Any], tuple[Steps, ...]]
"""Pure, for `jax.jit` and `jax.vmap`: (key, jobs, shares, starts [J] s idle before the first step,
last [J] steps) -> what happened to each job: leaves [steps, ...], NaN in rows that a job never
reached. A job leaves after its `last` steps, the others go on."""


class _Playing(NamedTuple):
  """One job between two events."""

  state: JobState
  draft: Draft
  idle: jax.Array  # [] bool, before its first step, to which that time doesn't count
  sending: jax.Array  # [] bool, else waiting for its last rank
  bucket: jax.Array  # [] int32
  stretch: jax.Array  # [] int32, of the bucket
  left: jax.Array  # [] s of waiting, or of sending the stretch at full speed
  clock: jax.Array  # [] s since the last exit
  exits: jax.Array  # [S] s, of the buckets sent in this step
  steps: Steps


def several(shapes: Sequence[Shape], pacers: Sequence[Pacer | None], *, buckets: Sequence[int],
            steps: int, max_delay: float = 0.25, by_rank: bool = False) -> RunJobs:
  """Prepares jobs that share a fabric.

  Args:
    buckets: collectives a step of each job.
    steps: kept of each job; the run ends once all that have not left have done so many.
    max_delay: s, the limit of `jaxpace.instrument`.

  Raises:
    ValueError: the lists differ in length, or as for `jaxpace.simulation.job.simulation`.
  """
  if not len(shapes) == len(pacers) == len(buckets) or not shapes:
    raise ValueError(f"There are {len(shapes)} shapes, {len(pacers)} pacers and {len(buckets)} "
                     "numbers of buckets: one of each is needed for every job.")
  parts = [mechanics(shape, pacer, buckets=count, max_delay=max_delay, by_rank=by_rank)
           for shape, pacer, count in zip(shapes, pacers, buckets, strict=True)]

  def run(key: jax.Array, jobs: Sequence[Job], shares: LinkShares, starts: Any,
          last: Any) -> tuple[Steps, ...]:
    keys = jax.random.split(key, len(parts))
    starts, last = jnp.asarray(starts, jnp.float32), jnp.asarray(last, jnp.int32)
    usage, weights, pieces = map(jnp.asarray, shares)
    # Each bucket ends its wait and its stretches; some slack for phases that rounding ends in two
    # turns.
    most = np.int32(min(2 * steps * (1 + (1 + pieces.shape[1]) * sum(buckets)) * len(parts),
                        2**31 - 1))
    numbers = np.arange(len(parts), dtype=np.int32)
    playing = tuple(_begin(part, own, job, start, steps)
                    for part, own, job, start in zip(parts, keys, jobs, starts, strict=True))

    def turn(carry: tuple[tuple[_Playing, ...],
                          jax.Array]) -> tuple[tuple[_Playing, ...], jax.Array]:
      all_jobs, turns = carry
      there = jnp.stack([p.state.step < last[j] for j, p in enumerate(all_jobs)])
      sending = jnp.stack([p.sending for p in all_jobs]) & there
      at = jnp.stack([p.stretch for p in all_jobs])
      speed = jnp.where(sending, progress(usage[numbers, at], weights[numbers, at], sending), _ONE)
      left = jnp.stack([p.left for p in all_jobs])
      wait = jnp.min(jnp.where(there, left / speed, np.float32(np.inf)))
      return tuple(
          _advance(part, own, job, p, wait, speed[j], there[j], steps, pieces[j])
          for j, (part, own, job, p) in enumerate(zip(parts, keys, jobs, all_jobs,
                                                      strict=True))), turns + np.int32(1)

    def unfinished(carry: tuple[tuple[_Playing, ...], jax.Array]) -> jax.Array:
      all_jobs, turns = carry
      going = [p.state.step < jnp.minimum(last[j], np.int32(steps))
               for j, p in enumerate(all_jobs)]
      return jnp.any(jnp.stack(going)) & (turns < most)

    done, _ = jax.lax.while_loop(unfinished, turn, (playing, jnp.int32(0)))
    return tuple(p.steps for p in done)

  return run


def _begin(part: Mechanics, key: jax.Array, job: Job, start: jax.Array, steps: int) -> _Playing:
  state = part.init(key, job)
  draft = part.draw(key, job, state)
  _, row = jax.eval_shape(part.finish, state, draft, draft.ready, draft.transfers)
  blank = jax.tree.map(lambda leaf: jnp.full((steps, *leaf.shape), np.float32(np.nan), leaf.dtype),
                       row)
  idle = start > _ZERO
  left = jnp.where(idle, start, jnp.max(draft.ready[:, 0]))
  return _Playing(state, draft, idle, jnp.bool_(False), jnp.int32(0), jnp.int32(0), left,
                  jnp.float32(0), jnp.zeros_like(draft.transfers), blank)


def _advance(part: Mechanics, key: jax.Array, job: Job, p: _Playing, wait: jax.Array,
             speed: jax.Array, there: jax.Array, steps: int, pieces: jax.Array) -> _Playing:
  """One job after `wait` seconds in which it went at `speed`; `pieces` [P] are the stretches of its
  collectives."""
  clock = p.clock + wait
  left = p.left - wait * speed
  ended = (left <= _EDGE) & there
  # Stretches that are not used come last, so the next one ends the collective if it is such a one.
  following = p.stretch + np.int32(1)
  more = jnp.where(following < np.int32(len(pieces)), pieces.at[following].get(mode="clip"), _ZERO)
  passed = ended & p.sending & (more > _ZERO)
  sent = ended & p.sending & ~passed
  slots = jnp.arange(len(p.exits), dtype=jnp.int32)
  exits = jnp.where(sent & (slots == p.bucket), clock, p.exits)
  over = sent & (p.bucket == np.int32(len(p.exits) - 1))

  def close(_: None) -> tuple[JobState, Draft, Steps]:
    begun = jnp.concatenate([jnp.zeros((1,), jnp.float32), exits[:-1]])
    state, row = part.finish(p.state, p.draft, jnp.maximum(p.draft.ready, begun[None]), exits)
    return state, part.draw(key, job, state), row

  def go_on(_: None) -> tuple[JobState, Draft, Steps]:
    shapes = jax.eval_shape(close, None)[2]
    return p.state, p.draft, jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)

  state, draft, row = jax.lax.cond(over, close, go_on, None)
  place = jnp.where(over, p.state.step, np.int32(steps))
  kept = jax.tree.map(lambda old, new: old.at[place].set(new, mode="drop"), p.steps, row)

  began = ended & p.idle
  clock = jnp.where(over | began, _ZERO, clock)
  bucket = jnp.where(over, np.int32(0), p.bucket + sent.astype(jnp.int32))
  ready = jnp.max(jax.lax.dynamic_index_in_dim(draft.ready, bucket, axis=1, keepdims=False))
  waiting = jnp.maximum(ready - clock, _ZERO)
  work = jax.lax.dynamic_index_in_dim(draft.transfers, bucket, keepdims=False)
  stretch = jnp.where(sent, np.int32(0), p.stretch + passed.astype(jnp.int32))
  # What rounding left of one stretch, or took beyond it, is the next one's.
  begun = jnp.maximum(work * pieces[stretch] + jnp.where(passed, left, _ZERO), _ZERO)
  left = jnp.where(sent | began, waiting, jnp.where(ended, begun, left))
  sending = jnp.where(sent | began, False, p.sending | ended)
  return _Playing(state, draft, p.idle & ~began, sending, bucket, stretch, left, clock, exits, kept)
