"""Jobs that hold their collectives back, on one link: against closed forms, and against the other
event loop."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxpace
from experiments.paper import on_one_link as turns
from experiments.paper import quick
from jaxpace.core.types import Decision, Hold, Pacer

STEPS = 60


def drawn(ready, work, start, shared, obeys, tiny=1e-3):
  """One scene of jobs whose steps are all alike: ready and work [J, B]."""
  ready, work = np.asarray(ready, np.float32), np.asarray(work, np.float32)
  jobs = len(work)
  speeds = [1.0] + [shared] * (jobs - 1)
  repeat = (jobs, 4, work.shape[1])
  return turns.Drawn(*(jnp.asarray(value)[None] for value in (
      np.broadcast_to(ready[:, None], repeat), np.broadcast_to(work[:, None], repeat),
      np.asarray(start, np.float32), np.asarray(speeds, np.float32),
      np.full(jobs, tiny, np.float32), np.asarray(obeys))))


def stacked(make, jobs):
  return jax.tree.map(lambda *leaves: jnp.stack([jnp.asarray(leaf) for leaf in leaves]), *[
      make(key).init(1) for key in range(jobs)])


@functools.lru_cache
def compiled(make, steps):
  return jax.jit(turns.simulator(make(0), steps))


def played(scene, make, ear=None, steps=STEPS):
  ear = turns.Ear(wrong=0.0, scatter=0.0) if ear is None else ear
  jobs = scene.start.shape[1]
  return jax.tree.map(lambda values: np.asarray(values)[0],
                      compiled(make, steps)(jax.random.key(3), scene, ear, stacked(make, jobs)))


def nothing(key):
  return turns.nothing()


def waits(key):
  """Knows the link by heart: waits for as long as others send, and no longer."""
  def hold(moment, state):
    busy = moment.heard > np.float32(1e-2)
    return Hold(jnp.float32(0), (moment.listened == 0) | busy), state
  return Pacer(lambda ranks: (), lambda seen, state: (Decision(jnp.float32(0), {}), state), hold)


def test_without_holds_it_is_the_other_event_loop():
  rng = np.random.default_rng(0)
  ready = np.sort(rng.uniform(0.5, 1.5, (2, 50, 2)), axis=2).astype(np.float32)
  work = rng.uniform(0.1, 0.4, (2, 50, 2)).astype(np.float32)
  scene = turns.Drawn(*(jnp.asarray(value)[None] for value in (
      ready, work, np.array([0, 0.3], np.float32), np.array([1, 0.35], np.float32),
      np.full(2, 1e-3, np.float32), np.array([True, True]))))
  found = played(scene, nothing, steps=50)
  expected = quick.play(quick.Drafts(ready[0], work[0]), quick.Drafts(ready[1], work[1]),
                        jnp.float32(0.3), jnp.float32(0.35))
  np.testing.assert_allclose(found.step_time[0], np.asarray(expected), rtol=1e-5)
  assert found.held[0].max() == 0 and found.listened[0].max() == 0


def test_one_waits_for_the_other_and_nobody_is_late_but_for_listening():
  """Both are ready at once: who listens second waits for the whole bucket of the first."""
  scene = drawn([[1], [1.01]], [[0.4], [0.4]], [0, 0], 0.5, [True, True], tiny=5e-3)
  bare = drawn([[1], [1.01]], [[0.4], [0.4]], [0, 0], 0.5, [False, False], tiny=5e-3)
  with_turns, without = played(scene, waits, steps=1), played(bare, waits, steps=1)
  assert with_turns.step_time[0, 0] == pytest.approx(1.405, abs=1e-4), "it listened once"
  assert with_turns.sent[0, 0] == pytest.approx(0.4, abs=1e-3)
  # Sharing: alone for 0.01, then at half speed until the first is over.
  assert without.step_time[0, 0] == pytest.approx(1.01 + 2 * 0.39, abs=1e-3)


def test_a_crowded_bucket_takes_longer_only_if_another_job_sends_when_it_begins():
  bare = drawn([[1.01], [1]], [[0.4], [0.4]], [0, 0], 1.0, [False, False])
  crowded = bare._replace(crowded=jnp.full(bare.work.shape, 0.3))
  np.testing.assert_allclose(played(crowded, nothing, steps=1).step_time[:, 0], [1.71, 1.4],
                             rtol=1e-5)
  apart = drawn([[1], [1.5]], [[0.4], [0.4]], [0, 0], 1.0, [False, False])
  apart = apart._replace(crowded=jnp.full(bare.work.shape, 0.3))
  np.testing.assert_allclose(played(apart, nothing, steps=1).step_time[0, 0], 1.4, rtol=1e-5)


def test_a_hold_is_counted_from_the_last_exit_and_what_is_not_ready_waits_anyway():
  def make(key):
    def hold(moment, state):
      return Hold(jnp.where(moment.slot == 0, np.float32(0.7),
                            np.float32(0.2)), jnp.asarray(False)), state
    return Pacer(lambda ranks: (), lambda seen, state: (Decision(jnp.float32(0), {}), state), hold)

  found = played(drawn([[1.0, 1.0]], [[0.1, 0.1]], [0], 1.0, [True]), make, steps=4)
  # 0.7 is over before the first is ready at 1; the second waits for 0.2 after the first.
  np.testing.assert_allclose(found.step_time[0, 1:], 1.0 + 0.1 + 0.2 + 0.1, rtol=1e-5)
  np.testing.assert_allclose(found.held[0], 0.9, rtol=1e-5)


@pytest.mark.long
@pytest.mark.parametrize("ratio", [1.0, 1.13, 1.3])
def test_take_turns_gains_where_sharing_loses_and_both_do(ratio):
  """Two jobs, of one period and of others, on a link that loses a third of its capacity where they
  share."""
  def make(key):
    return jaxpace.take_turns(key=key, floor=0.2, learn=20, trial=20)

  ready = [[0.6, 0.6], [0.6 * ratio, 0.6 * ratio]]
  work = [[0.2, 0.2], [0.2, 0.2]]
  steps = 300
  found, bare = (played(drawn(ready, work, [0, 0.15], 1 / 3, [obeys] * 2, tiny=1e-3), make,
                        turns.Ear(), steps)
                 for obeys in (True, False))
  late = slice(100, 200)
  for job in (0, 1):
    assert found.step_time[job, late].mean() < bare.step_time[job, late].mean() * 0.99
  assert found.info["turns"][0, :100].mean() > 0.2
