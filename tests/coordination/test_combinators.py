"""chain, limit, only_ranks."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxpace
from jaxpace.core.types import Decision, Observation, Pacer
from tests.coordination import jobs

RANKS, SLOTS, MOST = 4, 3, 20e-3


def always(seconds, **info):
  """Asks for the same in every step, and counts them."""

  def update(observation, count):
    columns = {name: jnp.float32(value) for name, value in info.items()}
    return Decision(jnp.float32(seconds), columns), count + jnp.int32(1)

  return Pacer(lambda ranks: jnp.int32(0), update)


def nothing_seen(ranks=RANKS, rank=0):
  unknown = jnp.full((ranks,), jnp.nan, jnp.float32)
  return Observation(jnp.int32(0), jnp.int32(rank), unknown, unknown,
                     jnp.full((SLOTS,), jnp.nan, jnp.float32), jnp.float32(jnp.nan),
                     jnp.float32(jnp.nan), jnp.full((SLOTS,), jnp.nan, jnp.float32))


@pytest.mark.parametrize("asked, expected", [
    ((1e-3, 4e-3, 2e-3), 4e-3), ((np.nan, 2e-3), 2e-3), ((2e-3, np.nan), 2e-3), ((-1.0, -2.0), 0.0),
    ((np.nan,), 0.0)])
def test_chain_takes_the_longest(asked, expected):
  pacer = jaxpace.chain(*map(always, asked))
  decision, state = jax.jit(pacer.update)(nothing_seen(), pacer.init(RANKS))
  assert float(decision.delay) == np.float32(expected)
  assert [int(s) for s in state] == [1] * len(asked)


def test_columns_of_one_name_are_kept_apart():
  pacer = jaxpace.chain(always(0, slack=1), always(0, slack=2, other=3), always(0, slack=4))
  decision, _ = pacer.update(nothing_seen(), pacer.init(RANKS))
  assert ({k: float(v) for k, v in decision.info.items()}
          == {"slack": 1, "slack_2": 2, "other": 3, "slack_3": 4})


def test_a_chain_of_buckets_costs_no_more_than_its_largest():
  """Different windows, costs and caps: one observes, another strikes."""
  make = {"threshold": 0.0, "noise": 0.0, "quantile": 0.9, "share_of_slack": 1.0}
  pacer = jaxpace.chain(jaxpace.pace_early_ranks(window=8, cost=5e-2, max_delay=2e-3, **make),
                        jaxpace.pace_early_ranks(window=32, cost=2e-2, max_delay=50e-3, **make))
  for seed in range(3):
    rng = np.random.default_rng(seed)
    busy = (10e-3 + rng.exponential(3e-3, (500, 4))
            + np.repeat(rng.exponential(5e-3, (20, 4)), 25, axis=0))
    seen = rng.random((500, 4)) > 0.002
    applied, _ = jobs.run(pacer, busy, seen)
    spent = np.cumsum(jobs.held_back(busy, applied))
    assert (spent <= 5e-2 * np.cumsum(busy.max(axis=1))).all()
    assert spent[-1] > 1e-2 * busy.max(axis=1).sum(), "the bucket is what limits"


@pytest.mark.parametrize("asked, expected",
                         [(9e-3, 5e-3), (3e-3, 3e-3), (-1.0, 0), (np.nan, 0), (np.inf, 5e-3)])
def test_limit(asked, expected):
  pacer = jaxpace.limit(always(asked, column=7), 5e-3)
  decision, state = jax.jit(pacer.update)(nothing_seen(), pacer.init(RANKS))
  assert float(decision.delay) == np.float32(expected)
  assert int(state) == 1 and float(decision.info["column"]) == 7


def test_slips_are_named():
  good = always(0)
  with pytest.raises(ValueError, match="at least one"):
    jaxpace.chain()
  with pytest.raises(ValueError, match="forget to call"):
    jaxpace.chain(good, jaxpace.pace_early_ranks)
  with pytest.raises(ValueError, match="not a Pacer"):
    jaxpace.limit(None, 1e-3)
  with pytest.raises(ValueError, match="max_delay=20 "):
    jaxpace.limit(good, 20)
  for ranks in ([], [-1], 3, [1.5]):
    with pytest.raises(ValueError, match="ranks="):
      jaxpace.only_ranks(good, ranks)
  with pytest.raises(ValueError, match="rank 4, but there are 4"):
    jaxpace.only_ranks(good, [1, 4]).init(4)
