"""guard: what it lets through, from what it judges, and that ranks judge alike."""

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxpace
from jaxpace.coordination import trial
from jaxpace.core.types import Observation
from tests.coordination import jobs
from tests.coordination.test_any_observation import ANY, observations, plain
from tests.coordination.test_combinators import MOST, RANKS, always
from tests.coordination.test_trial import noisy
from tests.quick import examples, long

BLOCK, WAIT = trial.BLOCK, 2e-3


def judged(state):
  return jax.tree.map(np.asarray, state).trial


def run(pacer, times, ranks=2, shared=True):
  """Runs a job as `jaxpace.instrument` would have its pacer see it.

  `times`: (step, delays applied [ranks]) -> the job's step time in seconds, or those of all ranks;
  None ends the run. Returns applied delays [steps, ranks], columns [steps, ranks] as they lie in
  the trace: beside the delay that came with them, and the state after the run.
  """
  state, asked = jobs.states(pacer, ranks), np.zeros(ranks, np.float32)
  applied, columns, step, job = [], [], 0, np.nan
  info = None
  unknown = np.full((ranks, 1), np.nan, np.float32)
  while (took := times(step, asked)) is not None:
    took = np.broadcast_to(np.float32(took), (ranks,))
    applied.append(asked)
    columns.append(info)
    seen = Observation(
        step=np.full(ranks, step, np.int32), rank=np.arange(ranks, dtype=np.int32),
        arrivals=np.zeros((ranks, ranks), np.float32),
        delays=np.broadcast_to(asked, (ranks, ranks)) if shared else
        np.where(np.eye(ranks, dtype=bool), asked, np.float32(np.nan)), waits=unknown,
        step_time=took if step else np.full(ranks, np.nan, np.float32),
        job_step_time=np.full(ranks, job if shared else np.nan, np.float32), job_transfers=unknown,
        job_transfers_now=unknown)
    decision, state = jobs.compiled(pacer)(seen, state)
    job = took[0] if step else np.nan
    asked, info = np.asarray(decision.delay), jax.tree.map(np.asarray, decision.info)
    step += 1
  columns[0] = jax.tree.map(np.zeros_like, info)
  return np.stack(applied), jax.tree.map(lambda *leaves: np.stack(leaves), *columns), state


def steps_of(base):
  """The job's step time, where `base` [steps, 2] is that without and with any rank delayed; None
  after the last."""
  return lambda step, delays: (float(base[step, int((delays > 0).any())]) if step < len(base)
                               else None)


ASKS = always(WAIT, slack=7)
GUARDED = jaxpace.guard(ASKS)


def test_delays_pass_in_blocks_on_and_are_exactly_zero_in_blocks_off():
  applied, columns, state = run(GUARDED, steps_of(noisy(BLOCK * 12)))
  on = columns["guard_on"][:, 0] == 1
  np.testing.assert_array_equal(applied,
                                np.where(on, np.float32(WAIT),
                                         np.float32(0))[:, None].repeat(2, axis=1))
  assert 0.3 < on[BLOCK:].mean() < 0.6 and not on[:BLOCK].any()
  assert (columns["slack"][1:] == 7).all()
  assert (state.inner == BLOCK * 12).all(), "the pacer observes every step"


@pytest.mark.parametrize("shared", [True, *long(False)])
def test_each_step_time_is_counted_to_the_arm_that_acted_in_it(shared):
  """Without noise and without steps to settle, a single step on the wrong side would show in the
  fourth digit."""
  pacer = jaxpace.guard(ASKS, settle=0, block=8)
  _, columns, _ = run(pacer, steps_of(noisy(800, -0.1, cv=0.0)), shared=shared)
  known = columns["pairs"][:, 0] > 0
  np.testing.assert_allclose(columns["effect"][known], -0.1, rtol=1e-5)
  assert columns["guard_on"][-1].all() and columns["effect_high"][-1, 0] < 0


def test_the_pair_column_says_which_steps_count_in_which_pair():
  """The effect recomputed from the trace is the guard's own. (Pair 0 counts nowhere; a run's first
  row is all 0.)"""
  base, took = noisy(BLOCK * 30, 0.02), []

  def times(step, delays):
    seconds = steps_of(base)(step, delays)
    took.append(seconds)
    return seconds

  _, columns, _ = run(GUARDED, times)
  seconds, pair, on = (np.array(took[:-1], np.float32), columns["guard_pair"][:, 0],
                       columns["guard_on"][:, 0] == 1)
  blocks = [[seconds[(pair == p) & (on == arm)] for arm in (True, False)]
            for p in range(1, int(np.nanmax(pair)))]
  assert all(len(arm) == BLOCK - 1 for block in blocks for arm in block)
  means = np.array([[arm.mean() for arm in block] for block in blocks])
  assert columns["pairs"][-1, 0] == len(means)
  np.testing.assert_allclose(columns["effect"][-1],
                             np.mean(means[:, 0] - means[:, 1]) / means[:, 1].mean(), rtol=1e-3)


def test_ranks_decide_alike_whatever_their_own_step_times():
  rng = np.random.default_rng(0)
  base = noisy(700, 0.05, cv=0.1)

  def times(step, delays):
    seconds = steps_of(base)(step, delays)
    return None if seconds is None else seconds * np.array([1, *rng.uniform(0.2, 5.0, 2)])

  applied, columns, state = run(GUARDED, times, ranks=3)
  for name in columns:
    np.testing.assert_array_equal(columns[name][:, :1].repeat(3, axis=1), columns[name])
  for leaf in jax.tree.leaves(judged(state)):
    assert len({np.asarray(leaf)[r].tobytes() for r in range(3)}) == 1
  assert (applied[:, 0] == applied[:, 2]).all() and columns["pairs"].max() > 10


def test_a_pacer_that_asks_for_nothing_is_never_judged():
  applied, columns, _ = run(jaxpace.guard(always(0.0)), steps_of(noisy(BLOCK * 12, cv=0.1)))
  assert (not applied.any() and not columns["pairs"].any()
          and np.isnan(columns["guard_pair"][1:]).all())
  assert np.isnan(columns["effect"][1:]).all()


def test_harm_is_switched_off_and_gain_kept():
  for effect in (-0.2, 0.2):
    applied, columns, _ = run(GUARDED, steps_of(noisy(1500, effect)))
    longest = max(len(stretch)
                  for stretch in "".join("x" if row.any() else " " for row in applied).split())
    assert (longest > 500) == (effect < 0)
    if effect > 0:
      assert not applied[-600:].any()


# Whatever is observed.

EAGER = jaxpace.guard(jaxpace.pace_early_ranks(window=8, threshold=0.0, noise=0.0, quantile=0.9,
                                               cost=1.0, max_delay=MOST), block=4, settle=0)
ONE = jax.jit(EAGER.update)


@jax.jit
def plain_steps(state):
  """200 steps of plain imbalance: whether each was in a block on, and the state after."""

  def step(state, k):
    _, state = EAGER.update(jax.tree.map(jnp.asarray, plain(0, 0))._replace(step=k), state)
    return state, trial.is_on(state.trial)

  after, on = jax.lax.scan(step, state, jnp.arange(200))
  return on, after


@hypothesis.given(observations(8), hypothesis.strategies.lists(ANY, min_size=1, max_size=4))
@hypothesis.settings(max_examples=examples(40))
def test_whatever_was_observed_it_goes_on_judging(seen, wild):
  """That each delay is bounded, tests/coordination/test_any_observation.py holds."""
  state = EAGER.init(RANKS)
  for k, one in enumerate(seen):
    _, state = ONE(one._replace(job_step_time=np.float32(wild[k % len(wild)])), state)
    assert not any(np.isnan(leaf) for leaf in jax.tree.leaves(judged(state)))
  on, after = plain_steps(jax.tree.map(jnp.asarray, state))
  assert (set(np.asarray(on).tolist()) == {False, True}
          and int(judged(after).pair) > int(judged(state).pair))
