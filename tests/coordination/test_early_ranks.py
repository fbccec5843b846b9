"""pace_early_ranks: what it does about persistent slack, where it stays out, and what it can
cost."""

import hypothesis
import hypothesis.extra.numpy as hnp
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxpace
from jaxpace.coordination import early_ranks
from tests.coordination import jobs
from tests.quick import examples, long

WINDOW, COST, LATE = 16, 1e-3, 2
GENEROUS = jaxpace.pace_early_ranks(window=WINDOW, cost=1.0)  # a bucket that is never what limits
# Thresholds at zero: paces on the least slack, so that the bucket is what limits.
EAGER = jaxpace.pace_early_ranks(window=8, threshold=0.0, noise=0.0, share_of_slack=1.0,
                                 quantile=0.9, cost=COST)
SPENDER = jaxpace.pace_early_ranks(window=8, threshold=0.0, noise=0.0, share_of_slack=1.0,
                                   quantile=0.9, cost=0.3)


def straggler(steps, ranks=4, late=10e-3, noise=2e-4, seed=0, base=15e-3):
  busy = base + noise * np.random.default_rng(seed).normal(size=(steps, ranks))
  busy[:, LATE] += late
  return busy


def test_early_ranks_are_paced_inside_their_slack_and_the_late_one_is_not():
  busy = straggler(6 * WINDOW)
  applied, info = jobs.run(GENEROUS, busy)
  early = np.delete(applied[-WINDOW:], LATE, axis=1)
  assert (early > 6e-3).all() and (early < 10e-3).all()
  assert (applied[:, LATE] == 0).all()
  # A deviation of 0.2 ms: nine steps in ten have at least 9.7 ms.
  np.testing.assert_allclose(np.delete(info["slack"][-1], LATE), 9.7e-3, atol=0.5e-3)
  np.testing.assert_allclose(early[-1], 0.8 * np.delete(info["slack"][-2], LATE), rtol=1e-5)
  np.testing.assert_allclose(info["threshold"][-1], 0.05 * 26e-3, rtol=0.1)
  assert jobs.held_back(busy, applied).max() < 1e-7, "the step is no longer than without"


@pytest.mark.parametrize("noise", [1e-5, 3e-4])
def test_delays_are_exactly_zero_within_a_window_once_imbalance_subsides(noise):
  steps = 5 * WINDOW
  busy = np.concatenate([straggler(steps, noise=noise),
                         straggler(steps, late=0, noise=noise, seed=1)])
  applied, _ = jobs.run(GENEROUS, busy)
  assert (applied[steps].max() > 7e-3) and (applied[steps + WINDOW:] == 0).all()


def test_a_rank_that_is_late_in_most_steps_only_leaves_no_slack():
  """Its mean is late, but one step in four has no room."""
  busy = straggler(512, late=0)
  busy[:, LATE] += 20e-3 * (np.arange(len(busy)) % 4 != 0)
  applied, _ = jobs.run(jaxpace.pace_early_ranks(window=64, cost=1.0, noise=0), busy)
  assert (applied[192:, 0] > 0).mean() < 0.2


def test_hysteresis():
  """Slack between half the threshold and the whole: stays on where it was on, does not come on by
  itself."""
  above, between, below = (straggler(6 * WINDOW, late=x, noise=0, base=20e-3)
                           for x in (2.4e-3, 0.9e-3, 0.3e-3))
  # threshold: 5 % of 21 to 23.4 ms
  pacer = jaxpace.pace_early_ranks(window=WINDOW, cost=1.0, noise=0)
  off, _ = jobs.run(pacer, between)
  assert (off == 0).all()
  applied, _ = jobs.run(pacer, np.concatenate([above, between, below]))
  n = len(above)
  assert (applied[n - 1, :2] > 1.8e-3).all()
  np.testing.assert_allclose(applied[2 * n - 1, :2], 0.8 * 0.9e-3, rtol=0.05)
  assert (applied[2 * n + WINDOW:] == 0).all()


def test_the_threshold_rises_with_the_noise_of_the_slack():
  """The same mean lateness, steady and erratic."""
  steps = 10 * WINDOW
  steady = straggler(steps, late=4e-3, noise=1e-4)
  erratic = straggler(steps, late=0, noise=1e-4)
  erratic[:, LATE] += np.random.default_rng(5).exponential(4e-3, steps)
  plain, _ = jobs.run(GENEROUS, steady)
  careful, info = jobs.run(GENEROUS, erratic)
  assert (plain[3 * WINDOW:, 0] > 0).all()
  assert (careful[3 * WINDOW:, 0] > 0).mean() < 0.1
  assert np.median(info["threshold"][3 * WINDOW:, 0]) > 4e-3


@pytest.mark.parametrize("ranks, shape", [
    (64, "normal"), (4, "exponential"), *long((256, "exponential"), (256, "normal"))])
def test_ranks_that_are_late_in_turn_are_not_paced(ranks, shape):
  rng = np.random.default_rng(ranks)
  noise = rng.normal(size=(300, ranks)) if shape == "normal" else rng.exponential(size=(300, ranks))
  applied, _ = jobs.run(jaxpace.pace_early_ranks(window=64), 20e-3 * (1 + 0.05 * noise))
  assert (applied == 0).all()


def test_without_the_others_arrivals_it_stays_passive():
  seen = np.eye(4, dtype=bool)
  update, state = jobs.compiled(GENEROUS), jobs.states(GENEROUS, 4)
  for k, busy in enumerate(straggler(4 * WINDOW)):
    observation = jobs.observe(k, busy.astype(np.float32), np.zeros(4, np.float32))
    hidden = np.where(seen, observation.arrivals, np.float32(np.nan))
    decision, state = update(observation._replace(arrivals=hidden), state)
    assert (np.asarray(decision.delay) == 0).all()
  assert np.isnan(decision.info["slack"]).all() and (np.asarray(decision.info["tokens"]) == 0).all()


def test_one_missing_arrival_stops_the_delay_for_that_step_at_once():
  steps = 4 * WINDOW
  seen = np.ones((steps, 4), bool)
  seen[-3, 1] = False
  applied, info = jobs.run(GENEROUS, straggler(steps, noise=0), seen)
  assert (applied[-3, :2] > 0).all() and (applied[-2] == 0).all()
  assert (info["active"][-3] == 0).all() and (info["active"][-1, :2] == 1).all()
  assert (info["tokens"][-3] == 0).all(), "what the step may have cost is paid in full"


def test_delays_grow_no_faster_than_tokens():
  busy = straggler(400, noise=0)
  applied, info = jobs.run(jaxpace.pace_early_ranks(window=WINDOW), busy)
  earned = COST * np.cumsum(busy.max(axis=1))
  np.testing.assert_allclose(info["tokens"][:, 0], earned, rtol=1e-4)
  assert (applied[WINDOW + 1:, 0] <= earned[WINDOW:-1] * (1 + 1e-6)).all()
  np.testing.assert_allclose(applied[-1, 0], min(0.8 * 10e-3, earned[-2]), rtol=1e-4)


def test_the_bucket_holds_the_longest_delay_at_most():
  """What is not spent is not saved up for a burst: here nobody is early."""
  pacer = jaxpace.pace_early_ranks(window=WINDOW, cost=1.0, max_delay=50e-3)
  _, info = jobs.run(pacer, np.full((20, 4), 15e-3))
  np.testing.assert_allclose(info["tokens"][:, 0], np.minimum(15e-3 * np.arange(1, 21), 50e-3),
                             rtol=1e-4)


# What it can cost: in exact arithmetic on the arrivals and delays as they were, whatever they were.


@st.composite
def hostile_jobs(draw):
  steps, ranks = draw(st.integers(12, 40)), draw(st.sampled_from([1, 2, 5]))
  scale = draw(st.sampled_from([1e-4, 20e-3, 1.0, 500.0]))
  busy = (draw(hnp.arrays(np.float32, (steps, ranks), elements=st.floats(0, 1, width=32)))
          * np.float32(scale))
  if draw(st.booleans()):  # lull, then strike: everyone was early, and suddenly no one is
    busy[: steps // 2] *= np.float32(1e-2)
    busy[: steps // 2, 0] = np.float32(scale)
  seen = np.ones((steps, 1), bool)
  if draw(st.booleans()):
    seen = draw(hnp.arrays(bool, (steps, 1), elements=st.booleans()))
  blind = draw(hnp.arrays(bool, (1, ranks), elements=st.booleans()))
  return busy, seen | ~blind


@pytest.mark.parametrize("pacer, cost", [(EAGER, COST), *long((SPENDER, 0.3), (GENEROUS, 1.0))])
@hypothesis.given(hostile_jobs())
@hypothesis.settings(max_examples=examples(60))
def test_the_sum_of_what_is_held_back_is_within_the_cost_whatever_arrives(pacer, cost, job):
  busy, seen = job
  applied, _ = jobs.run(pacer, busy, seen)
  spent = np.cumsum(jobs.held_back(busy, applied))
  allowed = cost * np.cumsum(busy.astype(np.float64).max(axis=1))
  assert (spent <= allowed).all()


@pytest.mark.parametrize("ranks", [2, 16])
def test_it_holds_where_the_bucket_is_really_emptied(ranks):
  """The early become late in the very step in which they are delayed most: the worst that arrivals
  can do."""
  update, state = jobs.compiled(SPENDER), jobs.states(SPENDER, ranks)
  asked, spent, bare = np.zeros(ranks, np.float32), 0.0, 0.0
  hits = 0
  for k in range(400):
    busy = np.full(ranks, 10e-3, np.float32)
    if asked.max() < 2e-3:
      busy[0] = 20e-3  # rank 0 is late until the others' delays are worth striking at
    late = float(jobs.held_back(busy[None], asked[None])[0])
    hits += late > 0
    spent, bare = spent + late, bare + float(busy.max())
    decision, state = update(jobs.observe(k, busy, asked), state)
    asked = np.asarray(decision.delay)
    assert spent <= 0.3 * bare
  assert hits > 5 and spent > 0.02 * bare


def test_a_delay_that_overshoots_is_a_debt_that_is_paid_first():
  busy = straggler(1500, noise=4e-3, seed=8)
  overshoot = np.full(busy.shape, 5e-3)
  applied, info = jobs.run(EAGER, busy, overshoot=overshoot)
  assert info["tokens"].min() < 0
  spent, bare = np.cumsum(jobs.held_back(busy, applied)), np.cumsum(busy.max(axis=1))
  assert (spent <= COST * bare + 5e-3).all(), "never further over than one overshoot"
  indebted = info["tokens"][:-1, 0] < 0
  assert (applied[1:][indebted] == 0).all()


FILLED = jax.jit(early_ranks.tokens_after)


@hypothesis.given(st.lists(st.tuples(st.floats(0, 100, width=32), st.floats(0, 1, width=32)),
                           max_size=30))
@hypothesis.settings(max_examples=examples(60))
def test_rounding_never_adds_to_the_bucket(steps):
  """Against float64; delays may be longer than what is in it."""
  tokens, exact = jnp.zeros((), jnp.float32), 0.0
  for arrival, share in steps:
    arrivals = jnp.asarray([arrival, arrival / 2], jnp.float32)
    delays = jnp.asarray([share * max(float(tokens), 0), 0], jnp.float32)
    exact += np.float64(np.float32(COST)) * float(arrivals[0]) - float(delays[0])
    tokens = FILLED(arrivals, delays, np.float32(COST), np.float32(1e3), tokens)
    assert float(tokens) <= exact + 1e-30
    assert float(tokens) >= exact - 1e-4 * (1 + abs(exact))
