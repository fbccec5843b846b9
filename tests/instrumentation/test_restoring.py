"""Pace states through real checkpoints: what lasts, what must not, and other numbers of ranks."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest

import jaxpace
from tests.instrumentation import models
from tests.instrumentation.running import Loop, P, instrumented, mesh_of

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


def started_anew(pace, loop, caplog, notice):
  """The pace state that is restored: with a notice, the step's number and nothing else."""
  caplog.clear()
  found = jaxpace.restore_pace(pace, loop.paced, loop.mesh)
  (record,) = caplog.records
  assert notice in record.getMessage()
  chex.assert_trees_all_equal(found._replace(step=loop.pace.step), loop.pace)
  assert np.asarray(found.step).tolist() == [STEPS] * loop.mesh.size
  return found


def test_another_number_of_ranks_starts_the_pacer_anew_with_a_notice(saved, caplog):
  loop = Loop(pacer(), 4)
  loop.pace = started_anew(restored(saved[0], loop, whole=True), loop, caplog,
                           "of 2 ranks, this job has 4")
  assert np.asarray(loop.run(2).step).tolist() == [STEPS + 2] * 4


def test_another_pacer_starts_anew_with_a_notice(saved, caplog):
  longer = jaxpace.steerable(jaxpace.chain(jaxpace.pace_early_ranks(), jaxpace.Pacer(
      lambda ranks: jnp.zeros(3),
      lambda seen, state: (jaxpace.Decision(jnp.float32(0), {}), state))))
  for other in (jaxpace.pace_early_ranks(window=8), longer):
    started_anew(saved[1], Loop(other, 2), caplog, "another pacer")


@pytest.mark.parametrize("change", [
    lambda packed: {"steering": np.zeros(2), "inner": [np.zeros(2)]},
    lambda packed: {"words": packed.words, "others": [np.zeros(2)]},
    lambda packed: {"words": packed.words[:, :-1]},
    lambda packed: {"words": packed.words + np.uint32(1)}, lambda packed: None])
def test_a_pacer_state_of_another_layout_starts_anew_with_a_notice(saved, change, caplog):
  _, before, _ = saved
  started_anew(before._replace(pacer=change(before.pacer)), Loop(pacer(), 2), caplog,
               "another version of jaxpace")


@pytest.mark.parametrize("value", [np.nan, -np.inf])
def test_a_pacer_whose_numbers_are_damaged_starts_anew_with_a_notice(saved, value, caplog):
  """On one rank alone: pacers must not differ between ranks. A setting that is NaN where nothing
  was set is no damage."""
  _, before, first = saved
  state = first.paced.pacer_state(before)
  tokens = np.array([state.inner[0].tokens[0], value], np.float32)
  damaged = first.paced.with_pacer_state(first.pace, state._replace(
      inner=(state.inner[0]._replace(tokens=tokens),)))
  started_anew(jax.tree.map(np.asarray, damaged), Loop(pacer(), 2), caplog,
               "holds NaN or infinity as the pacer's .inner[0].tokens:")


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


def test_what_is_no_pace_state_is_told_so(saved):
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


@pytest.mark.parametrize("field, words, values", [
    ("step", "'step' is no number of steps", [
        np.zeros(0, np.int32), np.float32(np.nan), np.full(2, np.inf), np.int64(-1),
        np.int64(2**40), np.float32(1.5), "many"]),
    ("arrivals", "'arrivals' have the shape", [
        np.float32(1.0), np.zeros((0, 2), np.float32), np.zeros(0, np.float32)])])
def test_no_number_of_steps_and_arrivals_of_no_rank_are_refused(saved, field, words, values):
  _, pace, loop = saved
  for value in values:
    with pytest.raises(TypeError, match=words):
      jaxpace.restore_pace(pace._replace(**{field: value}), loop.paced, loop.mesh)


# The pacer's own state inside the pace state: read and put back by `paced`, in every layout, and
# never mistaken.

RANKS = 2


def counting():
  """A pacer whose state is a plain tree of several kinds, one of them not packed."""
  def init(ranks):
    return {"steps": 0, "half": jnp.float16(0), "each": jnp.zeros((ranks, 2)),
            "flag": jnp.bool_(False)}

  def update(seen, state):
    after = {"steps": state["steps"] + jnp.int32(1), "half": state["half"] + jnp.float16(0.5),
             "each": state["each"] + jnp.float32(2), "flag": ~state["flag"]}
    return jaxpace.Decision(jnp.float32(0), {}), after

  return jaxpace.Pacer(init, update)


def test_it_is_read_by_name_and_put_back_and_the_step_goes_on_with_it():
  loop = Loop(counting(), donate=(0,))
  before = loop.paced.pacer_state(loop.pace)
  assert before["steps"].tolist() == [0] * RANKS and before["steps"].dtype == np.int32
  state = loop.paced.pacer_state(loop.run(3))
  assert state["steps"].tolist() == [3] * RANKS and state["flag"].tolist() == [True] * RANKS
  assert state["half"].tolist() == [1.5] * RANKS and state["half"].dtype == jnp.float16
  assert state["each"].shape == (RANKS, RANKS, 2) and (state["each"] == 6).all()
  # The same of a copy on the host.
  copied = loop.paced.pacer_state(jax.tree.map(np.asarray, loop.pace))
  assert isinstance(copied["steps"], np.ndarray)
  chex.assert_trees_all_equal(copied, state, strict=True)

  cached = loop.step._cache_size()
  loop.pace = loop.paced.with_pacer_state(loop.pace,
                                          state | {"steps": np.array([10, 20], np.int32)})
  assert loop.paced.pacer_state(loop.run(1))["steps"].tolist() == [11, 21]
  assert loop.step._cache_size() == cached, "laid out as it was: not compiled again"
  assert (loop.paced.pacer_state(loop.pace)["each"] == 8).all()


def test_under_check_vma_a_pacer_whose_state_does_not_vary_is_packed_too():
  paced, step, pace = instrumented(lambda w, x: jax.lax.pmean(jnp.mean(x) * w, "data"),
                                   mesh_of(data=RANKS), P(), P("data"), check_vma=True,
                                   pacer=counting())
  pace, _ = step(pace, jnp.float32(2), jnp.ones(RANKS))
  assert paced.pacer_state(pace)["steps"].tolist() == [1] * RANKS


def test_a_pacer_without_state_is_asked_and_a_pace_state_made_for_none_is_refused():
  always = jaxpace.Pacer(lambda ranks: (),
                         lambda seen, state: (jaxpace.Decision(jnp.float32(1e-4), {}), state))
  loop = Loop(always, donate=(0,))
  assert (loop.paced.pacer_state(loop.pace) == ()
          and (np.asarray(loop.run(1).delay) == np.float32(1e-4)).all())
  loop.pace = loop.paced.with_pacer_state(loop.pace, ())
  assert (np.asarray(loop.run(1).delay) == np.float32(1e-4)).all()
  made_for_none = jaxpace.instrument(models.plain_step, "data").init(mesh_of(data=RANKS))
  with pytest.raises(ValueError, match="made for another pacer, or for none"):
    loop.step(made_for_none, loop.state, loop.batch)


def test_without_a_pacer_it_is_empty():
  paced = jaxpace.instrument(models.plain_step, "data")
  pace = paced.init(mesh_of(data=RANKS))
  assert paced.pacer_state(pace) == () and paced.with_pacer_state(pace, ()) is pace
  with pytest.raises(ValueError, match="same structure"):
    paced.with_pacer_state(pace, {"steps": 0})


def test_wrong_uses_name_the_fix():
  loop = Loop(counting(), donate=(0,))
  state = loop.paced.pacer_state(loop.pace)
  for wrong in (state | {"steps": np.zeros(RANKS, np.float32)},
                state | {"more": np.zeros(RANKS)}, ()):
    with pytest.raises(ValueError, match="same structure, shapes and dtypes"):
      loop.paced.with_pacer_state(loop.pace, wrong)
  with pytest.raises(ValueError, match="takes the pace state first"):
    loop.paced.pacer_state(state)
  with pytest.raises(ValueError, match="with_pacer_state"):
    loop.step(loop.pace._replace(pacer=state), loop.state, loop.batch)
  for other in (None, jaxpace.pace_early_ranks()):
    paced = jaxpace.instrument(models.plain_step, "data", other, share=True)
    pace = paced.init(mesh_of(data=RANKS))
    with pytest.raises(ValueError, match="made for another pacer, or for none"):
      loop.step(pace, loop.state, loop.batch)
