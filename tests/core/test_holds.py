"""What becomes of a pacer's answer before a collective: bounded, whatever it is, and added up."""

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpace.core import pacing
from jaxpace.core.types import Decision, Hold, Pacer
from tests.quick import examples

MOST = 0.05
ANY = st.floats(width=32)


def asks(seconds, listen=True):
  """A pacer that always answers this; its state counts how often it was asked."""
  def update(seen, count):
    return Decision(jnp.float32(0), {}), count

  def hold(moment, count):
    return Hold(jnp.float32(seconds), jnp.asarray(listen)), count + 1

  return Pacer(lambda ranks: jnp.int32(0), update, hold)


def followed(pacer, heard, step_held=0.0):
  """Follows a pacer before one collective: seconds of each hold, and the moment at the end."""
  moment = pacing.before_collective(jnp.int32(3), 1, jnp.float32(step_held))
  state, seconds = pacer.init(1), []
  while True:
    asked, state = pacing.hold_back(pacer, moment, state, MOST)
    seconds.append(float(asked.seconds))
    if not asked.listen:
      return seconds, moment, int(state)
    moment = pacing.listened(moment, asked, jnp.float32(heard(len(seconds))))


@hypothesis.given(ANY, st.lists(ANY, min_size=1, max_size=5))
@hypothesis.settings(max_examples=examples(40), deadline=None)
def test_no_step_is_held_longer_than_it_may_be(seconds, heard):
  held, moment, _ = followed(asks(seconds), lambda k: heard[k % len(heard)])
  assert all(0 <= each <= np.float32(MOST) for each in held)
  assert sum(held) <= MOST * (1 + 1e-5)
  assert len(held) <= pacing.MOST_LISTENED + 1
  assert np.isfinite(float(moment.held)) and float(moment.held) >= 0


def test_what_was_asked_for_and_heard_is_added_up():
  held, moment, times = followed(asks(4e-3), lambda k: 1e-3 * k, step_held=21e-3)
  # 21 ms are spent; then 4 + 1, 4 + 2, 4 + 3, 4 + 4 ms leave 3 of 50.
  assert held == pytest.approx([4e-3, 4e-3, 4e-3, 4e-3, 3e-3], rel=1e-4)
  assert float(moment.held) == pytest.approx(26e-3)
  assert float(moment.step_held) == pytest.approx(47e-3)
  assert int(moment.listened) == 4 and times == 5
  assert float(moment.heard) == pytest.approx(4e-3)


def test_what_is_not_heard_costs_nothing_and_is_known_as_such():
  _, moment, _ = followed(asks(0.0), lambda k: np.nan)
  assert float(moment.held) == 0 and int(moment.listened) == pacing.MOST_LISTENED
  assert np.isnan(float(moment.heard))


def test_a_pacer_that_answers_something_else_is_told():
  moment = pacing.before_collective(jnp.int32(0), 0, jnp.float32(0))
  wrong = Pacer(lambda ranks: (), None, lambda moment, state: (jnp.float32(0), state))
  with pytest.raises(ValueError, match=r"pacer.hold must return \(Hold, state\)"):
    pacing.hold_back(wrong, moment, (), MOST)
  grows = Pacer(lambda ranks: (), None, lambda moment, state: (Hold(0.0, False), (state, state)))
  with pytest.raises(ValueError, match=r"pacer.hold must return a state of the same structure"):
    pacing.hold_back(grows, moment, (), MOST)


def test_pacers_of_two_functions_hold_nothing():
  assert Pacer(lambda ranks: (), None).hold is None


def test_it_may_be_compiled():
  moment = pacing.before_collective(jnp.int32(0), 0, jnp.float32(0))
  pacer = asks(1.0)
  asked, _ = jax.jit(lambda m, s: pacing.hold_back(pacer, m, s, MOST))(moment, pacer.init(1))
  assert float(asked.seconds) == np.float32(MOST) and not bool(asked.listen)
