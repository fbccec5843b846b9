"""`steerable` and the knobs it turns: what is off is exactly 0, what is as made is bit for bit as
made."""

import hypothesis
import hypothesis.strategies as st
import jax.numpy as jnp
import numpy as np
import pytest

import jaxpace
from jaxpace.coordination.knobs import Steered
from tests.coordination import jobs
from tests.quick import examples

RANKS = 3
ARRIVALS = np.array([5e-3, 12e-3, 20e-3], np.float32)
SPENDER = jaxpace.steerable(jaxpace.pace_early_ranks(window=8, threshold=0.0, noise=0.0, cost=0.05,
                                                     max_delay=5e-3))


def play(pacer, steps, changes=None):
  """Runs all ranks. `changes` maps a step to new settings, applied before it. Returns delays
  [steps, RANKS], state and columns, each leaf with a leading axis of ranks."""
  update, state = jobs.compiled(pacer), jobs.states(pacer, RANKS)
  asked, history, infos = np.zeros(RANKS, np.float32), [], []
  for step in range(steps):
    if changes and step in changes:
      state = changed(state, changes[step])
    history.append(asked)
    decision, state = update(jobs.observe(step, ARRIVALS, asked), state)
    asked = np.asarray(decision.delay)
    infos.append(decision.info)
  return np.array(history), state, infos


def changed(state, settings):
  """The state of all ranks with other settings."""
  return state._replace(steering=state.steering._replace(**{
      name: jnp.stack([jnp.asarray(value, getattr(state.steering, name).dtype)] * RANKS)
      for name, value in settings.items()}))


def early(**settings):
  return jaxpace.pace_early_ranks(**{"window": 8, "cost": 1.0, "noise": 0.0, "max_delay": 4e-3,
                                     **settings})


def test_as_made_it_changes_nothing_bit_for_bit():
  plain, _, _ = play(early(), 60)
  steered, state, infos = play(jaxpace.steerable(early()), 60)
  np.testing.assert_array_equal(plain, steered)
  assert (plain[-1, :2] > 0).all() and isinstance(state, Steered)
  assert (infos[-1]["allowed"] == 1).all() and "slack" in infos[-1]


def test_off_is_exactly_zero_from_the_step_that_was_named_and_on_again_comes_at_once():
  delays, _, infos = play(jaxpace.steerable(early()), 80,
                          {50: {"enabled": False}, 60: {"enabled": True}})
  assert (delays[50, :2] > 0).all(), "decided before"
  assert (delays[51:61] == 0).all() and (delays[61:, :2] > 0).all(), "it went on observing"
  assert (infos[55]["allowed"] == 0).all() and infos[55]["active"][0] == 1


def test_the_longest_delay_can_be_cut_and_raised():
  delays, _, _ = play(jaxpace.steerable(early()), 140,
                      {40: {"max_delay": 1e-3}, 60: {"max_delay": 9e-3},
                       120: {"max_delay": np.nan}})
  np.testing.assert_allclose(delays[38:41, 0], 4e-3)
  np.testing.assert_allclose(delays[41:61, 0], 1e-3)
  assert delays[61:121, 0].max() > 8e-3 and (delays[61:121] <= np.float32(9e-3)).all()
  assert (delays[121:] <= np.float32(4e-3)).all()


@pytest.mark.parametrize("nested", [False, True])
def test_the_threshold_reaches_the_pacer_inside(nested):
  inner = jaxpace.chain(jaxpace.limit(early(), 3e-3)) if nested else early()
  delays, _, _ = play(jaxpace.steerable(inner), 120,
                      {40: {"threshold": 0.9}, 80: {"threshold": np.nan}})
  assert (delays[35:41, :2] > 0).all()
  assert (delays[60:81, 1] == 0).all(), "its slack of 8 ms is below half of 0.9 x 21 ms"
  assert (delays[60:81, 0] > 0).all(), "hysteresis: its slack of 15 ms is above"
  assert (delays[-1, :2] > 0).all()


@pytest.mark.long
@hypothesis.given(st.data())
@hypothesis.settings(max_examples=examples(60))
def test_the_cost_stays_within_the_bucket_whatever_is_changed_when(data):
  """Sum of L <= cost x sum of max(A), under any sequence of settings and arrivals."""
  pacer, cost = SPENDER, 0.05
  update, state = jobs.compiled(pacer), jobs.states(pacer, RANKS)
  asked = np.zeros(RANKS, np.float32)
  spent = earned = 0.0
  arrivals = data.draw(st.lists(st.floats(1e-3, 50e-3), min_size=RANKS, max_size=RANKS))
  for step in range(60):
    if step % 15 == 14:
      change = {"enabled": data.draw(st.booleans()),
                "max_delay": data.draw(st.sampled_from([np.nan, 0.0, 1e-3, 5.0])),
                "threshold": data.draw(st.sampled_from([np.nan, 0.0, 0.5])),
                "ranks": data.draw(st.lists(st.booleans(), min_size=RANKS, max_size=RANKS))}
      state = changed(state, change)
      arrivals = data.draw(st.permutations(arrivals))
    seen = np.array(arrivals, np.float32)
    earned += cost * float(seen.max())
    spent += float((seen.astype(np.float64) + asked).max() - seen.max())
    decision, state = update(jobs.observe(step, seen, asked), state)
    asked = np.asarray(decision.delay)
    assert np.isfinite(asked).all() and (asked >= 0).all()
    assert spent <= earned + 1e-9


def test_only_ranks_and_steps_that_are_named_are_delayed():
  delays, _, _ = play(jaxpace.steerable(early()), 70, {
      40: {"ranks": [False, True, True]},
      50: {"ranks": [True] * RANKS, "from_step": 55, "until_step": 60}})
  assert (delays[41:51, 0] == 0).all() and (delays[41:51, 1] > 0).all()
  acted = np.flatnonzero(delays[:, 0] > 0)
  assert acted[acted > 40].tolist() == [55, 56, 57, 58, 59]
