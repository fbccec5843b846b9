"""interleave_jobs: what it asks, from what, and what it never does."""

import hypothesis
import hypothesis.extra.numpy as hnp
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxpace
from tests.coordination import jobs

FLOOR = 10e-3


def seen(step, transfers, step_time=0.1, rank=0, own=None):
  """One rank's observation; what is its own is noise unless given."""
  rng = np.random.default_rng([step, rank])
  transfers = np.asarray(transfers, np.float32)
  arrivals = rng.random(2).astype(np.float32) if own is None else own
  return jaxpace.Observation(
      step=jnp.int32(step), rank=jnp.int32(rank), arrivals=jnp.asarray(arrivals), delays=jnp.asarray(arrivals),
      waits=jnp.asarray(rng.random(len(transfers)), jnp.float32), step_time=jnp.float32(rng.random()),
      job_step_time=jnp.float32(step_time), job_transfers=jnp.asarray(transfers))


def ask(pacer, history, rank=0, **more):
  """The delays asked after each of [steps, S] transfers."""
  update, state, asked = jax.jit(pacer.update), pacer.init(2), []
  for k, transfers in enumerate(history):
    decision, state = update(seen(k, transfers, rank=rank, **more), state)
    asked.append(float(decision.delay))
  return np.asarray(asked)


QUIET, FOLLOWER = [FLOOR] * 4, [2 * FLOOR, 2 * FLOOR, 1.5 * FLOOR, FLOOR]
LEADER = FOLLOWER[::-1]


def test_the_follower_moves_by_the_work_ahead_and_the_leader_stays():
  pacer = jaxpace.interleave_jobs(floor=FLOOR)
  np.testing.assert_allclose(ask(pacer, [QUIET, FOLLOWER, FOLLOWER, QUIET]), [0, 2.5 * FLOOR, 0, 0], rtol=1e-5)
  assert (ask(pacer, [QUIET, *[LEADER] * 50]) == 0).all()


def test_the_same_with_a_floor_that_was_seen():
  pacer = jaxpace.interleave_jobs()
  np.testing.assert_allclose(ask(pacer, [QUIET, FOLLOWER]), [0, 2.5 * FLOOR], rtol=1e-2)


durations = st.floats(width=32) | st.floats(0, 1, width=32)


@pytest.mark.parametrize("pacer", [jaxpace.interleave_jobs(0.05), jaxpace.interleave_jobs(0.05, floor=0.1, key=3)])
@hypothesis.given(data=st.data())
@hypothesis.settings(max_examples=40)
def test_whatever_is_seen_the_delay_is_bounded_and_the_same_on_all_ranks(pacer, data):
  steps, slots = data.draw(st.integers(1, 12)), data.draw(st.integers(1, 20))
  transfers = data.draw(hnp.arrays(np.float32, (steps, slots), elements=durations))
  step_times = data.draw(hnp.arrays(np.float32, (steps,), elements=durations))
  update = jobs.compiled(pacer)
  state = jobs.states(pacer, 3)
  for k in range(steps):
    each = [seen(k, transfers[k], step_times[k], rank) for rank in range(3)]
    decision, state = update(jax.tree.map(lambda *leaves: jnp.stack(leaves), *each), state)
    delay = np.asarray(decision.delay)
    assert np.isfinite(delay).all() and (delay >= 0).all() and (delay <= np.float32(0.05)).all()
    for leaf in jax.tree.leaves((decision, state)):
      leaf = np.asarray(leaf)
      assert (leaf.view(np.uint32) == leaf[:1].view(np.uint32)).all()


def test_where_nothing_is_shared_nothing_is_asked():
  assert (ask(jaxpace.interleave_jobs(floor=FLOOR), [[np.nan] * 4] * 20, step_time=np.nan) == 0).all()
  assert (ask(jaxpace.interleave_jobs(floor=FLOOR), [FOLLOWER] * 20, step_time=np.nan) == 0).all()
