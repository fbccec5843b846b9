"""What is told beside the ring of an instrumented step, and when."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import jaxpace
from jaxpace.trace.marks.plans import path_of, read_plan

LAYERS = 3


def step(weights, x):
  def layer(h, w):
    return h + jax.lax.psum(jnp.tanh(h @ w).mean(0), "data"), None
  return weights, jax.lax.pmean(jax.lax.scan(layer, x, weights)[0].mean(), "data")


def running(devices):
  """The step on these devices, with its state and arguments."""
  mesh = jax.make_mesh((len(devices),), ("data",), (AxisType.Auto,), devices=devices)
  paced = jaxpace.instrument(step, "data")
  spec = jaxpace.spec(mesh)
  jitted = jax.jit(jax.shard_map(paced, mesh=mesh, in_specs=(spec, P(), P("data")),
                                 out_specs=(spec, P()), check_vma=False))
  args = np.ones((LAYERS, 4, 4), np.float32), np.ones((2 * len(devices), 4), np.float32)
  return paced, paced.init(mesh), lambda pace: jitted(pace, *args)


def test_what_marks_mean_is_there_from_the_first_record_on(tmp_path, monkeypatch):
  paced, pace, call = running(jax.devices())
  # Not one copy of the state is made before it is looked for.
  monkeypatch.setattr("jaxpace.trace.recorder.Recorder._copy", lambda self: None)
  with jaxpace.Recorder(tmp_path, paced) as recorder:
    pace, _ = call(pace)
    assert not path_of(tmp_path, 0).exists()
    recorder.record(pace)
    found = read_plan(tmp_path, 0).plan
    monkeypatch.undo()
  program, = found.programs
  assert program.number == paced.plan.program
  assert [one.turns for one in program.collectives if one.loops] == [LAYERS]
  assert read_plan(tmp_path, 0).plan == found


@pytest.mark.parametrize("record", [1, 8])
def test_ranks_in_another_order_than_the_rings_are_not_told_of(tmp_path, record):
  paced, pace, call = running(jax.devices()[::-1])
  with jaxpace.Recorder(tmp_path, paced, every_steps=1) as recorder:
    for _ in range(record):
      pace, value = call(pace)
      jax.block_until_ready(value)
      recorder.record(pace)
  assert not path_of(tmp_path, 0).exists() and not recorder.programs


def test_a_state_whose_ranks_somebody_numbered_otherwise_is_told_of_no_longer(tmp_path):
  paced, pace, call = running(jax.devices())
  turned = jax.device_put(np.arange(jax.device_count(), dtype=np.int32)[::-1], pace.rank.sharding)
  with jaxpace.Recorder(tmp_path, paced, every_steps=1) as recorder:
    pace, value = call(pace._replace(rank=turned))
    jax.block_until_ready(value)
    recorder.record(pace)
  assert not path_of(tmp_path, 0).exists() and not recorder.programs
