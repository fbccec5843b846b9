"""The sequential interval against its own definition, and under peeking."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpace.coordination import keyed, plain, sequential
from tests.quick import examples, long

LEVEL = 0.05
LOG_ODDS = float(-np.log(LEVEL))


half_width, log_odds = jax.jit(sequential.half_width), jax.jit(sequential.log_odds)


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
  half = sequential.half_width(n, squares, rho, LOG_ODDS, plain)
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
  found = sequential.log_odds(n, values.mean(), squares, rho, plain)
  assert found == pytest.approx(evidence(values, 0.0, rho), rel=1e-9)
  compiled = log_odds(jnp.int32(n),
                                          *map(jnp.float32, (values.mean(), squares, rho)))
  assert float(compiled) == pytest.approx(found, rel=1e-4, abs=1e-4)
  assert sequential.log_odds(0, 0.0, 0.0, rho, plain) == 0


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
  rho = sequential.prior(factor * np.mean(sizes[:, 0]**2))
  half = np.asarray(half_width(
      jnp.asarray(n, jnp.int32)[None], jnp.asarray(squares, jnp.float32), jnp.float32(rho),
      jnp.float32(LOG_ODDS)))
  ever = (np.abs(mean) > half).any(axis=1).mean()
  assert ever <= LEVEL


def test_the_truth_is_inside_at_all_times():
  rng = np.random.default_rng(8)
  values = rng.normal(-0.03, 0.1, (2000, 400))
  n, mean, squares = running(values)
  half = np.asarray(sequential.half_width(
      jnp.asarray(n, jnp.int32)[None], jnp.asarray(squares, jnp.float32),
      jnp.float32(sequential.prior(0.01)), jnp.float32(LOG_ODDS)))
  assert (np.abs(mean + 0.03) > half).any(axis=1).mean() <= LEVEL
  assert np.median(half[:, -1]) < 4.0 * 0.1 / np.sqrt(400), "and narrow enough to be of use"


@pytest.mark.parametrize("key", [0, 1, 2**32 - 1])
def test_the_coin_is_fair_and_the_same_on_every_kind_of_number(key):
  numbers = np.arange(4096, dtype=np.int32)
  tossed = np.asarray(jax.jit(jax.vmap(lambda n: keyed.coin(key, n)))(numbers))
  assert tossed[:300].tolist() == [keyed.coin(key, n, plain) for n in range(300)]
  assert abs(tossed.mean() - 0.5) < 4 * 0.5 / 64
  for apart in (1, 2, 3, 16):
    assert abs(np.mean(tossed[apart:] == tossed[:-apart]) - 0.5) < 4 * 0.5 / 64
  other = np.asarray(jax.vmap(lambda n: keyed.coin(key ^ 1, n))(numbers))
  assert abs(np.mean(tossed == other) - 0.5) < 4 * 0.5 / 64


def test_the_hash_is_murmurs():
  """Known values of the finaliser."""
  assert [keyed.mixed(word, plain) for word in (0, 1, 0xFFFFFFFF)] == [0, 0x514E28B7, 0x81F16F39]
  assert int(keyed.mixed(jnp.uint32(1))) == 0x514E28B7
