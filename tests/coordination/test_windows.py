"""Recursive estimators against plain numpy on the same windows."""

import functools

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpace.coordination import windows
from tests.quick import examples, long

WINDOW = 64
RATE = 2 / (WINDOW + 1)
JUNK = [np.nan, np.inf, -np.inf, -1e-3, 1.8e10]
ALL = {"mean": windows.mean(WINDOW), "deviation": windows.deviation(WINDOW),
       "low": windows.quantile(WINDOW, 0.1), "median": windows.quantile(WINDOW, 0.5),
       "floor": windows.floor(WINDOW)}


@functools.cache
def follower(estimator):
  def turn(state, x):
    state = estimator.update(x, state)
    return state, estimator.value(state)

  return jax.jit(lambda values: jax.lax.scan(turn, estimator.init(values.shape[1:]), values)[1])


def follow(estimator, values):
  """Value after each of values [steps, ...]."""
  return np.asarray(follower(estimator)(jnp.asarray(values, jnp.float32)))


def weights(n):
  w = RATE * (1 - RATE) ** np.arange(n)[::-1]
  return w / w.sum()


@pytest.mark.parametrize("n", [1, 2, 7, 300])
def test_mean_and_deviation_are_the_weighted_ones(n):
  x = np.random.default_rng(n).gamma(4, 5e-3, n)
  expected = np.average(x, weights=weights(n))
  np.testing.assert_allclose(follow(ALL["mean"], x)[-1], expected, rtol=1e-5)
  spread = np.sqrt(np.average((x - expected) ** 2, weights=weights(n)))
  np.testing.assert_allclose(follow(ALL["deviation"], x)[-1], spread, rtol=1e-4, atol=1e-9)


DATA = {
    "normal": lambda rng, shape: rng.normal(20e-3, 2e-3, shape),
    "exponential": lambda rng, shape: rng.exponential(3e-3, shape),
    "uniform": lambda rng, shape: rng.uniform(1e-3, 9e-3, shape),
    "pauses": lambda rng, shape: 10e-3 + 1e-4 * rng.normal(size=shape)
    + 0.1 * (rng.random(shape) < 0.02),
}


@pytest.mark.parametrize("kind", DATA)
@pytest.mark.parametrize("share", [0.1, *long(0.5)])
def test_quantile_of_stationary_data(kind, share):
  """The share of values below the estimate is the one asked for, within 0.03; one estimate scatters
  at most half more than the exact quantile of 64 values, twice as much at the steep edge of an
  exponential."""
  x = DATA[kind](np.random.default_rng(1), (800, 200)).clip(0)
  found = follow(windows.quantile(WINDOW, share), x)
  below = (x[401:] < found[400:-1]).mean()
  assert abs(below - share) < 0.03
  if kind == "pauses":  # its scale is that of the pauses, so is its scatter: still far below one
    assert np.abs(found[-1] - np.quantile(x, share)).max() < 10e-3
  else:
    exact = np.quantile(x[-WINDOW:], share, axis=0)
    assert found[-1].std() < (2.0 if kind == "exponential" else 1.5) * exact.std()
    assert abs(np.median(found[-1]) - np.quantile(x, share)) < 0.5 * exact.std() + 1e-5


def test_quantile_follows_jumps_down_within_a_window_and_up_within_four():
  rng = np.random.default_rng(3)
  noise = rng.normal(0, 2e-4, (WINDOW * 12, 50))
  level = np.repeat([2e-3, 12e-3, 2e-3], WINDOW * 4)[:, None]
  x = level + noise
  for name, tail in (("low", -1.28), ("median", 0.0)):
    found = follow(ALL[name], x)
    up, down = found[WINDOW * 8 - 1], found[WINDOW * 9]
    assert np.abs(up - (12e-3 + tail * 2e-4)).max() < 1e-3
    assert np.abs(down - (2e-3 + tail * 2e-4)).max() < 1.5e-3
  assert found.min() > 0


@pytest.mark.parametrize("name", ALL)
def test_nothing_is_known_before_the_first_value(name):
  estimator = ALL[name]
  state = estimator.init((2,))
  assert np.isnan(estimator.value(state)).all()
  state = estimator.update(jnp.array([jnp.nan, 3e-3], jnp.float32), state)
  assert np.isnan(estimator.value(state)).tolist() == [True, False]


@pytest.mark.parametrize("name", ALL)
@hypothesis.given(data=st.data())
@hypothesis.settings(max_examples=examples(25))
def test_junk_is_skipped(name, data):
  """Junk between the values changes nothing, bit for bit, in any element."""
  good = data.draw(st.lists(st.floats(0, 1e4, width=32), min_size=1, max_size=30))
  junk = data.draw(st.lists(st.sampled_from([*JUNK, None]), min_size=len(good), max_size=len(good)))
  both = [v for g, j in zip(good, junk, strict=True) for v in ((g,) if j is None else (j, g))]
  estimator = ALL[name]
  update = jax.jit(estimator.update)

  def last(values):
    state = estimator.init()
    for x in values:
      state = update(jnp.float32(x), state)
    return estimator.value(state), state

  (plain, expected), (mixed, found) = last(good), last(both)
  np.testing.assert_array_equal(plain, mixed)
  assert np.isfinite(plain)
  for a, b in zip(jax.tree.leaves(expected), jax.tree.leaves(found), strict=True):
    assert a.dtype == b.dtype and a.tobytes() == b.tobytes()


@hypothesis.given(st.lists(st.floats(0, 8e4, width=32), min_size=1, max_size=40))
@hypothesis.settings(max_examples=examples(50))
def test_estimates_stay_within_the_data(values):
  x = np.zeros(40, np.float32) + np.nan
  x[:len(values)] = values
  low, high = min(values), max(values)
  slack = 1e-5 * high + 1e-12
  assert low - slack <= follow(ALL["mean"], x)[-1] <= high + slack
  assert low <= follow(ALL["floor"], x)[-1] <= high
  assert 0 <= follow(ALL["deviation"], x)[-1] <= (high - low) / 2 + slack
  assert 0 <= follow(ALL["low"], x)[-1] <= 1.2 * high + slack


@pytest.mark.parametrize("make", [
    lambda: windows.mean(1), lambda: windows.mean(2.5), lambda: windows.quantile(64, 0.0),
    lambda: windows.quantile(64, 1), lambda: windows.quantile(3, 0.5), lambda: windows.floor(True)])
def test_a_slip_is_named(make):
  with pytest.raises(ValueError, match="must be a"):
    make()
