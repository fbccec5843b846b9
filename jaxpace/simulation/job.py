"""One synchronous data-parallel job, step by step: compute with noise, buckets behind the backward
pass, a pacer.

All ranks leave a collective together (the exits of a barrier). With B buckets, bucket b of rank r
is ready

    ready[r, b] = gap[r] + d[r] + (forward + backward (b + 1) / B) (1 + share[r]) + polling[r]

after the last exit of the step before, the update counted into the gap; without overlap all are
ready when the backward pass is done. The collectives run one after the other, each once its last
rank is there:

    enter[r, b] = max(ready[r, b], exit[b - 1])        exit[b] = max over r of enter[r, b] + transfer[b]

Couplings between ranks are named and off by default: `polling` (below), aligned pauses
(`jaxpace.simulation.noise`). With both off nothing a rank does makes another one faster, and no
pacer can gain.
"""  # noqa: E501

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.extend.core
import jax.numpy as jnp
import numpy as np

from jaxpace.core import pacing
from jaxpace.core.durations import bounded
from jaxpace.core.types import Decision, Observation, Pacer
from jaxpace.simulation import noise as noises

_ZERO, _ONE, _NAN = np.float32(0), np.float32(1), np.float32(np.nan)
_LEAST = np.float32(0.05)
"""Compute never falls below this share of its mean, however the noise falls."""


class Shape(NamedTuple):
  """What is static about a job: changing it compiles anew."""

  ranks: int  # R
  per_node: int = 1  # ranks that share a host, for `polling`; it divides R
  overlap: bool = True  # whether buckets are sent while the backward pass goes on
  # of each noise component: what its pauses are, "" where not known; empty for none
  causes: tuple[str, ...] = ()
  per_process: int = 1  # ranks of a process: a pause with a cause strikes all of them; it divides R


class Job(NamedTuple):
  """The numbers of a job, a pytree: any may be traced, and given a leading axis for `jax.vmap`.
  Seconds."""

  forward: Any  # [] s
  backward: Any  # [] s
  update: Any  # [] s, after the last collective
  gap: Any  # [] s, between steps
  transfers: Any  # [S] s, each bucket's own time on a quiet fabric
  noise: tuple[Any, ...] = ()  # components of `jaxpace.simulation.noise`
  traffic: Any = None  # `noise.Traffic`, or None
  # [] s that a rank loses for each second that all others of its host wait for it by polling
  polling: Any = 0.0


class Steps(NamedTuple):
  """What happened, step by step: float32 seconds. K steps, R ranks, S buckets.

  Kept by rank if asked for; else what is [K, R] here is [K], the mean over ranks, and `enter`,
  `info` are too. Where not all are waited for, a rank that was dropped has NaN for `enter`;
  `compute` and `gap` are what it did until then.
  """

  step_time: Any  # [K] last exit to last exit
  cost: Any  # [K] L = max(A + d) - max(A): by how much delays held the step back
  # [K] mean over ranks of how much earlier than the last one they reached the first collective
  earliness: Any
  transfers: Any  # [K, S]
  exit: Any  # [K, S] after the last exit of the step before
  enter: Any  # [K, R, S] likewise
  compute: Any  # [K, R] forward and backward, noise and polling included
  gap: Any  # [K, R] pauses included, without the update
  delay: Any  # [K, R] applied
  asked: Any  # [K, R] asked for by the pacer
  polling: Any  # [K, R] lost to others' polling
  info: dict[str, Any]  # [K, R] the pacer's columns, decided after the step
  caused: dict[str, Any]  # [K, R] of `gap`, what has a cause


class JobState(NamedTuple):
  """Carried from step to step, and from one part of a run to the next."""

  step: jax.Array  # [] int32
  pacer: Any
  asked: jax.Array  # [R] s, for the step to come
  step_time: jax.Array  # [] s, of the step before; NaN unknown
  # [S] s, transfers as the ranks found them in the step before, mean over ranks; NaN unknown
  found: jax.Array
  noise: Any
  traffic: Any


class Draft(NamedTuple):
  """A step as drawn, before it meets the others: what a rank is busy with, not yet what it waits
  for."""

  ready: jax.Array  # [R, S] s after the last exit: when each bucket could be sent
  transfers: jax.Array  # [S] s, on a fabric that no other job uses
  delay: jax.Array  # [R] s, applied
  compute: jax.Array  # [R] s, with noise and polling
  gap: jax.Array  # [R] s
  polling: jax.Array  # [R] s
  noise: Any
  traffic: Any
  caused: dict[str, jax.Array]  # [R] s


class Mechanics(NamedTuple):
  """The parts of one step, for whatever plays the collectives in between. All pure."""

  init: Callable[[jax.Array, Job], JobState]
  draw: Callable[[jax.Array, Job, JobState], Draft]
  """(key, job, state) -> the step to come."""
  finish: Callable[[JobState, Draft, jax.Array, jax.Array], tuple[JobState, Steps]]
  """(state, draft, enter [R, S], exit [S]) -> the state after the step, and what happened in it."""


def simulation(shape: Shape, pacer: Pacer | None = None, *, buckets: int = 1,
               max_delay: float = 0.25, by_rank: bool = False
               ) -> tuple[Callable[[jax.Array, Job], JobState],
                          Callable[[jax.Array, Job, JobState, int], tuple[JobState, Steps]]]:
  """Prepares the simulation of a job that has its fabric to itself.

  Args:
    shape: what is static.
    pacer: the live one, unchanged; None for bare steps.
    buckets: S, the length of a job's `transfers`.
    max_delay: s, the limit of `jaxpace.instrument`: longer delays are cut.
    by_rank: keep every rank's times rather than means over ranks: R times the memory.

  Returns:
    Two pure functions, for `jax.jit` and `jax.vmap`: (key, job) -> the state before the first step;
    and (key, job, state, steps) -> the state after, and what happened. `steps` is static.

  Raises:
    ValueError: the shape is impossible, or the pacer doesn't return what a pacer must.
  """
  parts = mechanics(shape, pacer, buckets=buckets, max_delay=max_delay, by_rank=by_rank)

  def step(key: jax.Array, job: Job, state: JobState) -> tuple[JobState, Steps]:
    draft = parts.draw(key, job, state)
    enters, exits = [], []
    leave = jnp.float32(0)
    for b in range(buckets):
      enters.append(jnp.maximum(draft.ready[:, b], leave))
      leave = jnp.max(enters[-1]) + draft.transfers[b]
      exits.append(leave)
    return parts.finish(state, draft, jnp.stack(enters, axis=1), jnp.stack(exits))

  def run(key: jax.Array, job: Job, state: JobState, steps: int) -> tuple[JobState, Steps]:
    return jax.lax.scan(lambda carry, _: step(key, job, carry), state, length=steps)

  return parts.init, run


def mechanics(shape: Shape, pacer: Pacer | None, *, buckets: int, max_delay: float,
              by_rank: bool) -> Mechanics:
  """Prepares the parts of a step; arguments as for `simulation`."""
  ranks = shape.ranks
  if ranks < 1 or shape.per_node < 1 or ranks % shape.per_node:
    raise ValueError(f"per_node={shape.per_node} must divide ranks={ranks}, both at least 1.")
  if shape.per_process < 1 or ranks % shape.per_process:
    raise ValueError(f"per_process={shape.per_process} must divide ranks={ranks}.")
  numbers = jnp.arange(ranks, dtype=jnp.int32)
  paced = vmap_ranks(pacer, ranks, buckets) if pacer is not None else None
  # The share of the backward pass after which each bucket is ready.
  done = np.arange(1, buckets + 1, dtype=np.float32) / np.float32(buckets)
  done = done if shape.overlap else np.ones_like(done)
  most = np.float32(max_delay)
  # The last bucket carries what is shared.
  over = pacing.over_before(buckets - 1, buckets)
  observe = jax.vmap(pacing.observe, in_axes=(None, 0, None, None, 0, None, None),
                     out_axes=(jax.tree.map(lambda own: 0 if own else None, OWN), 0))

  def init(key: jax.Array, job: Job) -> JobState:
    first, second = jax.random.split(jax.random.fold_in(key, 0))
    return JobState(
        jnp.int32(0), paced.init(ranks) if paced else (), jnp.zeros((ranks,), jnp.float32), _nan(),
        _nan(buckets), noises.init(job.noise, first, ranks, shape.causes, shape.per_process),
        job.traffic.init(second) if job.traffic is not None else ())

  def draw(key: jax.Array, job: Job, state: JobState) -> Draft:
    own = jax.random.split(jax.random.fold_in(key, 1))
    share, pauses, caused, noise = noises.sample(
        job.noise, own[0], state.step, state.noise, ranks, shape.causes, shape.per_process)
    factor, traffic = _ONE, state.traffic
    if job.traffic is not None:
      factor, traffic = job.traffic.sample(jax.random.fold_in(own[1], state.step), state.traffic)
    slower = jnp.maximum(_ONE + share, _LEAST)
    forward, backward = _f32(job.forward) * slower, _f32(job.backward) * slower
    gap, delay = _f32(job.gap) + pauses, bounded(state.asked, most)
    begin = _f32(job.update) + gap + forward + delay
    lost = _polled(begin + done[0] * backward, shape.per_node) * _f32(job.polling)
    ready = (begin + lost)[:, None] + backward[:, None] * done
    compute = forward + backward + lost
    return Draft(ready, factor * _f32(job.transfers), delay, compute, gap, lost, noise, traffic,
                 caused)

  def finish(state: JobState, draft: Draft, enter: jax.Array,
             leave: jax.Array) -> tuple[JobState, Steps]:
    entered, delay, step_time = enter[:, 0], draft.delay, leave[-1]
    begun, compute, gap = jnp.max(enter, axis=0), draft.compute, draft.gap
    undelayed = entered - delay
    asked, pacers, found = state.asked, state.pacer, state.found
    info: dict[str, jax.Array] = {}
    if paced:
      # As in a live run, the first step has no exit to count from: nothing is known of it but
      # waits.
      first = state.step == np.int32(0)
      seen_arrivals = jnp.where(first, _NAN, undelayed)
      waits = leave[None] - enter
      shared = pacing.Shared(state.step_time, state.found,
                             jnp.where(over, jnp.mean(waits, axis=0), _NAN))
      seen, each = observe(state.step, numbers, seen_arrivals, delay, waits,
                           jnp.where(first, _NAN, step_time), shared)
      found = jnp.mean(each, axis=0)
      decision, pacers = paced.update(seen, state.pacer)
      asked, info = decision.delay, decision.info

    def keep(values: jax.Array) -> jax.Array:
      return values if by_rank else jnp.mean(values, axis=0)

    out = Steps(
        step_time=step_time, cost=jnp.max(entered) - jnp.max(undelayed),
        earliness=jnp.mean(jnp.max(entered) - entered), transfers=leave - begun, exit=leave,
        enter=keep(enter), compute=keep(compute), gap=keep(gap), delay=keep(delay),
        asked=keep(state.asked), polling=keep(draft.polling),
        info={name: keep(values) for name, values in info.items()},
        caused={name: keep(jnp.minimum(values, gap)) for name, values in draft.caused.items()})
    after = JobState(state.step + np.int32(1), pacers, asked,
                     jnp.where(state.step == np.int32(0), _NAN, step_time), found,
                     draft.noise, draft.traffic)
    return after, out

  return Mechanics(init, draw, finish)


def _polled(entered: jax.Array, per_node: int) -> jax.Array:
  """Seconds that the others of a rank's host wait for it, mean over them: [R] s -> [R] s."""
  if per_node == 1:
    return jnp.zeros_like(entered)
  nodes = entered.reshape(-1, per_node)
  late = jnp.maximum(nodes[:, :, None] - nodes[:, None, :], _ZERO)
  return (jnp.sum(late, axis=2) / np.float32(per_node - 1)).reshape(-1)


def _nan(*shape: int) -> jax.Array:
  return jnp.full(shape, _NAN)


def _f32(value: Any) -> jax.Array:
  return jnp.asarray(value, jnp.float32)


# One pacer on all ranks of a job, without computing R times over what is the same on all of them.
#
# Ranks that see the same arrivals keep the same estimates of them. What of a pacer's state can
# differ between ranks is found in its traced program: whatever depends on the rank's own number or
# waits. The rest is carried once: with 4,096 ranks that is the difference between 4,096 and 16
# million numbers.

OWN = Observation._make(name in ("rank", "waits") for name in Observation._fields)._replace(
    counts=(), holds=())
"""What of an observation differs between the ranks of a job whose collectives all ranks leave
together."""


def vmap_ranks(pacer: Pacer, ranks: int, slots: int) -> Pacer:
  """Makes a pacer of R ranks out of a rank's, of a step with so many collectives; ValueError, if it
  doesn't return what a pacer must.

  Leaves of its state that differ between ranks have a leading axis [R], the others are of all
  ranks. It takes an observation whose `OWN` fields are [R, ...], and gives a delay [R] and columns
  [R].
  """
  state = jax.tree.map(jnp.asarray, pacer.init(ranks))
  seen = Observation(step=jnp.int32(0), rank=jnp.int32(0),
                     arrivals=jnp.zeros((ranks,), jnp.float32),
                     delays=jnp.zeros((ranks,), jnp.float32),
                     waits=jnp.zeros((slots,), jnp.float32), step_time=jnp.float32(0),
                     job_step_time=jnp.float32(0), job_transfers=jnp.zeros((slots,), jnp.float32),
                     job_transfers_now=jnp.zeros((slots,), jnp.float32))

  def update(observation: Observation, state: Any) -> tuple[Decision, Any]:
    return pacing.decide(pacer, observation, state)

  own = _own_leaves(update, seen, state)
  axes = jax.tree.map(lambda differs: 0 if differs else None, (OWN, own))
  update_all = jax.vmap(update, in_axes=axes, out_axes=(0, axes[1]))

  def spread(leaf: jax.Array, differs: bool) -> jax.Array:
    return jnp.broadcast_to(leaf, (ranks, *leaf.shape)) if differs else leaf

  return Pacer(lambda _: jax.tree.map(spread, state, own), update_all)


def _own_leaves(update: Callable[..., Any], seen: Observation, state: Any) -> Any:
  """Which leaves of the state come to depend on what differs between ranks: the state's tree of
  bools."""
  program = jax.make_jaxpr(update)(seen, state).jaxpr
  leaves, tree = jax.tree.flatten(state)
  before = jax.tree.leaves(OWN)
  own = [False] * len(leaves)
  while True:
    # An equation that reads what differs makes all it returns differ: coarse, and never wrong on
    # that side.
    differs = {v for v, d in zip(program.invars, [*before, *own], strict=True) if d}
    for equation in program.eqns:
      if any(isinstance(v, jax.extend.core.Var) and v in differs for v in equation.invars):
        differs.update(equation.outvars)
    results = program.outvars[len(program.outvars) - len(leaves):]
    after = [o or (isinstance(v, jax.extend.core.Var) and v in differs)
             for o, v in zip(own, results, strict=True)]
    if after == own:
      return jax.tree.unflatten(tree, own)
    own = after
