"""Pace states through real checkpoints: what lasts, what must not, and other numbers of ranks."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest

import jaxpace
from tests.instrumentation import models
from tests.instrumentation.running import Loop

STEPS = 12


def pacer():
  return jaxpace.steerable(jaxpace.chain(jaxpace.pace_early_ranks(window=8, cost=1.0)))


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
  """A checkpoint of a job of two ranks, and its pace state."""
  loop = Loop(pacer(), 2)
  loop.run(STEPS)
  path = tmp_path_factory.mktemp("checkpoint") / "12"
  with ocp.StandardCheckpointer() as checkpointer:
    checkpointer.save(path, {"state": loop.state, "pace": loop.pace})
    checkpointer.wait_until_finished()
  return path, jax.tree.map(np.asarray, loop.pace), loop


def restored(path, loop, whole):
  with ocp.StandardCheckpointer() as checkpointer:
    stored = checkpointer.metadata(path).item_metadata.tree["pace"]
    target = jaxpace.pace_target(stored, loop.mesh) if whole else loop.paced.init(loop.mesh)
    return checkpointer.restore(path, {"state": loop.state, "pace": target})["pace"]


@pytest.mark.parametrize("whole", [True, pytest.param(False, marks=pytest.mark.long)])
def test_what_the_pacer_has_learnt_comes_back_and_no_stamp_does(saved, whole, caplog):
  path, before, first = saved
  learnt = first.paced.pacer_state(before)
  assert ((before.end != 0).all() and (before.last_exit != 0).all()
          and (learnt.inner[0].low.seen == 8).all())
  loop = Loop(pacer(), 2)
  compare = loop.pace
  pace = jaxpace.restore_pace(restored(path, loop, whole), loop.paced, loop.mesh)
  assert not caplog.records
  chex.assert_trees_all_equal(jax.tree.map(np.asarray, pace.pacer), before.pacer)
  chex.assert_trees_all_equal(loop.paced.pacer_state(pace), learnt)
  assert np.asarray(pace.step).tolist() == [STEPS] * 2
  chex.assert_trees_all_equal(pace._replace(step=compare.step, pacer=compare.pacer), compare)
  chex.assert_trees_all_equal_shapes_and_dtypes(pace, compare)
  assert (jax.tree.map(lambda leaf: leaf.sharding, pace)
          == jax.tree.map(lambda leaf: leaf.sharding, compare))
  loop.step(loop.pace, loop.state, loop.batch)
  compiled = loop.step._cache_size()
  loop.pace = pace
  after = loop.run(1)
  assert loop.step._cache_size() == compiled, "laid out as init lays it out"
  assert np.isnan(np.asarray(after.arrivals)).all() and np.isnan(np.asarray(after.step_time)).all()
  after = loop.run(1)
  assert ((np.asarray(after.arrivals) < 60).all()
          and np.asarray(after.step).tolist() == [STEPS + 2] * 2)


def test_another_number_of_ranks_starts_the_pacer_anew_with_a_notice(saved, caplog):
  path, _, _ = saved
  loop = Loop(pacer(), 4)
  pace = jaxpace.restore_pace(restored(path, loop, whole=True), loop.paced, loop.mesh)
  (record,) = caplog.records
  assert "of 2 ranks, this job has 4" in record.getMessage()
  assert np.asarray(pace.step).tolist() == [STEPS] * 4
  chex.assert_trees_all_equal(pace._replace(step=loop.pace.step), loop.pace)
  loop.pace = pace
  assert np.asarray(loop.run(2).step).tolist() == [STEPS + 2] * 4


def test_another_pacer_starts_anew_with_a_notice(saved, caplog):
  path, before, _ = saved
  longer = jaxpace.steerable(jaxpace.chain(jaxpace.pace_early_ranks(), other_state()))
  for other in (jaxpace.pace_early_ranks(window=8), longer):
    caplog.clear()
    loop = Loop(other, 2)
    pace = jaxpace.restore_pace(before, loop.paced, loop.mesh)
    assert "another pacer" in caplog.text
    chex.assert_trees_all_equal(pace._replace(step=loop.pace.step), loop.pace)
    assert np.asarray(pace.step).tolist() == [STEPS] * 2


@pytest.mark.parametrize("change", [
    lambda packed: {"steering": np.zeros(2), "inner": [np.zeros(2)]},
    lambda packed: {"words": packed.words, "others": [np.zeros(2)]},
    lambda packed: {"words": packed.words[:, :-1]},
    lambda packed: {"words": packed.words + np.uint32(1)}, lambda packed: None])
def test_a_pacer_state_of_another_layout_starts_anew_with_a_notice(saved, change, caplog):
  _, before, _ = saved
  new = Loop(pacer(), 2)
  pace = jaxpace.restore_pace(before._replace(pacer=change(before.pacer)), new.paced, new.mesh)
  assert "another version of jaxpace" in caplog.text
  chex.assert_trees_all_equal(pace._replace(step=new.pace.step), new.pace)
  assert np.asarray(pace.step).tolist() == [STEPS] * 2


def other_state():
  return jaxpace.Pacer(lambda ranks: jnp.zeros(3),
                       lambda seen, state: (jaxpace.Decision(jnp.float32(0), {}), state))


@pytest.mark.long
def test_under_pmap(saved, caplog):
  _, before, _ = saved
  paced = jaxpace.instrument(models.plain_step, "data", pacer(), share=True)
  devices = jax.local_devices()[:2]
  pace = jaxpace.restore_pace(before, paced, devices=devices)
  chex.assert_trees_all_equal(jax.tree.map(np.asarray, pace.pacer), before.pacer)
  step = jax.pmap(paced, "data", devices=devices)
  state = jax.tree.map(lambda leaf: jnp.stack([leaf] * 2), models.mlp_params())
  batch = jax.tree.map(lambda leaf: leaf.reshape(2, -1, *leaf.shape[1:]), models.batches(2)[0])
  pace, _ = step(pace, state, batch)
  assert np.asarray(pace.step).tolist() == [STEPS + 1] * 2 and not caplog.records


def test_wrong_uses_name_the_fix(saved):
  _, before, _ = saved
  loop = Loop(pacer(), 2)
  with pytest.raises(TypeError, match="what jaxpace.instrument returned"):
    jaxpace.restore_pace(before, loop.step, loop.mesh)
  with pytest.raises(TypeError, match="without 'step': with 'pace', 'state'"):
    jaxpace.restore_pace({"pace": before, "state": 0}, loop.paced, loop.mesh)
  with pytest.raises(TypeError, match="This is a ndarray"):
    jaxpace.restore_pace(np.zeros(3), loop.paced, loop.mesh)
  with pytest.raises(ValueError, match="metadata of the pace state alone"):
    jaxpace.pace_target({"pace": "x"}, loop.mesh)


@pytest.mark.parametrize("step", [np.zeros(0, np.int32), np.float32(np.nan), np.full(2, np.inf),
                                  np.int64(-1), np.int64(2**40), np.float32(1.5), "many"], ids=str)
def test_a_number_of_steps_that_is_none_is_refused_in_a_sentence(saved, step):
  _, pace, loop = saved
  with pytest.raises(TypeError, match="'step' is no number of steps"):
    jaxpace.restore_pace(pace._replace(step=step), loop.paced, loop.mesh)


@pytest.mark.parametrize("arrivals", [np.float32(1.0), np.zeros((0, 2), np.float32),
                                      np.zeros(0, np.float32)], ids=str)
def test_arrivals_of_no_rank_are_refused_in_a_sentence(saved, arrivals):
  _, pace, loop = saved
  with pytest.raises(TypeError, match="'arrivals' have the shape"):
    jaxpace.restore_pace(pace._replace(arrivals=arrivals), loop.paced, loop.mesh)
