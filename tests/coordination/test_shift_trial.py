"""The coin that judges shifts: its lag and its arms, what it estimates, and how rarely it is
wrong."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpace.coordination import shift_trial
from tests.quick import long

LEVEL, PATIENCE, RETRY = 0.05, 48, 100
JOBS, STEPS = 200, 1500


@functools.cache
def run():
  """Scans over [STEPS] draws and noise: step time 1 + noise, + effect in the 8 steps that follow an
  act.

  A shift is wanted again once the last one has long ceased to matter.
  """

  def turn(carry, now):
    state, since, last, before = carry
    draw, noise, effect = now
    state = shift_trial.advance(before, jnp.float32(1), state, PATIENCE, RETRY, LEVEL)
    judged = state
    wanted = (since > 12) & (state.age == 0)
    act, tested, state = shift_trial.trigger(wanted, jnp.asarray(False), jnp.float32(1), draw,
                                             state)
    since = jnp.where(act, 0, since + 1)
    # This decision is about the step that comes now; its time is seen by the decision after the
    # next one.
    took = jnp.float32(1) + noise + jnp.where(since < shift_trial.STEPS, effect, jnp.float32(0))
    return (state, since, took, last), (judged, act, tested, wanted)

  def scan(draws, noise, effect):
    start = (shift_trial.init(RETRY), jnp.int32(99), jnp.float32(1), jnp.float32(1))
    effects = jnp.broadcast_to(jnp.float32(effect), draws.shape)
    return jax.lax.scan(turn, start, (draws, noise, effects))[1]

  return jax.jit(jax.vmap(scan, in_axes=(0, 0, None)))


def jobs(sigma, seed=0):
  rng = np.random.default_rng(seed)
  return jnp.asarray(rng.random((JOBS, STEPS)), jnp.float32), jnp.asarray(
      sigma * rng.normal(size=(JOBS, STEPS)), jnp.float32)


@pytest.mark.parametrize("effect", [*long(-0.05), 0.1])
def test_it_estimates_the_effect_and_shows_its_sign(effect):
  states, _, _, _ = run()(*jobs(0.02), effect)
  estimate, low, high = jax.vmap(jax.vmap(lambda s: shift_trial.effect(s, LEVEL)))(states)
  enough = np.asarray(states.tests) == 8
  assert np.asarray(estimate)[enough].mean() == pytest.approx(effect, rel=0.25)
  inside = (np.asarray(low) <= effect) & (np.asarray(high) >= effect)
  told = np.isfinite(np.asarray(low)) & (np.asarray(states.tests) > 0)
  assert inside[told].mean() > 0.9
  shown, off = np.asarray(states.shown).any(axis=1), np.asarray(states.off > 0).any(axis=1)
  assert ((shown.all(), off.any()) == (True, False) if effect < 0
          else (shown.any(), off.all()) == (False, True))


def test_where_shifts_do_nothing_it_rarely_says_otherwise_and_gives_up():
  states, _, _, _ = run()(*jobs(0.02, seed=1), 0.0)
  _, low, high = jax.vmap(jax.vmap(lambda s: shift_trial.effect(s, LEVEL)))(states)
  false = ((np.asarray(low) > 0) | (np.asarray(high) < 0)).any(axis=1)
  assert false.mean() <= 0.05 + 0.03
  assert (np.asarray(states.off) > 0).any(axis=1).mean() > 0.9


def test_half_of_the_triggers_are_tests_and_nothing_happens_in_tails():
  states, act, tested, wanted = run()(*jobs(0.02), 0.0)
  act, tested = np.asarray(act), np.asarray(tested)
  triggers = np.asarray(wanted) & (np.asarray(states.off) == 0)
  assert tested[triggers].mean() == pytest.approx(0.5, abs=0.05)
  assert act[triggers].mean() == pytest.approx(0.75, abs=0.05)
  assert act[tested].mean() == pytest.approx(0.5, abs=0.05)
  runs = np.asarray(states.age)
  assert runs.max() == shift_trial.STEPS + shift_trial.LAG and not act[~triggers].any()


@pytest.mark.parametrize("draw, sign", [(0.1, 1), (0.3, -1)])
def test_exactly_the_eight_steps_after_the_trigger_are_compared(draw, sign):
  """Decided after step 0; a decision sees the step before the one just done."""
  state = shift_trial.init(RETRY)
  act, tested, state = shift_trial.trigger(
      jnp.asarray(True), jnp.asarray(False), jnp.float32(1), jnp.float32(draw), state)
  assert bool(tested) and bool(act) == (sign > 0)
  for decision in range(1, 11):
    step = decision - 1
    took = 1.2 if 1 <= step <= 8 else 50.0
    state = shift_trial.advance(jnp.float32(took), jnp.float32(1), state, PATIENCE, RETRY, LEVEL)
    assert int(state.tests) == (step >= 8)
  assert float(state.mean) == pytest.approx(sign * 2 * 0.2, rel=1e-4)
