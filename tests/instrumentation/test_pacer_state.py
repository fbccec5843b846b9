"""The pacer's own state inside the pace state: read and put back by `paced`, in every layout, and
never mistaken."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxpace
from tests.instrumentation import models
from tests.instrumentation.running import Loop, P, instrumented, mesh_of

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


def test_the_abstract_state_is_that_of_the_real_one():
  paced, mesh = jaxpace.instrument(models.plain_step, "data", counting()), mesh_of(data=RANKS)
  described, made = paced.abstract(mesh), paced.init(mesh)
  chex.assert_trees_all_equal_shapes_and_dtypes(described, made)
  assert (jax.tree.map(lambda leaf: leaf.sharding, described)
          == jax.tree.map(lambda leaf: leaf.sharding, made))


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
