"""A job of the tests' own: max-plus barriers in float64, a pacer on every rank."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from jaxpace.core.types import Observation

TRANSFER = 1e-3


@functools.lru_cache(maxsize=32)
def compiled(pacer):
  """update over ranks: (observation, state), each leaf with a leading axis of ranks."""
  return jax.jit(jax.vmap(pacer.update))


def states(pacer, ranks):
  return jax.tree.map(lambda leaf: jnp.stack([jnp.asarray(leaf)] * ranks), pacer.init(ranks))


def observe(step, arrivals, delays, seen=None, step_time=None):
  """What each of [ranks] sees: leaves [ranks, ...]. `seen` [ranks] bool hides arrivals and delays where False."""
  ranks = len(arrivals)
  seen = np.ones(ranks, bool) if seen is None else seen
  entered = arrivals.astype(np.float64) + delays
  waits = (entered.max() - entered + TRANSFER).astype(np.float32)
  took = np.float32(entered.max() + TRANSFER if step_time is None else step_time)

  def everyone(values):
    return np.broadcast_to(np.where(seen, values, np.nan).astype(np.float32), (ranks, ranks))

  return Observation(
      step=np.full(ranks, step, np.int32), rank=np.arange(ranks, dtype=np.int32), arrivals=everyone(arrivals),
      delays=everyone(delays), waits=waits[:, None], step_time=np.full(ranks, took), job_step_time=np.full(ranks, took),
      job_transfers=np.full((ranks, 1), TRANSFER, np.float32),
      job_transfers_now=np.full((ranks, 1), np.nan, np.float32))


def run(pacer, arrivals, seen=None, overshoot=None):
  """Runs a job.

  Args:
    pacer: on every rank.
    arrivals: [steps, ranks] undelayed, s.
    seen: [steps, ranks] bool, whose arrival is known.
    overshoot: [steps, ranks] s by which applied delays exceed those asked, where any was asked.

  Returns:
    Applied delays [steps, ranks] float32, and the columns [steps, ranks] after each step.
  """
  arrivals = np.asarray(arrivals, np.float32)
  steps, ranks = arrivals.shape
  update, state, asked = compiled(pacer), states(pacer, ranks), np.zeros(ranks, np.float32)
  applied, columns = [], []
  for k in range(steps):
    delays = asked if overshoot is None else np.where(asked > 0, asked + overshoot[k].astype(np.float32), asked)
    applied.append(delays)
    decision, state = update(observe(k, arrivals[k], delays, None if seen is None else seen[k]), state)
    asked = np.asarray(decision.delay)
    columns.append(decision.info)
  return np.stack(applied), jax.tree.map(lambda *leaves: np.stack(leaves), *columns)


def held_back(arrivals, applied):
  """L of each step in float64: [steps, ranks], [steps, ranks] -> [steps]."""
  a, d = np.asarray(arrivals, np.float32).astype(np.float64), applied.astype(np.float64)
  return (a + d).max(axis=1) - a.max(axis=1)
