"""Plays a strategy in simulated time: when each rank begins and ends each of its steps. Pure, for
`jit` and `vmap`.

With own work w[r, c] of rank r in step c and an exchange of C seconds:

    synchronous, compressed   t[c] = t[c - 1] + max over r of w[r, c] + C
    backup, k of N            t[c] = t[c - 1] + k-th smallest over r of w[r, c] + C
    local steps, every H      t[c] = t[c - H] + max over r of (w[r, c - H + 1] + ... + w[r, c]) + C
    bounded staleness s       f[r, c] = max(f[r, c - 1], max over q of f[q, c - 1 - s]) + w[r, c] + C
    parameter server          ranks queue, first come first served; served, a rank computes, sends, and queues again

Times are float32 seconds since an origin that moves along; rows say by how much, so that long runs
lose no digits.
"""  # noqa: E501

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxpace.simulation.strategies.cluster import Cluster, draw, messages, service
from jaxpace.simulation.strategies.settings import (
  Backup,
  BoundedStaleness,
  LocalSteps,
  ParameterServer,
  Strategy,
)

_ZERO = np.float32(0)


class PlayedSteps(NamedTuple):
  """What happened to strategies in which every rank takes K steps."""

  start: jax.Array  # [K, R] s since the row's origin: when each rank began the step
  # [K, R] s likewise: when it was done with it and, if there was one, with the exchange
  finish: jax.Array
  counted: jax.Array  # [K, R] bool, whether its gradient was used
  moved: jax.Array  # [K] s from the row's origin to the next row's


class Served(NamedTuple):
  """What happened at parameter servers: U updates in the order they were applied."""

  elapsed: jax.Array  # [U] s since the update before
  rank: jax.Array  # [U] int32, whose gradient it was
  delay: jax.Array  # [U] int32, updates applied since its parameters were fetched
  # [U] bool, False once a rank has used up its share of drawn steps: read no further
  valid: jax.Array


def play(strategy: Strategy, cluster: Cluster, key: jax.Array, ranks: int,
         steps: int) -> PlayedSteps | Served:
  """Plays a strategy.

  Args:
    strategy: static, as are `ranks` and `steps`.
    cluster: what it runs on.
    key: the same for every strategy to be compared.
    ranks: R.
    steps: K, of each rank. Parameter servers apply U = K R updates; fast ranks have more of them,
      up to 2 K.

  Raises:
    SettingsError: the strategy is impossible with so many ranks.
  """
  strategy.check(ranks)
  if isinstance(strategy, ParameterServer):
    # What a rank does between one service and the next: fetch, compute, send. Fast ranks take more
    # steps.
    away = draw(cluster, key, ranks, 2 * steps).work(cluster.update)
    return served(away + jnp.asarray(messages(strategy, cluster, ranks).seconds, jnp.float32),
                  service(strategy, cluster), steps * ranks)
  work = draw(cluster, key, ranks, steps).work(cluster.update)
  exchange = jnp.asarray(messages(strategy, cluster, ranks).seconds, jnp.float32)
  if isinstance(strategy, BoundedStaleness):
    return bounded(strategy.staleness, work, exchange)
  every = strategy.every if isinstance(strategy, LocalSteps) else 1
  wait_for = strategy.wait_for if isinstance(strategy, Backup) else ranks
  return _rounds(work, exchange, every, wait_for)


def _rounds(work: jax.Array, exchange: jax.Array, every: int, wait_for: int) -> PlayedSteps:
  steps, ranks = work.shape

  def step(clock: jax.Array, row: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, PlayedSteps]:
    own, number = row
    done = clock + own
    order = jnp.argsort(done)
    place = jnp.zeros((ranks,), jnp.int32).at[order].set(jnp.arange(ranks, dtype=jnp.int32))
    meet = (number + np.int32(1)) % np.int32(every) == np.int32(0)
    after = jnp.where(meet, done[order[wait_for - 1]] + exchange, done)
    moved = jnp.min(after)
    return after - moved, PlayedSteps(clock, after, place < np.int32(wait_for), moved)

  rows = (work, jnp.arange(steps, dtype=jnp.int32))
  return jax.lax.scan(step, jnp.zeros((ranks,), jnp.float32), rows)[1]


def bounded(staleness: int | None, work: jax.Array, exchange: jax.Array) -> PlayedSteps:
  """Plays bounded staleness on work [K, R] s that was drawn, with exchanges of so many seconds."""
  ranks = work.shape[1]
  # When all had ended the last steps, the oldest first; nobody waits for what was before the run.
  past = jnp.full(((staleness or 0) + 1,), -np.float32(np.inf))

  def step(carry: tuple[jax.Array, jax.Array], own: jax.Array) -> tuple[Any, PlayedSteps]:
    clock, past = carry
    start = jnp.maximum(clock, past[0])
    after = start + own + exchange
    moved = jnp.min(after)
    if staleness is not None:
      past = jnp.concatenate([past[1:], jnp.max(after)[None]])
    return (after - moved, past - moved), PlayedSteps(start, after, jnp.ones((ranks,), bool), moved)

  return jax.lax.scan(step, (jnp.zeros((ranks,), jnp.float32), past), work)[1]


class _Queue(NamedTuple):
  """Between two updates; times since the last one."""

  arrives: jax.Array  # [R] s, when each rank's gradient reaches the servers
  done: jax.Array  # [R] int32 updates of each rank
  fetched: jax.Array  # [R] int32, updates that its parameters hold
  valid: jax.Array  # [] bool


def served(away: jax.Array, busy: jax.Array, updates: int) -> Served:
  """Plays a parameter server.

  Args:
    away: [K, R] s from one service of a rank to its next arrival, in order.
    busy: [] s that the servers take for one gradient.
    updates: U; ranks that would need more than K steps stop at theirs, and what follows isn't
      valid.
  """
  rows, ranks = away.shape

  def update(queue: _Queue, version: jax.Array) -> tuple[_Queue, Served]:
    rank = jnp.argmin(queue.arrives)
    end = jnp.maximum(queue.arrives[rank], _ZERO) + busy
    done = queue.done.at[rank].add(np.int32(1))
    row = Served(end, rank.astype(jnp.int32), version - queue.fetched[rank], queue.valid)
    following = end + away[jnp.minimum(done[rank], np.int32(rows - 1)), rank]
    return _Queue(queue.arrives.at[rank].set(following) - end, done,
                  queue.fetched.at[rank].set(version
                                             + np.int32(1)), queue.valid & (done[rank] < rows)), row

  nothing = jnp.zeros((ranks,), jnp.int32)
  return jax.lax.scan(update, _Queue(away[0], nothing, nothing, jnp.bool_(True)),
                      jnp.arange(updates, dtype=jnp.int32))[1]
