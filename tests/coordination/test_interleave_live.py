"""interleave_jobs in a running step: two devices of one process. Nothing of it is timed."""

import operator

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxpace
from tests.instrumentation import models
from tests.instrumentation.running import P, column, mesh_of, pair

pytestmark = pytest.mark.optimized


def step(params, batch):
  """Three all-reduces: two buckets of gradients and the loss."""
  loss, grads = jax.value_and_grad(models.square_loss)(params, batch)
  leaves, tree = jax.tree.flatten(grads)
  leaves = [*jax.lax.pmean(leaves[:2], "data"), *jax.lax.pmean(leaves[2:], "data")]
  return models.sgd(params, jax.tree.unflatten(tree, leaves)), jax.lax.pmean(loss, "data")


def test_parameters_are_bitwise_the_same_and_both_ranks_ask_the_same():
  """The floor is set so low that every step looks contended."""
  pacer = jaxpace.interleave_jobs(2e-3, floor=1e-7, budget=1.0, dead_band=0.0)
  data = models.batches(2)
  both = pair(step, mesh_of(data=2), models.mlp_params(), data[0], pacer=pacer, share=True)
  both.check_bits(models.mlp_params(), data, 60)
  asked = column(both.pace, both.paced.plan, "delay")
  assert (asked > 0).any() and (asked <= np.float32(2e-3)).all()
  np.testing.assert_array_equal(asked[0], asked[1])
  state = both.paced.pacer_state(both.pace)
  assert len(jax.tree.leaves(state)) > 20
  chex.assert_trees_all_equal(*(jax.tree.map(operator.itemgetter(rank), state)
                                for rank in range(2)))


@pytest.mark.long
def test_without_sharing_it_asks_for_nothing():
  paced = jaxpace.instrument(step, "data", jaxpace.interleave_jobs(floor=1e-7, dead_band=0.0),
                             share=False)
  mesh = mesh_of(data=2)
  run = jax.jit(jax.shard_map(paced, mesh=mesh, in_specs=(jaxpace.spec(mesh), P(), P("data")),
                              out_specs=(jaxpace.spec(mesh), P()), check_vma=False))
  pace, state = paced.init(mesh), models.mlp_params()
  for batch in models.batches(2) * 3:
    pace, (state, _) = jax.block_until_ready(run(pace, state, batch))
  assert (column(pace, paced.plan, "delay") == 0).all() and not jnp.any(pace.delay)
