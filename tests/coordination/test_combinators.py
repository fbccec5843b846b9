"""chain, limit, only_ranks."""

import re

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


@pytest.mark.parametrize("make, words", [
    (lambda good: jaxpace.chain(), "at least one"),
    (lambda good: jaxpace.chain(good, jaxpace.pace_early_ranks), "forget to call"),
    (lambda good: jaxpace.guard(jaxpace.pace_early_ranks), "forget to call"),
    (lambda good: jaxpace.steerable(jaxpace.pace_early_ranks), "forget to call the factory"),
    (lambda good: jaxpace.guard(good, harm=-1), "harm="),
    (lambda good: jaxpace.limit(None, 1e-3), "not a Pacer"),
    (lambda good: jaxpace.limit(good, 20), "max_delay=20 "),
    *((lambda good, ranks=ranks: jaxpace.only_ranks(good, ranks), "ranks=")
      for ranks in ([], [-1], 3, [1.5])),
    (lambda good: jaxpace.only_ranks(good, [1, 4]).init(4), "rank 4, but there are 4")])
def test_slips_are_named(make, words):
  with pytest.raises(ValueError, match=words):
    make(always(0))


@pytest.mark.parametrize("make, wrong", [
    (jaxpace.pace_early_ranks, [
        {"window": 4}, {"window": 64.0}, {"threshold": 5}, {"threshold": "0.05"}, {"max_delay": 20},
        {"max_delay": np.nan}, {"quantile": 0.0}, {"share_of_slack": 1.1}, {"cost": -1e-3},
        {"noise": np.inf}]),
    (jaxpace.interleave_jobs, [
        {"max_delay": 20}, {"key": -1}, {"key": 1.5}, {"key": 2**32}, {"floor": 0.0},
        {"floor": [1e-3, np.nan]}, {"floor": "fast"}, {"dead_band": -0.1}, {"clearance": 1.5},
        {"budget": 2}, {"slots": 0}, {"window": 1}, {"level": 0.0}, {"patience": 0},
        {"retry": 0.5}]),
    (jaxpace.take_turns, [
        {"key": -1}, {"patience": -1}, {"dead_band": 2}, {"learn": 1}, {"floor": -1.0},
        {"by": "step"}])])
def test_an_argument_that_makes_no_sense_is_named(make, wrong):
  for arguments in wrong:
    (name, value), = arguments.items()
    with pytest.raises(ValueError, match=re.escape(f"{name}={value!r}")):
      make(**arguments)
