"""Micro-batches by measured speed where steps hang together: on processors that a quota rations, a
rank that has waited has a whole quota again, so busy times come in steps and a micro-batch more or
less shows late."""

import collections
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxpace
from jaxpace.coordination.apportion import even
from jaxpace.core.types import Observation
from jaxpace.simulation.shared_work import play
from tests.quick import long

PERIOD, QUOTA, MICRO_BATCH = 10e-3, 4e-3, 1.2e-3
STEPS, TOTAL = 140, 32


class Rationed:
  """A process that may use `quota` seconds of a processor in each period."""

  def __init__(self, quota: float, begins: float):
    self.quota, self.begins, self.period, self.left = quota, begins, -1, quota

  def run(self, start: float, work: float) -> float:
    """When `work` seconds of a processor, begun at `start`, are done."""
    while True:
      period = int(np.floor((start - self.begins) / PERIOD + 1e-9))
      if period != self.period:
        self.period, self.left = period, self.quota
      end = self.begins + (period + 1) * PERIOD
      used = min(work, self.left, end - start)
      work, self.left, start = work - used, self.left - used, start + used
      if work <= 1e-9:
        return start
      if self.left <= 1e-9:
        start = max(start, end)


@functools.cache
def balanced():
  balancer = jaxpace.share_by_speed(TOTAL, 16)
  return balancer, jax.jit(balancer.update)


def seen(busy, counts):
  none = jnp.zeros(1)
  return Observation(jnp.int32(0), jnp.int32(0), jnp.asarray(busy, jnp.float32), jnp.zeros(4),
                     none, none[0], none[0], none, counts=jnp.asarray(counts, jnp.int32))


def job(slower, seed, counts, shares):
  """Seconds of each step, and the counts; `shares`: decided by speed, in force eight steps later.

  The ranks' noise and quotas are the same for all counts.
  """
  rng = np.random.default_rng(seed)
  ranks = [Rationed(QUOTA / (slower if rank == 3 else 1), rng.uniform(0, PERIOD))
           for rank in range(4)]
  balancer, update = balanced()
  state, decided, took, ran, now = balancer.init(4), collections.deque(), [], [], 0.0
  for step in range(STEPS):
    if decided and decided[0][0] <= step:
      counts = decided.popleft()[1]
    work = counts * MICRO_BATCH * np.exp(rng.normal(0, 0.2, 4)) + 0.3e-3
    busy = np.array([rank.run(now, own) for rank, own in zip(ranks, work, strict=True)]) - now
    for rank in ranks:
      rank.run(now + busy.max(), 0.3e-3)
    took.append(busy.max() + 2e-3)
    ran.append(counts)
    if shares:
      wanted, state = update(seen(busy, counts), state)
      if step % 4 == 0 and (wanted != (decided[-1][1] if decided else counts)).any():
        decided.append((step + 8, np.asarray(wanted)))
    now += took[-1] + rng.uniform(0, 1e-3)
  return np.mean(took[40:]), ran


@pytest.mark.parametrize(("slower", "by_hand"), [
    (1.5, (9, 9, 9, 5)), *long((2.0, (10, 9, 9, 4)), (3.0, (10, 10, 9, 3)))])
def test_counts_do_not_fall_back_to_even(slower, by_hand):
  """What they save of what the best counts by hand save, over eight jobs."""
  saved = possible = 0.0
  for seed in range(8):
    equal = even(TOTAL, 4)
    untouched, _ = job(slower, seed, equal, shares=False)
    shared, counts = job(slower, seed, equal, shares=True)
    saved += untouched - shared
    possible += untouched - job(slower, seed, np.array(by_hand), shares=False)[0]
    assert counts[-1][3] <= 6, "the slow rank has fewer to the end"
    first = next(step for step in range(STEPS) if counts[step][3] < 8)
    assert (np.array(counts)[first:, 3] < 8).all(), "no way back"
  assert saved >= 0.85 * possible


def test_a_healthy_job_is_left_alone():
  for seed in range(4):
    assert {tuple(counts) for counts in job(1.0, seed, even(TOTAL, 4), shares=True)[1]} == {
        (8, 8, 8, 8)}


def test_steps_that_hang_together_say_little():
  """Speeds of equal ranks that wander over some ten steps: counts cost less than they might."""
  balancer, _ = balanced()
  costs = []
  for seed in range(12):
    rng = np.random.default_rng(seed)
    wandering = np.zeros((800, 4))
    for step in range(1, 800):
      wandering[step] = 0.9 * wandering[step - 1] + 0.436 * rng.normal(size=4)
    played = play(balancer, 1e-3 * np.exp(0.08 * wandering))
    costs.append(played.seconds.sum() / played.even.sum() - 1)
  assert np.mean(costs) <= 0.003
