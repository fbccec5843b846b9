"""Every step is recorded, whatever of JAX's settings picks the program that it runs."""

import contextlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxpace
from jaxpace.diagnose.diagnose import diagnose
from jaxpace.observation.clocks import host_ring
from jaxpace.runs.reader import read_run
from tests.observation import observed_steps as steps
from tests.quick import long
from tests.record.recording import table

STEPS = 12
auto = jax.make_mesh((4,), ("data",), axis_types=(AxisType.Auto,), devices=jax.devices()[:4])
explicit = jax.make_mesh((4,), ("data",), axis_types=(AxisType.Explicit,),
                         devices=jax.devices()[:4])
PICKED = {
    "a mesh": [contextlib.nullcontext, lambda: jax.set_mesh(auto)],
    "precision": [contextlib.nullcontext, lambda: jax.default_matmul_precision("highest")],
    "precisions": [lambda: jax.default_matmul_precision("float32"),
                   lambda: jax.default_matmul_precision("bfloat16"), contextlib.nullcontext],
    "debugging": [contextlib.nullcontext, lambda: jax.numpy_rank_promotion("raise")],
}


def sgd(w, x):
  return w - jnp.float32(0.1) * jax.grad(lambda w: ((x @ w) ** 2).mean())(w)


def arrays(mesh):
  x = np.random.default_rng(0).normal(size=(8, 4)).astype(np.float32)
  return (jax.device_put(np.ones((4, 2), np.float32), NamedSharding(mesh, P())),
          jax.device_put(x, NamedSharding(mesh, P("data"))))


def recorded_steps(directory, observed, calls):
  """Runs and records the calls; checks that all are recorded and returns the executions of each
  program."""
  with jaxpace.recorded(directory, observed) as recorded_step:
    for setting, args in calls:
      with setting():
        jax.block_until_ready(recorded_step(*args))
  assert recorded_step.recorder.lost["lost_rows"] == 0
  assert sorted((row["rank"], row["step"]) for row in table(directory)) == [
      (rank, step) for rank in range(4) for step in range(len(calls))]
  return [host_ring.executions(0, one.number) for one in observed.plan.programs]


@pytest.mark.parametrize("picked", PICKED)
def test_a_setting_that_picks_the_program(tmp_path, picked):
  observed, args = jaxpace.observe(jax.jit(sgd)), arrays(auto)
  settings = PICKED[picked]
  executions = recorded_steps(tmp_path, observed, [
      (settings[k % len(settings)], args) for k in range(STEPS)])
  assert executions == [STEPS // len(settings)] * len(settings)


def test_an_automatic_and_an_explicit_mesh_in_turn(tmp_path):
  observed = jaxpace.observe(jax.jit(sgd))
  kinds = [(contextlib.nullcontext, arrays(auto)),
           (lambda: jax.set_mesh(explicit), arrays(explicit))]
  # One of them is rare, as in a warm-up.
  executions = recorded_steps(tmp_path, observed, [kinds[k % 5 == 3] for k in range(STEPS)])
  assert sorted(executions) == [2, 10]


@pytest.mark.parametrize("every", [*long(4), 2])
def test_steps_without_timestamps_are_counted_and_not_judged_as_if_they_were_there(
    tmp_path, every):
  step, (params, x, y) = steps.data_parallel()

  def scaled(params, x, y, scale):
    return step(params, x, y)[1] * scale

  observed = jaxpace.observe(jax.jit(scaled, static_argnums=3))
  one = jax.device_put((params, np.asarray(x), np.asarray(y)), jax.devices()[0])
  bare = [k for k in range(40) if k % every == every - 1]
  with jaxpace.recorded(tmp_path, observed) as recorded_step:
    for k in range(40):
      # On one device there is nobody to wait for.
      args = one if k in bare else (params, x, y)
      jax.block_until_ready(recorded_step(*args, 1.0 + k % 3))
  run = read_run(tmp_path)
  assert list(run.steps) == list(range(40 - len(bare)))
  assert recorded_step.recorder.lost["lost_rows"] == 4 * len(bare)
  diagnosis = diagnose(run)
  refused = "recorded 20 and lost 20 of 40 steps" in diagnosis.verdict
  assert refused == (every == 2) and not (refused and diagnosis.findings)
