"""`jaxpace.recorded`: the short way does what the long way does."""

from __future__ import annotations

import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import jaxpace
from jaxpace.trace.reader import read_run

RANKS, STEPS = 2, 7


def train_step(state, batch):
  """Least squares by hand: one gradient, averaged."""
  gradient = jax.grad(lambda weights: ((batch @ weights - jnp.float32(1)) ** 2).mean())(state)
  state = state - jnp.float32(0.1) * jax.lax.pmean(gradient, "data")
  return state, (state ** 2).sum()


def batches() -> list[np.ndarray]:
  return list(np.random.default_rng(0).normal(size=(STEPS, 8, 3)).astype(np.float32))


def compiled(mesh: jax.sharding.Mesh):
  """An instrumented step that donates its pace and its state, the mesh's sharding of a batch, and a state."""
  paced, spec = jaxpace.instrument(train_step, axis_name="data"), jaxpace.spec(mesh)
  step = jax.shard_map(paced, mesh=mesh, in_specs=(spec, P(), P("data")), out_specs=(spec, P()), check_vma=False)
  state = jax.device_put(jnp.ones(3, jnp.float32), jax.NamedSharding(mesh, P()))
  return paced, jax.jit(step, donate_argnums=(0, 1)), jax.NamedSharding(mesh, P("data")), state


@pytest.fixture
def mesh() -> jax.sharding.Mesh:
  return jax.make_mesh((RANKS,), ("data",), devices=jax.devices()[:RANKS])


def test_results_and_record_are_those_of_the_long_way(tmp_path: pathlib.Path, mesh: jax.sharding.Mesh) -> None:
  paced, step, sharding, state = compiled(mesh)
  pace = paced.init(mesh)
  with jaxpace.Recorder(tmp_path / "long", paced) as recorder:
    for batch in batches():
      pace, (state, size) = step(pace, state, jax.device_put(batch, sharding))
      recorder.record(pace)
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
  assert list(read_run(tmp_path).steps) == list(range(STEPS))


def test_what_is_recorded_before_an_error_is_kept(tmp_path: pathlib.Path, mesh: jax.sharding.Mesh) -> None:
  paced, step, sharding, state = compiled(mesh)
  with pytest.raises(KeyboardInterrupt), jaxpace.recorded(tmp_path, paced, step, mesh) as short:
    for batch in batches()[:3]:
      state, _ = short(state, jax.device_put(batch, sharding))
    jax.block_until_ready(state)
    raise KeyboardInterrupt
  assert list(read_run(tmp_path).steps) == [0, 1, 2]


def test_the_usual_slips_are_named(tmp_path: pathlib.Path, mesh: jax.sharding.Mesh) -> None:
  paced, step, _, _ = compiled(mesh)
  with pytest.raises(ValueError, match="mesh"):
    jaxpace.recorded(tmp_path, paced, step)
  with pytest.raises(TypeError, match="jaxpace.instrument"):
    jaxpace.recorded(tmp_path, step, step, mesh)
