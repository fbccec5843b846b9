"""`jaxpace.recorded`: the short way does what the long way does."""

from __future__ import annotations

import pathlib

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import jaxpace
from jaxpace.runs.reader import read_run

RANKS, STEPS = 2, 7


def train_step(state, batch):
  """Least squares by hand: one gradient, averaged."""
  gradient = jax.grad(lambda weights: ((batch @ weights - jnp.float32(1)) ** 2).mean())(state)
  state = state - jnp.float32(0.1) * jax.lax.pmean(gradient, "data")
  return state, (state ** 2).sum()


def batches() -> list[np.ndarray]:
  return list(np.random.default_rng(0).normal(size=(STEPS, 8, 3)).astype(np.float32))


def compiled(mesh: jax.sharding.Mesh):
  """An instrumented step that donates its pace and its state, the mesh's sharding of a batch, and a
  state."""
  paced, spec = jaxpace.instrument(train_step, axis_name="data"), jaxpace.spec(mesh)
  step = jax.shard_map(paced, mesh=mesh, in_specs=(spec, P(), P("data")), out_specs=(spec, P()),
                       check_vma=False)
  state = jax.device_put(jnp.ones(3, jnp.float32), jax.NamedSharding(mesh, P()))
  return paced, jax.jit(step, donate_argnums=(0, 1)), jax.NamedSharding(mesh, P("data")), state


@pytest.fixture
def mesh() -> jax.sharding.Mesh:
  return jax.make_mesh((RANKS,), ("data",), devices=jax.devices()[:RANKS])


def test_results_and_record_are_those_of_the_long_way(tmp_path: pathlib.Path,
                                                      mesh: jax.sharding.Mesh) -> None:
  paced, step, sharding, state = compiled(mesh)
  pace = paced.init(mesh)
  with jaxpace.Recorder(tmp_path / "long", paced) as recorder:
    for batch in batches():
      pace, (state, size) = step(pace, state, jax.device_put(batch, sharding))
      recorder.record()
  expected = np.asarray(state), np.asarray(size)

  paced, step, sharding, state = compiled(mesh)
  with jaxpace.recorded(tmp_path / "short", paced, step, mesh, config={"seed": 3}) as short:
    for batch in batches():
      state, size = short(state, jax.device_put(batch, sharding))
    assert short.recorder.recording
  np.testing.assert_array_equal(np.asarray(state), expected[0])
  np.testing.assert_array_equal(np.asarray(size), expected[1])
  np.testing.assert_array_equal(np.asarray(short.pace.step), np.asarray(pace.step))
  for name in ("long", "short"):
    run = read_run(tmp_path / name)
    assert run.ranks == RANKS and list(run.steps) == list(range(STEPS))


def test_the_pace_state_can_be_replaced(tmp_path: pathlib.Path, mesh: jax.sharding.Mesh) -> None:
  paced, step, sharding, state = compiled(mesh)
  with jaxpace.recorded(None, paced, step, mesh) as short:
    state, _ = short(state, jax.device_put(batches()[0], sharding))
    short.pace = paced.init(mesh)
    short(state, jax.device_put(batches()[1], sharding))
    assert np.asarray(short.pace.step).tolist() == [1] * RANKS
    assert not short.recorder.recording
  assert not list(tmp_path.iterdir())


def test_under_pmap(tmp_path: pathlib.Path) -> None:
  devices = jax.local_devices()[:RANKS]
  paced = jaxpace.instrument(train_step, axis_name="data")
  step = jax.pmap(paced, axis_name="data", devices=devices)
  state = jnp.ones((RANKS, 3), jnp.float32)
  with jaxpace.recorded(tmp_path, paced, step, devices=devices) as short:
    for batch in batches():
      state, _ = short(state, batch.reshape(RANKS, 4, 3))
  run = read_run(tmp_path)
  assert list(run.steps) == list(range(STEPS)) and not run.problems


def test_the_usual_slips_are_named(tmp_path: pathlib.Path, mesh: jax.sharding.Mesh) -> None:
  paced, step, _, _ = compiled(mesh)
  with pytest.raises(ValueError, match="mesh"):
    jaxpace.recorded(tmp_path, paced, step)
  for given, said in (((step, step, mesh), "jaxpace.instrument"),
                      ((paced,), "the third argument is missing"),
                      ((step, paced, mesh), "the second argument is"),
                      ((step, None, mesh), "a jitted one has its own")):
    with pytest.raises(TypeError, match=said):
      jaxpace.recorded(tmp_path, *given)


def placed(mesh):
  """A state and a batch on a mesh."""
  return (jax.device_put(jnp.ones(3, jnp.float32), jax.NamedSharding(mesh, P())),
          jax.device_put(batches()[0], jax.NamedSharding(mesh, P("data"))))


def vma_step(state, batch):
  def loss(weights):
    return jax.lax.pmean(((batch @ weights - jnp.float32(1)) ** 2).mean(), "data")

  value, gradient = jax.value_and_grad(loss)(state)
  return state - jnp.float32(0.1) * gradient, value


@pytest.mark.parametrize("ins, outs, check_vma, words", [
    (lambda spec: (P(), P("data")), lambda spec: (spec, P()), False, r"in_specs=\(spec, \*old\)"),
    (lambda spec: (spec, P(), P("data")), lambda spec: (spec, P(), P()), False,
     r"out_specs=\(spec, old\).*not \("),
    (lambda spec: (spec, P(), P("data")), lambda spec: (spec, (P(), P(), P())), False,
     r"out_specs=\(spec, old\)"),
    (lambda spec: (spec, P(), P("data")), lambda spec: P(), True,
     r"each device's own: out_specs=\(spec, old\)"),
    (lambda spec: (spec, P(), P("data")), lambda spec: (P(), P()), True,
     r"each device's own: out_specs=\(spec, old\)"),
], ids=["in", "flat", "one too many", "as before", "shared"])
def test_specs_that_do_not_fit_are_told_of_in_a_sentence(ins, outs, check_vma, words, mesh) -> None:
  paced, spec = jaxpace.instrument(vma_step, axis_name="data"), jaxpace.spec(mesh)
  step = jax.jit(jax.shard_map(paced, mesh=mesh, in_specs=ins(spec), out_specs=outs(spec),
                               check_vma=check_vma))
  with (jaxpace.recorded(None, paced, step, mesh) as run,
        pytest.raises(ValueError, match=words) as raised):
    run(*placed(mesh))
  assert raised.value.__cause__ is not None, "what JAX says of it comes along"


@pytest.mark.parametrize("ins, outs, words", [
    ((None, 0), (0, (0, 0)), r"in_axes=\(0, \*old\)"),
    ((0, None, 0), (0, 0, 0), r"out_axes=\(0, old\)"),
    # The pace state comes out of one device alone.
    ((0, None, 0), (None, None), r"1 device of 2.*out_axes=\(0, old\)"),
])
def test_axes_of_pmap_that_do_not_fit(ins, outs, words) -> None:
  devices = jax.local_devices()[:2]
  paced = jaxpace.instrument(train_step, axis_name="data")
  step = jax.pmap(paced, axis_name="data", in_axes=ins, out_axes=outs, devices=devices)
  with jaxpace.recorded(None, paced, step, devices=devices) as run, pytest.raises(
      ValueError, match=words):
    run(jnp.ones(3, jnp.float32), batches()[0].reshape(2, 4, 3))


def test_steps_with_any_number_of_results_keep_them(mesh) -> None:
  """What the bare step returned comes back as it was: one thing, three, none."""
  def of(results):
    def step(state, batch):
      state, size = train_step(state, batch)
      return {1: state, 3: (state, size, batch), 0: None}[results]
    return step

  for results, old in ((1, P()), (3, (P(), P(), P("data"))), (0, P())):
    bare = jax.jit(jax.shard_map(of(results), mesh=mesh, in_specs=(P(), P("data")), out_specs=old,
                                 check_vma=False))
    paced, spec = jaxpace.instrument(of(results), axis_name="data"), jaxpace.spec(mesh)
    step = jax.jit(jax.shard_map(paced, mesh=mesh, in_specs=(spec, P(), P("data")),
                                 out_specs=(spec, old), check_vma=False))
    with jaxpace.recorded(None, paced, step, mesh) as run:
      found = run(*placed(mesh))
    expected = bare(*placed(mesh))
    chex.assert_trees_all_equal(found, expected, strict=True)


def jitted_step():
  """A step that is jitted as a whole over two devices, its input, and its state."""
  mesh = jax.make_mesh((RANKS,), ("data",), (jax.sharding.AxisType.Auto,),
                       devices=jax.devices()[:RANKS])

  def whole(state, batch):
    loss, gradient = jax.value_and_grad(lambda weights: ((batch @ weights - 1) ** 2).mean())(state)
    return state - jnp.float32(0.1) * gradient, loss

  everywhere = jax.NamedSharding(mesh, P())
  state = jax.device_put(jnp.ones(3, jnp.float32), everywhere)
  return (jax.jit(whole, out_shardings=(everywhere, everywhere)),
          jax.NamedSharding(mesh, P("data")), state)


@pytest.mark.optimized
def test_one_line_observes_and_records_a_jitted_step(tmp_path: pathlib.Path) -> None:
  step, sharding, state = jitted_step()
  expected = state
  for batch in batches():
    expected, _ = step(expected, jax.device_put(batch, sharding))

  with jaxpace.recorded(tmp_path / "run", step, config={"seed": 3}) as short:
    for batch in batches():
      state, loss = short(state, jax.device_put(batch, sharding))
  np.testing.assert_array_equal(np.asarray(state), np.asarray(expected))
  assert loss.shape == ()
  run = read_run(tmp_path / "run")
  assert run.ranks == RANKS and list(run.steps) == list(range(STEPS))
  assert [one.kind for one in short.step.plan.programs[-1].collectives]


def test_a_step_that_is_only_traced_is_not_recorded(tmp_path: pathlib.Path) -> None:
  step, sharding, state = jitted_step()
  first, *rest = batches()
  short = jaxpace.recorded(tmp_path / "run", step)
  # As summaries of a model do, before the loop and in it.
  shapes = jax.eval_shape(short, state, jax.device_put(first, sharding))
  assert [shape.shape for shape in shapes] == [(3,), ()]
  with short:
    for batch in rest:
      jax.make_jaxpr(short)(state, jax.device_put(batch, sharding))
      state, _ = short(state, jax.device_put(batch, sharding))
  assert list(read_run(tmp_path / "run").steps) == list(range(len(rest)))


def test_nothing_is_marked_where_nothing_is_recorded() -> None:
  step, sharding, state = jitted_step()
  with jaxpace.recorded(None, step) as short:
    short(state, jax.device_put(batches()[0], sharding))
    assert not short.recorder.recording
  assert short.step is step
