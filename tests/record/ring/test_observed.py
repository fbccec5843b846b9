"""Steps that `jaxpace.observe` marked, recorded: layers in a scan under remat, sharded parameters,
several shapes."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxpace
from jaxpace.runs.reader import read_run
from tests.record.recording import parts, process_file, table

LAYERS, WIDTH = 4, 16


@pytest.fixture(scope="module")
def mesh():
  return jax.make_mesh((2, 2), ("data", "fsdp"), (AxisType.Auto,) * 2, devices=jax.devices()[:4])


@pytest.fixture(scope="module")
def weights(mesh):
  values = np.random.default_rng(0).normal(size=(LAYERS, WIDTH, WIDTH)).astype(np.float32) / 8
  return jax.device_put(values, NamedSharding(mesh, P(None, "fsdp", None)))


def loss(weights, batch):
  def layer(h, w):
    return jnp.tanh(h @ w) + h, None
  out, _ = jax.lax.scan(jax.checkpoint(layer), batch, weights)
  return jnp.mean(out ** 2)


def batch_of(mesh, size):
  return jax.device_put(np.ones((size, WIDTH), np.float32),
                        NamedSharding(mesh, P(("data", "fsdp"))))


def steps_of(mesh):
  spec = NamedSharding(mesh, P(None, "fsdp", None))

  def train(weights, batch):
    value, gradient = jax.value_and_grad(loss)(weights, batch)
    return weights - jnp.float32(0.1) * gradient, value

  return jax.jit(train, out_shardings=(spec, NamedSharding(mesh, P())), donate_argnums=0)


def check(directory, steps):
  """Whatever the step was: rows of each rank and step, whose parts add up to the time between two
  ends."""
  rows = {(row["rank"], row["step"]): row for row in table(directory)}
  assert sorted(rows) == [(rank, step) for rank in range(4) for step in range(steps)]
  waits = {}
  for row in table(directory, "collectives"):
    waits.setdefault((row["rank"], row["step"]), []).append(row)
  for (rank, step), row in rows.items():
    assert row["start_ns"] <= row["last_exit_ns"] <= row["end_ns"]
    if step:
      assert row["gap_ns"] + sum(parts(row)) == row["end_ns"] - rows[rank, step - 1]["end_ns"]
    own = waits[rank, step]
    assert all(row["start_ns"] <= each["enter_ns"] <= each["exit_ns"] <= row["last_exit_ns"]
               for each in own)
    assert row["last_exit_ns"] == max(each["exit_ns"] for each in own)
    assert 0 < row["sync_ns"] <= sum(each["exit_ns"] - each["enter_ns"] for each in own)
  assert process_file(directory)["lost_rows"] == 0
  return waits


def test_layers_under_remat_with_sharded_parameters(tmp_path, mesh, weights):
  step, weights = jaxpace.observe(steps_of(mesh)), weights + 0
  with jaxpace.Recorder(tmp_path, step) as recorder:
    for _ in range(8):
      weights, value = step(weights, batch_of(mesh, 8))
      recorder.record()
      jax.block_until_ready(value)
  waits = check(tmp_path, 8)
  program, = step.plan.programs
  gathers = [each for each in program.collectives if each.kind == "all-gather" and each.loops]
  assert gathers and all(each.iterations == LAYERS for each in gathers)
  entries = json.loads((tmp_path / "run.json").read_text())["plan"]["collectives"]
  assert len(entries) == sum(each.iterations for each in program.collectives)
  assert all(sorted(row["collective"] for row in own) == list(range(len(entries)))
             for own in waits.values())
  for entry in entries:
    assert sorted(rank for group in entry["groups"] for rank in group) == [0, 1, 2, 3]
  # A collective waits for all of its group: nobody leaves before the last has entered.
  by_step = {}
  for (rank, step_number), own in waits.items():
    for row in own:
      by_step.setdefault((step_number, row["collective"]), {})[rank] = row
  for (_, slot), ranks in by_step.items():
    for group in entries[slot]["groups"]:
      if entries[slot]["kind"] in ("all-reduce", "reduce-scatter"):
        assert (max(ranks[rank]["enter_ns"] for rank in group)
                <= min(ranks[rank]["exit_ns"] for rank in group))
  run = read_run(tmp_path)
  assert (run.ranks_in_all >= 4, len(run.steps), run.path) == (True, 8, tmp_path)


def test_each_call_of_a_function_that_accumulates_is_a_step(tmp_path, mesh, weights):
  gradient = jaxpace.observe(jax.jit(jax.grad(loss)))
  with jaxpace.Recorder(tmp_path, gradient) as recorder:
    for _ in range(4):
      for _ in range(3):
        jax.block_until_ready(gradient(weights, batch_of(mesh, 8)))
      recorder.record()
  check(tmp_path, 12)
