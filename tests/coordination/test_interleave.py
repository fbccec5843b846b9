"""interleave_jobs: what it asks, from what, and what it never does."""

import functools

import hypothesis
import hypothesis.extra.numpy as hnp
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxpace
from jaxpace.coordination import interleave
from tests.coordination import jobs
from tests.quick import examples

FLOOR = 10e-3
CLEAR = 0.02 * 4
"""Of floors, to begin with: a tenth of a fifth of the collective."""


def seen(step, transfers, step_time=0.1, rank=0, now=None):
  """One rank's observation; what is its own is noise."""
  rng = np.random.default_rng([step, rank])
  transfers = np.asarray(transfers, np.float32)
  arrivals = rng.random(2).astype(np.float32)
  return jaxpace.Observation(
      step=np.int32(step), rank=np.int32(rank), arrivals=arrivals, delays=arrivals,
      waits=rng.random(len(transfers)).astype(np.float32), step_time=np.float32(rng.random()),
      job_step_time=np.float32(step_time), job_transfers=transfers,
      job_transfers_now=np.full(len(transfers), np.nan, np.float32) if now is None
      else np.asarray(now, np.float32))


@functools.cache
def scanned(pacer):
  """The delays asked [keys, steps] over a run, each key being part of the state."""

  def turn(state, observation):
    decision, state = pacer.update(observation, state)
    return state, decision.delay

  def one(key, every):
    start = jax.tree.map(jnp.asarray, pacer.init(2))._replace(key=key)
    return jax.lax.scan(turn, start, every)[1]

  return jax.jit(jax.vmap(one, in_axes=(0, None)))


@functools.cache
def pacer_of(settings):
  """One for all tests of the same settings, so that each is compiled once."""
  return jaxpace.interleave_jobs(**dict(settings))


KEYS, LENGTH = 64, 64
"""Of what is compiled. Steps after those asked for change nothing before them, nor does one key
another."""


def padded(steps):
  """Stacks observations and repeats the last one up to a multiple of LENGTH."""
  steps = [*steps, *[steps[-1]] * (-len(steps) % LENGTH)]
  return jax.tree.map(lambda *leaves: np.stack(leaves), *steps)


def ask_keys(keys, history, now=None, step_time=0.1, **settings):
  """The delays asked [keys, steps]."""
  frozen = tuple((name, tuple(value) if isinstance(value, list) else value)
                 for name, value in settings.items())
  every = padded([seen(k, row, step_time, now=None if now is None else now[k])
                  for k, row in enumerate(history)])
  found = scanned(pacer_of(frozen))(jnp.arange(KEYS, dtype=jnp.uint32), every)
  return np.asarray(found)[:keys, :len(history)]


def ask(history, **settings):
  """The delays asked after each step of the job of key 1."""
  return ask_keys(2, history, **{"floor": FLOOR, **settings})[1]


QUIET, FOLLOWER = [FLOOR] * 4, [2 * FLOOR, 2 * FLOOR, 1.5 * FLOOR, FLOOR]
LEADER = FOLLOWER[::-1]


def test_the_follower_moves_by_the_work_ahead_and_the_leader_stays():
  """And by a fiftieth of its collective more to begin with, once it has seen it three times."""
  asked = ask_keys(64, [QUIET, *[FOLLOWER] * 3, QUIET], floor=FLOOR)
  moved = asked[:, 3] > 0
  assert moved.mean() == pytest.approx(0.75, abs=0.15)
  np.testing.assert_allclose(asked[moved, 3], (2.5 + CLEAR) * FLOOR, rtol=1e-5)
  assert (asked[:, [0, 1, 2, 4]] == 0).all()
  assert (ask([QUIET, *[LEADER] * 50]) == 0).all()


def test_one_step_that_was_held_up_is_no_reason_to_move():
  assert (ask_keys(8, [QUIET, FOLLOWER, FOLLOWER, QUIET] * 10, floor=FLOOR) == 0).all()


def after_a_shift(*rows, quiet=12):
  """Delays [keys, rows] asked upon `rows`, by those that made a shift `quiet` steps before."""
  before = [*[FOLLOWER] * 3, *[QUIET] * quiet]
  asked = ask_keys(64, [*before, *rows], floor=FLOOR)
  return asked[asked[:, 2] > 0][:, len(before):]


def test_a_job_that_was_parted_corrects_its_phase_sooner_and_on_less():
  touch = [1.3 * FLOOR, FLOOR, FLOOR, FLOOR]  # 7.5 % of the floors, less than the dead band
  asked = after_a_shift(touch, touch)
  moved = asked[(asked > 0).all(axis=1)]
  assert len(moved) > 0.9 * len(asked), "but for tests"
  np.testing.assert_allclose(moved, [[0.3 * FLOOR, CLEAR * FLOOR]] * len(moved), rtol=1e-4)
  assert (ask([QUIET, *[touch] * 20]) == 0).all(), "not before it was"


def test_later_it_takes_two_steps_beyond_the_dead_band():
  """Else a job whose neighbour has left would go on answering its own ranks' pauses."""
  touch, more = [1.3 * FLOOR, FLOOR, FLOOR, FLOOR], [1.6 * FLOOR, FLOOR, FLOOR, FLOOR]
  assert (after_a_shift(*[touch] * 4, quiet=60) == 0).all()
  asked = after_a_shift(more, more, quiet=60)
  assert (asked[:, 0] == 0).all()
  moved = asked[asked[:, 1] > 0, 1]
  assert len(moved) > 0.9 * len(asked)
  np.testing.assert_allclose(moved, (0.6 + CLEAR) * FLOOR, rtol=1e-4)


def at_once(rows):
  """What the live step shows of `rows`: the step before, and all but the last bucket of the step
  just done."""
  return {"history": [[np.nan] * 4, *rows[:-1]], "now": [[*row[:3], np.nan] for row in rows],
          "floor": FLOOR}


def test_the_step_just_done_is_looked_at_where_most_of_it_is_known():
  asked = ask_keys(64, **at_once([QUIET, *[FOLLOWER] * 3, *[QUIET] * 3]))
  moved = asked[:, 3] > 0
  assert moved.mean() == pytest.approx(0.75, abs=0.15)
  # Its last bucket isn't known: taken to be shared as the one before it, 0.5 of a floor.
  np.testing.assert_allclose(asked[moved, 3], (3.0 + CLEAR) * FLOOR, rtol=1e-5)
  assert (asked[:, [0, 1, 2, 4, 5, 6]] == 0).all()
  assert (ask_keys(16, **at_once([QUIET, *[LEADER] * 50])) == 0).all()


def test_a_scalar_that_is_summed_first_does_not_hide_the_order():
  """A loss: latency, not bandwidth; alone on the link by luck."""
  times = [[1e-4, *FOLLOWER]] * 3
  asked = ask_keys(8, times, floor=[1e-4, *[FLOOR] * 4])
  np.testing.assert_allclose(asked.max(), (2.5 + CLEAR) * FLOOR + 2e-6, rtol=1e-3)


durations = st.floats(width=32) | st.floats(0, 1, width=32)


@functools.cache
def on_three_ranks(floor):
  """Decisions and states of ranks 0, 1 and 2 over a run of given transfers [steps, S] and step
  times [steps]."""
  pacer = jaxpace.interleave_jobs(0.05, floor=floor, key=3)
  update = jax.vmap(pacer.update)

  def scan(observations):
    def turn(state, observation):
      decision, state = update(observation, state)
      return state, (decision, state)
    return jax.lax.scan(turn, jobs.states(pacer, 3), observations)[1]

  return jax.jit(scan)


@pytest.mark.long
@pytest.mark.parametrize("floor", [None, 0.1])
@hypothesis.given(data=st.data())
@hypothesis.settings(max_examples=examples(40))
def test_whatever_is_seen_the_delay_is_bounded_and_the_same_on_all_ranks(floor, data):
  steps, slots = 10, data.draw(st.sampled_from([1, 4, 20]))
  transfers = data.draw(hnp.arrays(np.float32, (steps, slots), elements=durations))
  step_times = data.draw(hnp.arrays(np.float32, (steps,), elements=durations))
  each = [seen(k, transfers[k], step_times[k], rank) for k in range(steps) for rank in range(3)]
  stacked = jax.tree.map(lambda *leaves: np.stack(leaves).reshape(steps, 3, *np.shape(leaves[0])),
                         *each)
  decisions, states = on_three_ranks(floor)(stacked)
  delay = np.asarray(decisions.delay)
  assert np.isfinite(delay).all() and (delay >= 0).all() and (delay <= np.float32(0.05)).all()
  for leaf in jax.tree.leaves((decisions, states)):
    leaf = np.asarray(leaf)
    raw = leaf.view(np.uint32) if leaf.dtype.itemsize == 4 else leaf
    assert (raw == raw[:, :1]).all()


def test_where_nothing_is_shared_nothing_is_asked():
  assert (ask([[np.nan] * 4] * 20, step_time=np.nan) == 0).all()
  assert (ask([FOLLOWER] * 20, step_time=np.nan) == 0).all()


def test_it_waits_until_what_it_did_can_be_seen():
  asked = ask([FOLLOWER] * 60)
  acted = np.flatnonzero(asked)
  assert len(acted) > 2 and (np.diff(acted) >= 3).all()
  at_once_asked = ask_keys(8, **at_once([FOLLOWER] * 60))
  gaps = np.concatenate([np.diff(np.flatnonzero(row)) for row in at_once_asked])
  assert gaps.min() == 2, "one decision less where the step just done is seen"


def test_delays_stay_within_the_bank():
  asked = ask([FOLLOWER] * 1000, retry=1)
  assert (np.cumsum(asked) <= 0.1 * (1 + 0.01 * np.arange(1, 1001)) + 1e-6).all()
  assert asked.sum() > 0.3, "or nothing has been tested"


def test_a_tie_is_broken_by_a_coin_that_differs_from_job_to_job():
  tied = [[2 * FLOOR] * 4] * 30
  asked = ask_keys(64, tied, floor=FLOOR)
  assert (asked[:, 2] > 0).mean() == pytest.approx(0.5, abs=0.15), "half of them move at once"
  moved = asked[asked > 0]
  assert moved.min() >= 1.1 * 4 * FLOOR and moved.max() <= 1.5 * 4 * FLOOR
  assert np.unique(moved).size == moved.size


def test_who_was_first_is_seen_at_the_ends_where_all_buckets_are_shared():
  """As two jobs in step over TCP: the last bucket of the one, the first of the other is held up
  more."""
  first, last = [1.6, 2.0, 2.0, 2.4], [2.4, 2.0, 2.0, 1.6]
  found = [interleave.look(jnp.asarray(n, jnp.float32) * FLOOR, jnp.full((4,), FLOOR))
           for n in (first, last, [2.0] * 4)]
  assert [bool(look.leads) for look in found] == [True, False, False]
  assert [bool(look.trails) for look in found] == [False, True, False]
  assert not any(bool(look.clears) for look in found)
  assert (ask([[n * FLOOR for n in first]] * 60) == 0).all()
