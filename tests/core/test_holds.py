"""What becomes of a pacer's answer before a collective: bounded, whatever it is, and added up."""

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpace.core import pace, pacing, packing
from jaxpace.core.types import Decision, Hold, Pacer
from jaxpace.instrumentation import before_collective
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


@pytest.mark.parametrize("answer, said", [
    (None, r"pacer.hold must return \(Hold, state\); it returned a NoneType"),
    (Hold(0.0, False), r"pacer.hold must return \(Hold, state\); it returned a Hold"),
    ((jnp.float32(0), ()), r"pacer.hold must return \(Hold, state\)"),
    ((Hold(0.0, False), ((), ())), "pacer.hold must return a state of the same structure"),
    ((Hold(np.zeros(3), False), ()), r"seconds must be one number; this one is of shape \[3\]"),
    ((Hold(None, False), ()), "seconds must be one number; this one is a NoneType"),
    ((Hold(0.0, "yes"), ()), "listen must be one number; this one is a str")])
def test_a_wrong_answer_is_told_in_a_sentence_wherever_it_is_asked_first(answer, said):
  moment = pacing.before_collective(jnp.int32(0), 0, jnp.float32(0))
  pacer = Pacer(lambda ranks: (), None, lambda moment, state: answer)
  with pytest.raises(ValueError, match=said):
    pacing.hold_back(pacer, moment, (), MOST)
  # Ranks' states are compared before anybody is asked.
  with pytest.raises(ValueError, match=said):
    before_collective.digest(packing.pack(()), pacer)


@pytest.mark.parametrize("answer, said", [
    (Decision(0.0, {}), "it returned a Decision"),
    ((Decision(np.zeros(2), {}), ()), r"delay must be one number.*\[2\]"),
    ((Decision(0.0, None), ()), "info must be a dict of single numbers, .* a NoneType"),
    ((Decision(0.0, {"seen": "x"}), ()), r"info\['seen'\] must be one number")])
def test_a_wrong_decision_is_told_in_a_sentence(answer, said):
  with pytest.raises(ValueError, match=said):
    pacing.decide(Pacer(lambda ranks: (), lambda seen, state: answer), None, ())


def test_a_key_in_a_pacers_state_is_refused_with_what_to_carry_instead():
  pacer = Pacer(lambda ranks: {"key": jax.random.key(1)}, lambda seen, state: (None, state))
  with pytest.raises(ValueError, match=r"Carry its numbers, jax\.random\.key_data"):
    pace.fresh(2, 4, pacer)
