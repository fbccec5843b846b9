"""The loop of a user around an instrumented step."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxpace
from tests.instrumentation import models
from tests.instrumentation.running import P, bits, mesh_of, restless

pytestmark = pytest.mark.optimized


def test_one_trace_donation_and_a_checkpoint():
  """The loop of a user: state donated, saved and restored half way, compiled once."""
  traces = []

  def step(params, batch):
    traces.append(1)
    return models.plain_step(params, batch)

  ranks, data = 2, models.batches(2)
  paced = jaxpace.instrument(step, "data", restless())
  mesh = mesh_of(data=ranks)
  state, pace, spec = models.mlp_params(), paced.init(mesh), jaxpace.spec(mesh)
  run = jax.jit(jax.shard_map(paced, mesh=mesh, in_specs=(spec, P(), P("data")),
                              out_specs=(spec, P()), check_vma=False), donate_argnums=(0, 1))
  bare = jax.jit(jax.shard_map(models.plain_step, mesh=mesh, in_specs=(P(), P("data")),
                               out_specs=P(), check_vma=False))
  expected = state
  for k in range(20):
    expected, _ = bare(expected, data[k % 3])
    pace, (state, _) = run(pace, jax.tree.map(jnp.copy, state) if k == 0 else state, data[k % 3])
    if k == 10:
      shardings = jax.tree.map(lambda leaf: leaf.sharding, pace)
      pace = jax.tree.map(jax.device_put, jax.tree.map(np.asarray, pace), shardings)
  assert bits(state) == bits(expected)
  assert np.asarray(pace.step).tolist() == [20] * ranks
  assert np.asarray(pace.rank).tolist() == list(range(ranks))
  assert len(traces) <= 2, "retraced"
