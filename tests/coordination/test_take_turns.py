"""take_turns: when it listens, how long it waits, when it gives up. And what combinators make of
holds."""

import functools

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxpace
from jaxpace.coordination import take_turns as turns
from jaxpace.coordination.knobs import Steering
from jaxpace.core import pacing, packing
from jaxpace.core.types import Decision, Hold, Moment, Observation, Pacer
from jaxpace.instrumentation.before_collective import digest
from tests.quick import examples, long

QUIET, LOUD, FLOOR, SLOTS = 2e-4, 8e-4, 20e-3, 3
ANY = st.floats(width=32)


@functools.cache
def pacer_of(**more):
  return jaxpace.take_turns(key=5, floor=FLOOR, slots=SLOTS, **more)


@functools.cache
def updating(pacer):
  return jax.jit(pacer.update)


def taking(pacer):
  """The state of a job that takes turns and knows what quiet and loud are."""
  return pacer.init(2)._replace(mode=jnp.asarray(turns.TURNS), quiet=jnp.float32(QUIET),
                                loud=jnp.float32(LOUD), rested=jnp.float32(QUIET))


def play(pacer, state, readings, slot=0, step=9, before=0.0):
  """Follows it before one collective: the holds, what was held in all, and the state. Before
  earlier collectives of the step so much was held."""
  moment = pacing.before_collective(jnp.int32(step), slot, jnp.float32(before))
  holds = []
  for reading in readings:
    asked, state = pacing.hold_back(pacer, moment, state, 10.0)
    holds.append(float(asked.seconds))
    if not asked.listen:
      break
    moment = pacing.listened(moment, asked, jnp.float32(reading))
  return holds, float(moment.held) + holds[-1], int(moment.listened), state


def seen(contention, step=0, held=0.0, shared=True):
  """A step whose buckets all took 1 + contention times their floor."""
  times = np.full(SLOTS, FLOOR * (1 + contention) if shared else np.nan, np.float32)
  nan, took = np.full(2, np.nan, np.float32), np.float32(0.1)
  return Observation(np.int32(step), np.int32(0), nan, nan, times, took, took, times, times,
                     holds=np.full(SLOTS, held / SLOTS, np.float32))


def run(pacer, steps, state=None, heard=True, **observed):
  """Steps that are alike; what is held is so only while turns are taken, as it would be. Modes
  after each."""
  state = pacer.init(2) if state is None else state
  update, modes = updating(pacer), []
  cost = observed.pop("cost", None)
  contention = observed.pop("contention", 0.0)
  for k in range(steps):
    acts = int(state.mode) in (turns.TRIES, turns.TURNS)
    if acts and cost is not None:
      now = seen(cost[0], k, cost[1], **observed)
      state = state._replace(heard=np.bool_(heard))
    else:
      now = seen(contention, k, **observed)
    _, state = update(now, state)
    modes.append(int(state.mode))
  return modes, state


@pytest.mark.parametrize("mode, reading, costs", [
    (turns.TURNS, QUIET, 1), *((mode, LOUD, 0) for mode in (turns.SILENT, turns.MEASURES,
                                                            turns.RESTS))])
def test_a_quiet_link_costs_one_reading_and_in_no_other_mode_it_listens(mode, reading, costs):
  pacer = pacer_of()
  holds, held, listened, _ = play(pacer, taking(pacer)._replace(mode=jnp.asarray(mode)),
                                  [reading] * 5)
  assert holds == [0.0] * (costs + 1) and listened == costs
  assert held == pytest.approx(QUIET * costs)


def test_it_waits_while_the_link_is_in_use_and_checks_that_it_is_free():
  pacer = pacer_of()
  holds, _, listened, _ = play(pacer, taking(pacer), [LOUD, LOUD, QUIET, QUIET, QUIET])
  assert listened == 4, "two in use, one free, and one to check that"
  assert all(0.75 * QUIET <= hold <= 1.25 * QUIET * (1 + 1e-2) for hold in holds[1:3])
  assert 0 <= holds[3] <= 0.5 * QUIET and holds[4] == 0


@pytest.mark.parametrize("patience", [0.0, 0.5, 2.0])
def test_a_link_that_is_never_free_starves_nobody(patience):
  pacer = pacer_of(patience=patience)
  _, held, _, _ = play(pacer, taking(pacer), [LOUD] * 200)
  most = patience * FLOOR + 1.25 * QUIET + LOUD
  assert held <= most * 1.01 and held >= min(patience * FLOOR, LOUD) * 0.99


def test_a_gap_is_left_after_an_own_bucket_and_is_no_longer_than_a_quarter_of_it():
  pacer = pacer_of()
  state = taking(pacer)
  assert play(pacer, state, [QUIET] * 2, slot=1)[0][0] == pytest.approx(4 * QUIET + LOUD)
  slow = state._replace(quiet=jnp.float32(5e-3), loud=jnp.float32(20e-3))
  assert play(pacer, slow, [5e-3] * 2, slot=1)[0][0] == pytest.approx(0.25 * FLOOR)
  rarely = state._replace(others=state.others._replace(mean=jnp.float32(0.05),
                                                       weight=jnp.float32(1)))
  assert play(pacer, rarely, [QUIET] * 2, slot=1)[0][0] == 0


def test_without_contention_it_stays_silent():
  assert set(run(pacer_of(), 300, contention=0.05)[0]) == {turns.SILENT}


def test_turns_that_cost_less_than_sharing_are_taken():
  modes, state = run(pacer_of(learn=20, trial=30), 300, contention=0.8,
                     cost=(0.1, 0.3 * SLOTS * FLOOR))
  assert modes[-1] == turns.TURNS and modes.index(turns.MEASURES) <= 2
  assert modes.index(turns.TRIES) - modes.index(turns.MEASURES) == 20
  # What was held is known a step later.
  assert modes.index(turns.TURNS) - modes.index(turns.TRIES) == 31
  assert float(state.patience) == 2.0


@pytest.mark.parametrize("beyond", [0.2, *long(2.0)])
def test_turns_that_cost_more_are_broken_off_and_tried_ever_more_rarely(beyond):
  """After the bank is empty, at the latest: 6 collectives, then 3 with less patience."""
  modes, state = run(pacer_of(learn=20, trial=50, retry=200), 1600, contention=0.5,
                     cost=(0.5, beyond * SLOTS * FLOOR))
  acted = np.isin(modes, (turns.TRIES, turns.TURNS))
  begins = np.flatnonzero(np.diff(np.concatenate([[False], acted]).astype(int)) == 1)
  assert turns.TURNS not in modes
  rests = np.diff(begins)
  assert len(begins) >= 3 and (np.diff(rests) > 0.6 * rests[:-1]).all(), "twice as long each time"
  spent = acted.sum() * beyond
  assert spent <= len(begins) * (9 + 2 * beyond + 2)


def test_a_trial_counts_only_steps_in_which_turns_were_let_through():
  """Under the guard: while that keeps it from turns, nothing is held, and that is no trial."""
  pacer = pacer_of(learn=20, trial=30)
  modes, state = run(pacer, 200, heard=False, contention=0.8, cost=(0.8, 0.0))
  assert modes[-1] == turns.TRIES
  modes, _ = run(pacer, 40, state, contention=0.8, cost=(0.1, 0.3 * SLOTS * FLOOR))
  assert modes[-1] == turns.TURNS
  modes, _ = run(pacer, 40, state, heard=False, contention=0.0, cost=(0.0, 0.0))
  assert modes[-1] == turns.SILENT, "nobody is there any more"


def test_it_is_silent_within_50_steps_after_the_others_left():
  pacer = pacer_of(learn=20, trial=30)
  modes, state = run(pacer, 150, contention=0.8, cost=(0.1, 0.3 * SLOTS * FLOOR))
  assert modes[-1] == turns.TURNS
  modes, _ = run(pacer, 60, state, heard=False, contention=0.0, cost=(0.0, 0.01 * SLOTS * FLOOR))
  assert modes.index(turns.SILENT) <= 50


def test_turns_that_no_longer_pay_are_given_up():
  pacer = pacer_of(learn=20, trial=30)
  _, state = run(pacer, 150, contention=0.8, cost=(0.1, 0.3 * SLOTS * FLOOR))
  modes, _ = run(pacer, 40, state, contention=0.8, cost=(0.8, 0.5 * SLOTS * FLOOR))
  assert modes[-1] in (turns.TRIES, turns.RESTS)


# By message.


def whole_of(**more):
  return pacer_of(by="message", **more)


def test_by_message_it_listens_before_the_first_collective_alone_and_leaves_no_gap():
  pacer = whole_of()
  state = taking(pacer)
  assert play(pacer, state, [QUIET] * 5)[2] == 1
  assert all(play(pacer, state, [LOUD] * 5, slot=slot, before=QUIET)[:3] == ([0.0], 0.0, 0)
             for slot in range(1, SLOTS))


def test_by_message_two_more_free_readings_are_wanted_after_one_of_a_link_in_use():
  pacer = whole_of()
  assert play(pacer, taking(pacer), [LOUD, QUIET, QUIET, QUIET, QUIET])[2] == 4
  assert play(pacer, taking(pacer), [LOUD, QUIET, QUIET, LOUD, QUIET, QUIET, QUIET, LOUD])[2] == 7


def test_by_message_who_has_waited_moves_away_little_by_little():
  update = updating(whole_of())
  waited, free = [LOUD] * 3 + [QUIET] * 5, [QUIET] * 5
  total = SLOTS * FLOOR

  def last_holds(pacer, often):
    state = taking(pacer)
    state = state._replace(before=jnp.full((SLOTS,), QUIET), others=state.others._replace(
        mean=jnp.float32(often), weight=jnp.float32(1)))
    found = []
    for k in range(12):
      holds, held, _, state = play(pacer, state, waited if k == 3 else free, step=k)
      found.append(holds[-1])
      _, state = update(seen(0.0, k, held), state)
    return found

  assert last_holds(whole_of(), 0.0) == pytest.approx([0.0] * 4 + [0.02 * total] * 8)
  assert last_holds(whole_of(), 0.6) == [0.0] * 12, "who meets another job often stays"
  assert last_holds(pacer_of(), 0.0) == [0.0] * 12, "turns by bucket leave gaps instead"


def test_by_message_nobody_need_be_heard_and_what_has_paid_is_taken_again_at_once():
  """Jobs of one period that are out of each other's way hear nothing of each other."""
  cost, settings = (0.0, 0.02 * SLOTS * FLOOR), {"learn": 20, "trial": 30}
  pacer = whole_of(**settings)
  modes, state = run(pacer, 130, heard=False, contention=0.8, cost=cost)
  begin = modes.index(turns.TURNS)
  assert begin - modes.index(turns.TRIES) in (30, 31)
  silent = modes.index(turns.SILENT, begin)
  assert 30 <= silent - begin <= 34, "32 calm steps"
  assert turns.TURNS in modes[silent:silent + 3], "late again: nothing is measured or tried anew"
  assert set(modes[begin:]) == {turns.SILENT, turns.TURNS}
  assert float(state.shared.mean) > 0.7, "what sharing cost is not forgotten meanwhile"


@hypothesis.given(st.tuples(*[ANY] * 8), st.lists(ANY, min_size=3, max_size=3),
                  st.integers(-2, 200), st.integers(0, 4), st.sampled_from(["bucket", "message"]))
@hypothesis.settings(max_examples=examples(60), deadline=None)
def test_any_state_and_moment_give_a_bounded_hold(numbers, floors, count, mode, by):
  pacer = jaxpace.take_turns(key=5, slots=SLOTS, by=by)
  state = pacer.init(2)
  state = state._replace(
      quiet=jnp.float32(numbers[0]), loud=jnp.float32(numbers[1]), patience=jnp.float32(numbers[2]),
      mode=jnp.int32(mode), floor=jnp.asarray(floors, jnp.float32))
  moment = Moment(jnp.int32(count), jnp.int32(count % 7), *map(jnp.float32, numbers[3:4]),
                  jnp.int32(count), *map(jnp.float32, numbers[4:6]))
  asked, after = pacing.hold_back(pacer, moment, state, 0.05)
  assert 0 <= float(asked.seconds) <= np.float32(0.05)
  assert jax.tree.structure(after) == jax.tree.structure(state)


# Combinators.


def holds(seconds, listen=False):
  return Pacer(lambda ranks: jnp.int32(0),
               lambda observation, count: (Decision(jnp.float32(0), {}), count),
               lambda moment, count: (Hold(jnp.float32(seconds), jnp.asarray(listen)), count + 1))


def plain(seconds=0.0):
  return Pacer(lambda ranks: (),
               lambda observation, state: (Decision(jnp.float32(seconds), {}), state))


MOMENT = pacing.before_collective(jnp.int32(4), 0, jnp.float32(0))


def test_a_chain_holds_the_longest_and_listens_if_any_wants_to():
  pacer = jaxpace.chain(plain(), holds(2e-3), holds(5e-3, listen=True), holds(np.nan))
  asked, state = pacer.hold(MOMENT, pacer.init(2))
  assert float(asked.seconds) == np.float32(5e-3) and bool(asked.listen)
  assert [int(count) for count in state[1:]] == [1, 1, 1]
  assert jaxpace.chain(plain(), plain()).hold is None


def test_limit_cuts_holds():
  pacer = jaxpace.limit(holds(5e-3, listen=True), 1e-3)
  asked, _ = pacer.hold(MOMENT, pacer.init(2))
  assert float(asked.seconds) == np.float32(1e-3) and bool(asked.listen)
  assert jaxpace.limit(plain(), 1e-3).hold is None


def test_holds_are_of_all_ranks_or_none():
  with pytest.raises(ValueError, match="all ranks must hold for the same time"):
    jaxpace.only_ranks(jaxpace.take_turns(), [0])


def test_steering_off_holds_nothing():
  pacer = jaxpace.steerable(holds(5e-3, listen=True))
  state = pacer.init(3)
  assert float(pacer.hold(MOMENT, state)[0].seconds) == np.float32(5e-3)
  one_out = state.steering._replace(ranks=jnp.array([True, False, True]))
  for steering in (state.steering._replace(enabled=jnp.asarray(False)), one_out,
                   state.steering._replace(until_step=jnp.int32(4)),
                   state.steering._replace(from_step=jnp.int32(5))):
    asked, after = pacer.hold(MOMENT, state._replace(holding=tuple(steering)))
    assert float(asked.seconds) == 0 and not bool(asked.listen) and int(after.inner) == 0
  cut = state._replace(holding=tuple(state.steering._replace(max_delay=jnp.float32(1e-3))))
  assert float(pacer.hold(MOMENT, cut)[0].seconds) == np.float32(1e-3)
  assert jaxpace.steerable(plain()).hold is None


@pytest.mark.parametrize("change", [
    {"enabled": False}, *long({"max_delay": 1e-3}, {"from_step": 90}, {"until_step": 2},
                              {"ranks": [True, False]})])
def test_a_change_of_steering_is_compared_between_ranks_before_holds_go_by_it(change):
  """Control may reach one process a step, or two minutes, before another."""
  pacer = jaxpace.steerable(holds(5e-3))
  before = pacer.init(2)
  steering = before.steering._replace(**{
      name: jnp.asarray(value, getattr(before.steering, name).dtype)
      for name, value in change.items()})
  # As Control puts it in: in place of whatever is a Steering.
  told = jax.tree.map(lambda node: steering if isinstance(node, Steering) else node, before,
                      is_leaf=lambda node: isinstance(node, Steering))
  assert float(pacer.hold(MOMENT, told)[0].seconds) == float(pacer.hold(MOMENT, before)[0].seconds)
  digests = [float(digest(packing.pack(state), pacer)) for state in (before, told)]
  assert digests[0] != digests[1]
  _, after = pacer.update(seen(0.0), told)
  assert float(pacer.hold(MOMENT, after)[0].seconds) < np.float32(5e-3)


@pytest.mark.long
@pytest.mark.parametrize("gain", [-0.1, pytest.param(0.1, marks=pytest.mark.long)])
def test_the_guard_lets_holds_through_where_they_pay(gain):
  """Steps take a tenth more, or less, in which anything was held."""
  pacer = jaxpace.guard(holds(1e-3), block=8, settle=1)
  state, rng = pacer.init(1), np.random.default_rng(1)
  update, hold = jax.jit(pacer.update), jax.jit(pacer.hold)
  held, before, last = [], jnp.float32(np.nan), None
  for k in range(1500):
    asked, state = hold(MOMENT._replace(step=jnp.int32(k)), state)
    held.append(float(asked.seconds))
    took = jnp.float32(0.1 * (1 + gain * (held[-1] > 0) + 0.02 * rng.normal()))
    observation = Observation(jnp.int32(k), jnp.int32(0), jnp.zeros(1), jnp.zeros(1), jnp.zeros(1),
                              took, before, jnp.zeros(1), jnp.zeros(1), holds=asked.seconds[None])
    (_, last), state = update(observation, state)
    before = took
  assert float(last["effect"]) == pytest.approx(gain, abs=0.03)
  assert np.mean(np.asarray(held[-300:]) > 0) == (1 if gain < 0 else 0)
  assert jaxpace.guard(plain()).hold is None
