"""What is usual, and how far sums go by chance: against other ways of working it out."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import optimize

from jaxpace.diagnose import stream_levels as levels
from tests.quick import examples

samples = st.integers(0, 2**32 - 1).map(lambda seed: np.random.default_rng(seed))


@settings(max_examples=examples(60), deadline=None)
@given(samples, st.integers(4, 400), st.sampled_from(["normal", "exponential", "rare"]),
       st.floats(0.002, 0.2))
def test_the_root_is_the_one_that_a_solver_finds(random, number, shape, spread):
  y = {"normal": random.normal(0, spread,
                               number), "exponential": random.exponential(spread, number),
       "rare": np.where(random.random(number) < 0.1, 0.15, 0.0)}[shape]
  y = y - y.mean() - 0.025
  found, = levels.chance(np.append(y, 7.0)[None], np.append(np.ones(number, bool), False)[None])

  def beyond(theta):
    return float(np.log(np.exp(theta * y).mean()))

  if y.max() <= 0 or beyond(200.0) <= 0:
    assert found == pytest.approx(200.0)
  else:
    assert found == pytest.approx(optimize.brentq(beyond, 1e-6, 200.0), rel=2e-3)


def test_sums_pass_by_chance_no_more_often_than_the_bound_says():
  random, height = np.random.default_rng(3), 0.2
  y = random.normal(-0.025, 0.06, 20_000)
  theta, = levels.chance(y[None], np.ones((1, y.size), bool))
  passed = begun = 0
  for walk in random.choice(y, (4000, 200)).cumsum(axis=1):
    below = np.flatnonzero(walk <= 0)
    begun += 1
    passed += bool((walk[:below[0] if below.size else None] >= height).any())
  assert 0.01 < passed / begun <= np.exp(-theta * height)


@settings(max_examples=examples(60), deadline=None)
@given(samples, st.integers(1, 300), st.floats(0.0, 0.3), st.floats(0.05, 2.0))
def test_capped_excesses_add_up_to_nothing_about_the_usual_level(random, number, heavy, cap):
  values = (random.normal(1.0, 0.05, number)
            + (random.random(number) < heavy) * random.exponential(3.0, number))
  there = np.ones((1, number + 3), bool)
  there[0, number:] = False
  (usual,), (middle,) = levels.level(np.append(values, [9.0, -9.0, 0.0])[None], there,
                                     np.array([[cap]]))
  assert middle == np.median(values)
  assert abs(np.clip(values - usual, -cap, cap).mean()) < 0.01 * cap


@pytest.mark.parametrize("rho", [0.0, 0.5, 0.9])
def test_what_wanders_is_known_by_the_variance_of_its_mean(rho):
  """Of n steps it is v times what it would be, were they independent."""
  random, number, rows = np.random.default_rng(1), 512, 200
  x = random.normal(0, 1, (rows, number))
  for step in range(1, number):
    x[:, step] = rho * x[:, step - 1] + np.sqrt(1 - rho**2) * x[:, step]
  found = float(np.median(levels.wandering(x, np.ones(x.shape, bool))))
  assert found == pytest.approx(number * x.mean(axis=1).var(), rel=0.25, abs=0.1)


def learnt(x: np.ndarray, **given) -> levels.Levels:
  rule = levels.rules(len(x), True)
  return levels.learn(x.astype(np.float32), np.full(len(x), x.shape[1]),
                      np.ones(x.shape[1], np.float32), levels.unknown(len(x)),
                      rule._replace(**given))


def test_thresholds_rise_with_noise_and_with_wandering_and_are_unknown_before_60_steps():
  random = np.random.default_rng(2)
  white = random.normal(0, 1, 512)
  slow = np.convolve(random.normal(0, 1, 512 + 15), np.ones(16) / 4, "valid")  # of the same spread
  x = np.stack([0.01 * white, 0.06 * white, 0.06 * slow, *np.zeros((6, 512))]) + 1.0
  found = learnt(x)
  quiet, noisy, wandering = found.threshold[:3]
  assert quiet == 0.45 and 0.45 < noisy < wandering
  assert found.sure[0] == quiet and found.sure[1] == 0.6 and found.sure[2] == wandering
  assert found.usual[:3] == pytest.approx(1.0, abs=0.02) and found.step_time == 1.0
  assert np.isinf(learnt(x[:, :56]).threshold).all()


def test_what_wanders_asks_for_more_where_little_of_it_was_seen():
  random, x = np.random.default_rng(5), np.zeros(64)
  for step in range(1, 64):
    x[step] = 0.8 * x[step - 1] + 0.015 * random.normal()
  few = np.concatenate([(x - x.mean())[None], np.zeros((6, 64))]) + 1.0
  assert learnt(few).threshold[0] > 1.5 * learnt(np.tile(few, 8)).threshold[0] > 1.5 * 0.45
