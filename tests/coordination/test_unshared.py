"""Pacing without the others' arrivals: what is proved about its cost, and what it does with
slack."""

import hypothesis
import hypothesis.extra.numpy as hnp
import hypothesis.strategies as st
import jax
import numpy as np
import pytest

import jaxpace
from tests.coordination import jobs
from tests.quick import examples

WINDOW, LATE, CEILING = 8, 2, 2e-3
# As bold as can be: the bucket is what limits.
EAGER = jaxpace.pace_early_ranks(window=WINDOW, threshold=0.0, noise=0.0, share_of_slack=1.0,
                                 quantile=0.9, cost=0.1, unshared=CEILING)
GENEROUS = jaxpace.pace_early_ranks(window=WINDOW, cost=1.0, unshared=CEILING)


def run(pacer, busy, transfers):
  """[steps, ranks], [steps] -> applied delays, columns [steps, ranks]; each rank sees what is its
  own."""
  busy = np.asarray(busy, np.float32)
  steps, ranks = busy.shape
  update, state, asked = (jobs.compiled(pacer), jobs.states(pacer, ranks),
                          np.zeros(ranks, np.float32))
  mine = np.eye(ranks, dtype=bool)
  applied, columns = [], []
  for k in range(steps):
    seen = jobs.observe(k, busy[k], asked)
    entered = busy[k].astype(np.float64) + asked
    seen = seen._replace(
        arrivals=np.where(mine, seen.arrivals, np.float32(np.nan)),
        delays=np.where(mine, seen.delays, np.float32(np.nan)),
        waits=(entered.max() - entered + transfers[k]).astype(np.float32)[:, None])
    applied.append(asked)
    decision, state = update(seen, state)
    asked = np.asarray(decision.delay)
    columns.append(decision.info)
  return np.stack(applied), jax.tree.map(lambda *leaves: np.stack(leaves), *columns)


def straggler(steps, ranks=4, late=10e-3, noise=1e-4):
  busy = 15e-3 + noise * np.random.default_rng(0).normal(size=(steps, ranks))
  busy[:, LATE] += late
  return busy


def check_bound(busy, applied, transfers, cost):
  """The theorem, summed up to every step."""
  spent = np.cumsum(jobs.held_back(busy, applied))
  bare = np.cumsum(np.float32(busy).astype(np.float64).max(axis=1))
  beyond = np.cumsum(np.maximum(0, transfers - CEILING))
  assert (spent <= cost * bare + beyond + 1e-9).all()
  return spent[-1] / (cost * bare[-1])


@pytest.mark.parametrize("ranks", [2, 4, 32])
@pytest.mark.parametrize("shape", ["normal", "exponential", "turns"])
def test_what_it_costs_is_bounded(ranks, shape):
  rng = np.random.default_rng(ranks)
  steps = 400
  if shape == "turns":  # slack that ends when the delay has grown
    busy = np.full((steps, ranks), 10e-3)
    busy[np.arange(steps), np.arange(steps) // 40 % ranks] += 20e-3
  else:
    busy = (10e-3 + (rng.normal(0, 2e-3, (steps, ranks)) if shape == "normal"
                     else rng.exponential(2e-3, (steps, ranks))))
  transfers = rng.uniform(0.2, 1.0, steps) * CEILING
  applied, _ = run(EAGER, busy, transfers)
  assert applied.max() > 0
  check_bound(busy, applied, transfers, 0.1)


@hypothesis.given(st.data())
@hypothesis.settings(max_examples=examples(30))
def test_whatever_the_arrivals_and_transfers(data):
  """Transfers may exceed the ceiling: that much more, and no more."""
  shape = (data.draw(st.integers(20, 60)), 3)
  few = st.floats(0, 0.125, width=32)
  busy = data.draw(hnp.arrays(np.float32, shape, elements=few))
  busy[:WINDOW + 2, 0] = 0.125
  transfers = data.draw(hnp.arrays(np.float32, shape[:1],
                                   elements=st.floats(0, 3 * CEILING))).astype(np.float64)
  applied, _ = run(EAGER, busy, transfers)
  check_bound(busy, applied, transfers, 0.1)


def test_an_adversary_gets_the_budget_and_no_more():
  """The late rank turns quick once the others' delays are worth striking at: rank after rank
  pays."""
  ranks, steps = 3, 600
  update, state, asked = (jobs.compiled(EAGER), jobs.states(EAGER, ranks),
                          np.zeros(ranks, np.float32))
  spent = bare = 0.0
  for k in range(steps):
    busy = np.full(ranks, 10e-3, np.float32)
    if asked.max() < 2e-3:
      busy[0] = 30e-3
    late = float(jobs.held_back(busy[None], asked[None])[0])
    spent, bare = spent + late, bare + float(busy.max())
    decision, state = update(jobs.observe(k, busy, asked)._replace(
        waits=((busy + asked).max() - busy - asked + np.float32(CEILING))[:, None]), state)
    asked = np.asarray(decision.delay)
    assert spent <= 0.1 * bare
  assert spent > 0.01 * bare, "it does strike"


def test_slack_is_half_filled_and_the_late_rank_left_alone():
  busy = straggler(200)
  applied, info = run(jaxpace.pace_early_ranks(window=32, cost=1.0, unshared=CEILING), busy,
                      np.full(200, 1.9e-3))
  others = np.delete(np.arange(4), LATE)
  assert (applied[:, LATE] == 0).all() and (applied[:32] == 0).all()
  # Waits prove 9.9 ms less jitter: the collective may have taken 2 ms, and took 1.9.
  np.testing.assert_allclose(info["slack"][-1, others], 9.75e-3, atol=0.2e-3)
  np.testing.assert_allclose(applied[-1, others], 0.5 * info["slack"][-2, others], rtol=1e-5)
  assert jobs.held_back(busy, applied).max() < 1e-7


def test_it_ends_at_once_with_the_imbalance_and_within_a_window_for_good():
  steps = 8 * WINDOW
  busy = np.concatenate([straggler(steps), straggler(steps, late=0)])
  applied, _ = run(GENEROUS, busy, np.full(2 * steps, 1.9e-3))
  assert applied[steps, 0] > 4e-3
  assert (applied[steps + 1:steps + WINDOW] == 0).all(), "the first wait within the ceiling ends it"
  assert (applied[steps + WINDOW:] == 0).all()


def test_a_collective_within_its_ceiling_never_looks_like_slack():
  rng = np.random.default_rng(1)
  busy = np.full((300, 4), 10e-3)
  applied, _ = run(EAGER, busy, rng.uniform(0, 1, 300) * CEILING)
  assert (applied == 0).all()


def test_delays_that_overshoot_are_a_debt_and_unknown_ones_forfeit_all():
  pacer = GENEROUS
  state = pacer.init(4)
  state = state._replace(tokens=np.float32(3e-3))
  one = jax.tree.map(lambda leaf: leaf[0],
                     jobs.observe(0, np.full(4, 10e-3, np.float32), np.zeros(4, np.float32)))
  mine = np.arange(4) == 0

  def tokens(delay, wait, arrival=10e-3):
    seen = one._replace(delays=np.where(mine, delay, np.nan).astype(np.float32),
                        waits=np.float32([wait]),
                        arrivals=np.where(mine, arrival, np.nan).astype(np.float32))
    return float(pacer.update(seen, state)[1].tokens)

  earned = 10e-3 / 4
  assert tokens(1e-3, 9e-3) == pytest.approx(3e-3 + earned, rel=1e-5)
  assert (tokens(1e-3, 2.5e-3)
          == pytest.approx(2e-3 + earned, rel=1e-5)), "above the ceiling, but not by the delay"
  assert tokens(8e-3, 1e-3) == pytest.approx(-5e-3 + earned, rel=1e-5)
  assert tokens(1e-3, np.nan) == pytest.approx(2e-3 + earned, rel=1e-5)
  assert tokens(np.nan, 9e-3) == tokens(1e-3, 9e-3, np.nan) == tokens(1e-3, 9e-3, np.inf) == 0


def test_a_slip_is_named():
  with pytest.raises(ValueError, match="unshared=20"):
    jaxpace.pace_early_ranks(unshared=20)
