"""A job of the tests' own: max-plus barriers, a pacer on every rank."""

import functools
import heapq

import jax
import jax.numpy as jnp
import numpy as np

from jaxpace.core.types import Observation

TRANSFER = 1e-3
CHUNK = 64
"""Steps of a job in one call."""


@functools.lru_cache(maxsize=32)
def compiled(pacer):
  """update over ranks: (observation, state), each leaf with a leading axis of ranks."""
  return jax.jit(jax.vmap(pacer.update))


def states(pacer, ranks):
  return jax.tree.map(lambda leaf: jnp.stack([jnp.asarray(leaf)] * ranks), pacer.init(ranks))


def observe(step, arrivals, delays, seen=None, step_time=None, xp=np):
  """What each of [ranks] sees: leaves [ranks, ...]. `seen` [ranks] bool hides arrivals and delays
  where False."""
  ranks, unknown = len(arrivals), np.float32(np.nan)
  entered = arrivals + delays
  waits = entered.max() - entered + np.float32(TRANSFER)
  took = entered.max() + np.float32(TRANSFER) if step_time is None else np.float32(step_time)

  def everyone(values):
    return xp.broadcast_to(values if seen is None else xp.where(seen, values, unknown),
                           (ranks, ranks))

  return Observation(
      step=xp.full(ranks, step, np.int32), rank=xp.arange(ranks, dtype=np.int32),
      arrivals=everyone(arrivals), delays=everyone(delays), waits=waits[:, None],
      step_time=xp.full(ranks, took), job_step_time=xp.full(ranks, took),
      job_transfers=xp.full((ranks, 1), TRANSFER, np.float32),
      job_transfers_now=xp.full((ranks, 1), unknown, np.float32))


@functools.lru_cache(maxsize=32)
def _compiled_job(pacer):
  """`CHUNK` steps of a job: (delays asked and state), [CHUNK] steps, [CHUNK, ranks] arrivals, seen
  and overshoot."""

  def turn(carry, row):
    (asked, state), (step, arrivals, seen, overshoot) = carry, row
    delays = jnp.where(asked > 0, asked + overshoot, asked)
    decision, state = jax.vmap(pacer.update)(observe(step, arrivals, delays, seen, xp=jnp), state)
    return (decision.delay, state), (delays, decision.info)

  return jax.jit(functools.partial(jax.lax.scan, turn))


def run(pacer, arrivals, seen=None, overshoot=None):
  """Runs a job with the pacer on every rank; all is of [steps, ranks].

  `arrivals` are undelayed, in s, and `seen` says whose are known; where a delay was asked for, the
  applied one is longer by `overshoot` s. Returns applied delays and the columns after each step.
  """
  steps, ranks = np.shape(arrivals)
  padded = -(-steps // CHUNK) * CHUNK
  rows = [np.arange(padded, dtype=np.int32)]
  for values, kind in ((arrivals, np.float32), (True if seen is None else seen, bool),
                       (0 if overshoot is None else overshoot, np.float32)):
    values = np.broadcast_to(np.asarray(values, kind), (steps, ranks))
    rows.append(np.concatenate([values, np.zeros((padded - steps, ranks), kind)]))
  carry, found = (np.zeros(ranks, np.float32), states(pacer, ranks)), []
  for k in range(0, padded, CHUNK):
    carry, rows_of_chunk = _compiled_job(pacer)(carry, tuple(row[k:k + CHUNK] for row in rows))
    found.append(rows_of_chunk)
  return jax.tree.map(lambda *parts: np.concatenate(parts)[:steps], *found)


def held_back(arrivals, applied):
  """L of each step in float64: [steps, ranks], [steps, ranks] -> [steps]."""
  a, d = np.asarray(arrivals, np.float32).astype(np.float64), applied.astype(np.float64)
  return (a + d).max(axis=1) - a.max(axis=1)


def best(seconds, micro_batches, capacity):
  """The shortest max over ranks of n s that any whole numbers n can give: by putting the
  next micro-batch where it ends earliest, which is optimal for one kind of work on machines of
  different speed.

  Args:
    seconds: [R] s, time for one micro-batch on each rank.
    micro_batches: what the n add up to.
    capacity: most of a rank.
  """
  counts = [1] * len(seconds)
  ends = [(2 * float(each), rank) for rank, each in enumerate(seconds)]
  heapq.heapify(ends)
  for _ in range(micro_batches - len(seconds)):
    _, rank = heapq.heappop(ends)
    counts[rank] += 1
    if counts[rank] < capacity:
      heapq.heappush(ends, ((counts[rank] + 1) * float(seconds[rank]), rank))
  return float((np.asarray(counts) * seconds).max())
