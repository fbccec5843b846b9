"""Jobs that share links: against the closed form of two jobs, conservation, and each alone."""

import functools

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxpace.simulation import noise
from jaxpace.simulation.job import Job, Shape, simulation
from jaxpace.simulation.jobs import LinkShares, several
from tests.quick import examples
from tests.simulation.test_job import half_of_earliness

KEY = jax.random.key(3)
NEVER = 2**30


@functools.lru_cache
def compiled(count, steps, buckets=1, pacer=None, ranks=2, by_rank=False):
  shapes = [Shape(ranks, overlap=False)] * count
  plan = several(shapes, [pacer] * count, buckets=[buckets] * count, steps=steps, by_rank=by_rank)
  return jax.jit(plan)


def play(jobs, steps, starts, *, usage=None, weights=None, coupled=True, last=None, **more):
  count = len(jobs)
  one = np.ones((count, 1), np.float32)
  wanted = one if usage is None else np.asarray(usage, np.float32)
  shares = LinkShares(np.float32(coupled) * wanted[:, None],
                      one if weights is None else np.asarray(weights, np.float32)[:, None], one)
  histories = compiled(count, steps, **more)(
      KEY, jobs, shares, np.asarray(starts, np.float32),
      np.asarray(last or [NEVER] * count, np.int32))
  return [jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), h) for h in histories]


def job(period, fraction, buckets=1):
  zero = np.float32(0)
  return Job(forward=np.float32((1 - fraction) * period), backward=zero, update=zero, gap=zero,
             transfers=np.full(buckets, fraction * period / buckets, np.float32))


@settings(max_examples=examples(25), deadline=None)
@given(fraction=st.floats(0.05, 0.6), offset=st.floats(0, 1))
def test_two_equal_jobs_take_what_the_oracle_says(fraction, offset):
  """T' = max(2a, 1 + max(0, a - D)), D the distance of their starts: fair sharing never separates
  them."""
  distance = min(offset, 1 - offset)
  both = play([job(1.0, fraction)] * 2, 20, [0, offset])
  expected = max(2 * fraction, 1 + max(0, fraction - distance))
  for history in both:
    np.testing.assert_allclose(history.step_time[5:15], expected, rtol=2e-4)


@pytest.mark.parametrize("start", [0.25, 7.3])
def test_what_passes_before_a_job_starts_is_in_no_step(start):
  """And the other job's steps are as without."""
  other, late = play([job(1.0, 0.4), job(1.0, 0.4)], 20, [0, start], coupled=False)
  np.testing.assert_allclose(other.step_time, 1.0, rtol=1e-5)
  np.testing.assert_allclose(late.step_time, 1.0, rtol=1e-5)
  assert late.step_time.mean() == pytest.approx(other.step_time.mean(), rel=1e-5)


def test_a_job_that_leaves_frees_the_link():
  long, short = play([job(1.0, 0.4)] * 2, 30, [0, 0], last=[NEVER, 10])
  np.testing.assert_allclose(long.step_time[:9], 1.4, rtol=1e-4)
  np.testing.assert_allclose(long.step_time[12:], 1.0, rtol=1e-4)
  assert np.isfinite(short.step_time).sum() == 10


def test_weights_and_usage_divide_the_link():
  """Half a link's worth beside a whole one: there is room for two thirds of each."""
  first, second = play([job(1.0, 0.5)] * 2, 4, [0, 0], usage=[[1.0], [0.5]])
  np.testing.assert_allclose(first.step_time[0], 0.5 + 0.5 * 1.5, rtol=1e-4)
  np.testing.assert_allclose(second.step_time[0], 0.5 + 0.5 * 1.5, rtol=1e-4)
  quick, slow = play([job(1.0, 0.5)] * 2, 4, [0, 0], weights=[3, 1])
  np.testing.assert_allclose(quick.step_time[0], 0.5 + 0.5 / 0.75, rtol=1e-4)
  # The slower one goes on alone when the other is done: a third of it was sent by then.
  np.testing.assert_allclose(slow.step_time[0], 0.5 + 1.0, rtol=1e-3)


def test_one_job_by_itself_is_the_job_of_the_other_simulation():
  """Two ways to play the same steps, draws and pacer included."""
  buckets = 3
  pacer = half_of_earliness()
  parts = noise.Normal(np.float32(0.1)), noise.Slow(np.array([0, .4], np.float32))
  one = job(30e-3, 0.2, buckets)._replace(noise=parts)
  (history,) = play([one], 60, [0], buckets=buckets, pacer=pacer, by_rank=True)
  init, run = simulation(Shape(2, overlap=False), pacer, buckets=buckets, by_rank=True)
  key = jax.random.split(KEY, 1)[0]
  reference = run(key, one, init(key, one), 60)[1]
  assert float(np.max(reference.delay)) > 0
  for name in ("step_time", "enter", "delay", "transfers"):
    np.testing.assert_allclose(getattr(history, name), getattr(reference, name), atol=3e-6,
                               err_msg=name)


def test_lists_of_different_length_are_refused():
  with pytest.raises(ValueError, match="2 shapes, 1 pacers"):
    several([Shape(2), Shape(2)], [None], buckets=[1, 1], steps=5)
