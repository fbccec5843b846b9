"""Work shared by speed within a simulated job: counts move compute, and pacing goes beside it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxpace
from jaxpace.simulation import noise
from jaxpace.simulation.job import Job, Shape, simulation
from jaxpace.simulation.shared_work import play

RANKS, TOTAL, STEPS = 4, 32, 120
LATE = np.array([0, 0, 0, 1], np.float32)


def played(pacer, **shape):
  job = Job(forward=jnp.float32(0.25), backward=jnp.float32(0.5), update=jnp.float32(0.125),
            gap=jnp.float32(0), transfers=jnp.full((1,), 0.125, jnp.float32),
            noise=(noise.Slow(LATE),))
  plan = simulation(Shape(RANKS, **shape), pacer, by_rank=True)
  key = jax.random.key(0)
  return jax.tree.map(np.asarray, plan.run(key, job, plan.init(key, job), STEPS)[1])


@pytest.mark.long
def test_as_the_plain_barrier_has_it():
  balancer = jaxpace.share_by_speed(TOTAL, 16)
  found = played(jaxpace.share_work(balancer), overlap=False)
  seconds = np.broadcast_to(0.75 * (1 + LATE) * RANKS / TOTAL, (STEPS, RANKS))
  wanted = play(balancer, seconds, rest=0.125, transfer=0.125)
  # Here nothing is known of the first step, which has no exit to count from: all is one step later.
  np.testing.assert_allclose(found.step_time[1:], wanted.seconds[:-1], rtol=1e-5)
  assert wanted.counts[-1].tolist() != wanted.counts[0].tolist()
  # Recorded is the count of the step after, that one step's lag again.
  np.testing.assert_array_equal(found.info["micro_batches"], wanted.counts)


@pytest.mark.long
def test_beside_a_pacer():
  both = jaxpace.chain(jaxpace.pace_early_ranks(max_delay=0.1),
                       jaxpace.share_work(jaxpace.share_by_speed(TOTAL, 16)))
  found = played(both)
  assert found.info["work_uneven"][-1].all() and found.step_time[-1] < 0.7 * found.step_time[0]
