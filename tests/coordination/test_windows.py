"""Recursive estimators against plain numpy on the same windows."""

import functools

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpace.coordination import coins, windows
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


def test_a_floor_falls_at_once_and_makes_good_63_percent_of_a_rise_within_a_window():
  found = follow(ALL["floor"], np.repeat([5e-3, 1e-3, 2e-3], [3, 1, WINDOW]))
  assert found[3] == np.float32(1e-3)
  assert found[-1] == pytest.approx(2e-3 - 1e-3 * (1 - 1 / WINDOW) ** WINDOW, rel=1e-5)


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


# The sequential interval against its own definition, and under peeking.

LEVEL = 0.05
LOG_ODDS = float(-np.log(LEVEL))


half_width, log_odds = jax.jit(coins.half_width), jax.jit(coins.log_odds)


def evidence(values, mean, rho):
  """log M of the values about `mean`, float64, by the formula."""
  away = np.asarray(values, np.float64) - mean
  s, v = away.sum(), (away**2).sum()
  return 0.5 * np.log(rho / (v + rho)) + s * s / (2 * (v + rho))


def running(values):
  """Count, mean and squares about it after each of values [..., n]."""
  n = np.arange(1, values.shape[-1] + 1)
  total, squares = np.cumsum(values, axis=-1), np.cumsum(values**2, axis=-1)
  return n, total / n, np.maximum(squares - total**2 / n, 0)


@pytest.mark.parametrize("n, mean, deviation",
                         [(12, 0.5, 0.1), (30, -0.2, 1.0), (200, 0.0, 3.0), (5000, 1e-3, 1.0)])
@pytest.mark.parametrize("factor", [0.1, 500.0])
def test_the_ends_are_where_the_evidence_reaches_the_odds(n, mean, deviation, factor):
  values = np.random.default_rng(n).normal(mean, deviation, n)
  rho = factor * deviation**2
  squares = ((values - values.mean())**2).sum()
  half = coins.half_width(n, squares, rho, LOG_ODDS, np)
  if not np.isfinite(half):
    assert (n <= 2 * (LOG_ODDS + 0.5 * np.log1p(n * deviation**2 / rho))
            + 6), "only where there are too few"
    return
  for end in (values.mean() - half, values.mean() + half):
    assert evidence(values, end, rho) == pytest.approx(LOG_ODDS, abs=2e-3)
  compiled = half_width(jnp.int32(n), jnp.float32(squares), jnp.float32(rho),
                                            jnp.float32(LOG_ODDS))
  assert compiled.dtype == jnp.float32
  assert float(compiled) == pytest.approx(half, rel=1e-4)


@pytest.mark.parametrize("n, mean, deviation",
                         [(1, 0.5, 0.1), (30, -0.2, 1.0), (200, 0.0, 3.0), (5000, 0.1, 1.0)])
def test_the_odds_against_zero_are_those_of_the_formula(n, mean, deviation):
  values = np.random.default_rng(n).normal(mean, deviation, n)
  rho = 8.0 * deviation**2
  squares = ((values - values.mean())**2).sum()
  found = log_odds(jnp.int32(n), *map(jnp.float32, (values.mean(), squares, rho)))
  assert float(found) == pytest.approx(evidence(values, 0.0, rho), rel=1e-4, abs=1e-4)
  assert log_odds(jnp.int32(0), *map(jnp.float32, (0.0, 0.0, rho))) == 0


SIZES = {
    "normal": lambda rng, shape: np.abs(rng.normal(size=shape)),
    "equal": lambda rng, shape: np.ones(shape),
    "cauchy": lambda rng, shape: np.abs(rng.standard_cauchy(shape)),
    "growing": lambda rng, shape: np.broadcast_to(1.02 ** np.arange(shape[1]), shape),
    "spikes": lambda rng, shape: 0.01 + 30.0 * (rng.random(shape) < 0.03),
}


@functools.cache
def sequences(kind):
  """Sizes [runs, steps] without an effect, and count, mean and squares after each."""
  rng = np.random.default_rng(7)
  runs, steps = examples(2000), 500
  sizes = SIZES[kind](rng, (runs, steps))
  values = sizes * np.where(rng.random((runs, steps)) < 0.5, 1, -1)
  return sizes, *running(values)


@pytest.fixture(autouse=True, scope="module")
def let_go():
  yield
  sequences.cache_clear()


@pytest.mark.parametrize("kind", SIZES)
@pytest.mark.parametrize("factor", [1e-2, *long(100.0)])
def test_false_alarms_under_peeking_after_every_value(kind, factor):
  """Whatever the sizes, and however badly rho was guessed: at most 5 % of sequences ever exclude
  zero."""
  sizes, n, mean, squares = sequences(kind)
  rho = coins.prior(factor * np.mean(sizes[:, 0]**2))
  half = np.asarray(half_width(
      jnp.asarray(n, jnp.int32)[None], jnp.asarray(squares, jnp.float32), jnp.float32(rho),
      jnp.float32(LOG_ODDS)))
  ever = (np.abs(mean) > half).any(axis=1).mean()
  assert ever <= LEVEL


@pytest.mark.parametrize("key", [0, 1, 2**32 - 1])
def test_the_coin_is_fair(key):
  numbers = np.arange(4096, dtype=np.int32)
  tossed = np.asarray(jax.jit(jax.vmap(lambda n: coins.coin(key, n)))(numbers))
  assert abs(tossed.mean() - 0.5) < 4 * 0.5 / 64
  for apart in (1, 2, 3, 16):
    assert abs(np.mean(tossed[apart:] == tossed[:-apart]) - 0.5) < 4 * 0.5 / 64
  other = np.asarray(jax.vmap(lambda n: coins.coin(key ^ 1, n))(numbers))
  assert abs(np.mean(tossed == other) - 0.5) < 4 * 0.5 / 64


def test_the_hash_is_murmurs():
  """Known values of the finaliser."""
  mixed = [int(coins.mixed(jnp.uint32(word))) for word in (0, 1, 0xFFFFFFFF)]
  assert mixed == [0, 0x514E28B7, 0x81F16F39]
