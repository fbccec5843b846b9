"""A slip gives a sentence that names the likely mistake and the fix."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxpace
from jaxpace.core.types import Decision, Pacer
from tests.instrumentation import models
from tests.instrumentation.running import P, mesh_of


def trace(step, mesh, *, axis="data", pace=None, specs=None, out_specs=None, check_vma=False,
          **settings):
  """Traces an instrumented step, as jit would; nothing is compiled."""
  paced = jaxpace.instrument(step, axis, **settings)
  pace = paced.init(mesh) if pace is None else pace
  spec = jaxpace.spec(mesh)
  specs = (spec, P(), P("data")) if specs is None else specs
  out_specs = (spec, P()) if out_specs is None else out_specs
  mapped = jax.shard_map(paced, mesh=mesh, in_specs=specs, out_specs=out_specs, check_vma=check_vma)
  return jax.eval_shape(mapped, pace, models.mlp_params(), models.batches(4)[0])


def forgetful(params, batch):
  return params, jnp.float32(0)


def over_the_model(params, batch):
  return params, jax.lax.psum(jnp.sum(batch[0]), "model")


def pacer(update):
  return {"pacer": Pacer(lambda ranks: np.float32(0), update)}


ONE, TWO = {"data": 4}, {"data": 2, "model": 2}
PARTLY = {"specs": (P("data"), P(), P("data")), "out_specs": (P("data"), P())}
WHOLE = {"specs": (P(), P(), P("data")), "out_specs": (P(), P())}
CHECKED = {"check_vma": True}


@pytest.mark.parametrize("step, axes, settings, words", [
    (forgetful, ONE, CHECKED, r"forgetful has no collective over 'data'.*pmean"),
    (forgetful, ONE, {}, r"forgetful has no collective over 'data'.*pmean"),
    (over_the_model, TWO, {}, r"no collective over 'data', but over 'model'"),
    (models.vma_step, TWO, PARTLY | CHECKED, r"leaves out .*model.*jaxpace\.spec\(mesh\)"),
    (models.plain_step, TWO, PARTLY, r"leaves out .*model.*jaxpace\.spec\(mesh\)"),
    (models.vma_step, ONE, WHOLE | CHECKED, r"own part.*jaxpace\.spec\(mesh\)"),
    (models.plain_step, ONE, WHOLE, r"own part.*jaxpace\.spec\(mesh\)"),
    (models.plain_step, ONE, pacer(lambda o, s: (jnp.float32(0), s)),
     "must return .Decision, state."),
    (models.plain_step, ONE, pacer(lambda o, s: (Decision(jnp.float32(0), {}),
                                                 s.astype(jnp.int32))),
     "same structure, shapes and dtypes"),
    (models.plain_step, ONE, pacer(lambda o, s: (
        Decision(jnp.float32(0), {str(i): s for i in range(25)}), s)), "has 25")])
def test_what_cannot_be_traced(step, axes, settings, words):
  with pytest.raises(ValueError, match=words):
    trace(step, mesh_of(**axes), **settings)


@pytest.mark.parametrize("axis, use, words", [
    ("batch", lambda paced: paced.init(mesh_of(data=4)), r"no axis 'batch'.*'data'"),
    ("data", lambda paced: paced.init(), "either the mesh"),
    ("data", lambda paced: paced.init(None), "either the mesh"),
    ("data", lambda paced: paced(paced.init(mesh_of(data=1)), models.mlp_params(),
                                 models.batches(1)[0]), r"outside jax\.shard_map and jax\.pmap"),
    # The state forgotten, or in another place.
    ("data", lambda paced: paced(models.mlp_params(), models.batches(1)[0]),
     r"pace state first.*dict.*paced\.init")])
def test_wrong_uses_name_the_fix(axis, use, words):
  with pytest.raises(ValueError, match=words):
    use(jaxpace.instrument(models.plain_step, axis))


@pytest.mark.parametrize("made, used", [(2, 4), (8, 4)])
def test_a_state_of_another_number_of_ranks(made, used):
  old = jaxpace.instrument(models.plain_step, "data").init(mesh_of(data=made))
  old = jax.tree.map(lambda leaf: jnp.asarray(np.resize(np.asarray(leaf), (used, *leaf.shape[1:]))),
                     old)
  with pytest.raises(ValueError, match=rf"made for {made} ranks.*runs on {used}.*init"):
    trace(models.plain_step, mesh_of(data=used), pace=old)


@pytest.mark.parametrize("settings, words", [
    ({"step": 3}, "train step itself"),
    ({"axis_name": ()}, "data axis"),
    ({"axis_name": 1}, "data axis"),
    ({"pacer": lambda o, s: (0, s)}, "not a Pacer"),
    ({"clock": "sundial"}, "'sundial'.*native.*callback"),
    ({"phases": "forward"}, "jaxpace.phase"),
    ({"share": "yes"}, "'auto', True, False or None"),
    ({"slots": 0}, "slots=0"),
    ({"max_delay": 20}, "20 ms is 20e-3"),
    ({"max_delay": float("nan")}, "20 ms is 20e-3"),
    ({"max_delay": "long"}, "20 ms is 20e-3"),
    ({"max_hold": 11}, "max_hold=11"),
])
def test_bad_arguments(settings, words):
  with pytest.raises(ValueError, match=words):
    jaxpace.instrument(**({"step": models.plain_step, "axis_name": "data"} | settings))


def test_a_search_for_nans():
  mesh = mesh_of(data=2)
  pace = jaxpace.instrument(models.plain_step, "data").init(mesh)
  with jax.debug_nans(True):
    with pytest.raises(ValueError, match="jax_debug_nans is on.*without jaxpace"):
      jaxpace.instrument(models.plain_step, "data").init(devices=jax.local_devices())
    with pytest.raises(ValueError, match="jax_debug_nans is on"):
      trace(models.plain_step, mesh, pace=pace)


def test_spec_names_every_axis_and_only_those_of_the_mesh():
  assert jaxpace.spec(mesh_of(data=4)) == P("data")
  assert jaxpace.spec(mesh_of(data=2, model=2)) == P(("data", "model"))
  for axes in (["data"], "data"):
    assert jaxpace.spec(mesh_of(data=2, model=2), axes=axes) == P("data")
  with pytest.raises(ValueError, match="no axis 'row'"):
    jaxpace.spec(mesh_of(data=2), axes=["row"])


def test_arguments_that_are_no_arrays_reach_the_step_as_they_are():
  seen = []

  def step(state, batch, training, name):
    seen.append((training, name))
    return state + jax.lax.psum(jnp.sum(batch), "data")

  mesh = mesh_of(data=2)
  paced, spec = jaxpace.instrument(step, "data"), jaxpace.spec(mesh)
  run = jax.jit(jax.shard_map(
      lambda pace, state, batch: paced(pace, state, batch, True, name="train"), mesh=mesh,
      in_specs=(spec, P(), P("data")), out_specs=(spec, P())))
  assert float(run(paced.init(mesh), jnp.zeros(()), jnp.ones(4))[1]) == 4.0
  assert seen == [(True, "train")]
