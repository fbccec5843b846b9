"""The guard in the live step: two devices, shared step times. No timing is asserted."""

import jax
import numpy as np
import pytest

import jaxpace
from tests.instrumentation import models
from tests.instrumentation.running import column, mesh_of, pair

pytestmark = pytest.mark.optimized

RANKS, BLOCK = 2, 4


def test_parameters_are_bitwise_those_of_the_bare_step_and_the_columns_are_in_the_ring():
  eager = jaxpace.pace_early_ranks(window=8, threshold=0.0, noise=0.0, quantile=0.5, cost=1.0,
                                   max_delay=2e-3)
  guarded = jaxpace.guard(jaxpace.chain(eager), block=BLOCK)
  data, state = models.batches(RANKS), models.mlp_params()

  def step(params, batch):
    loss, grads = jax.value_and_grad(
        lambda p: jax.lax.pmean(models.square_loss(p, batch), "data"))(params)
    return models.sgd(params, grads), loss

  both = pair(step, mesh_of(data=RANKS), state, data[0], check_vma=True, pacer=guarded,
              share=True)
  both.check_bits(state, data, 60)
  pace = jax.tree.map(np.asarray, both.pace)
  names = both.paced.plan.decisions
  assert ({"guard_on", "guard_pair", "effect", "effect_low", "effect_high", "pairs", "slack",
           "tokens"} <= set(names))

  def decision(name):
    return column(both.pace, both.paced.plan, name)

  on = decision("guard_on")
  np.testing.assert_array_equal(on[0], on[1])
  assert set(np.unique(on[:, BLOCK + 4:])) == {0.0, 1.0}
  assert (column(both.pace, both.paced.plan,
                 "delay")[on == 0] == 0).all(), "a row's arm is that of the step in it"
  # All ranks judged the job's time alike, to the last bit.
  guard = both.paced.pacer_state(pace)
  for leaf in jax.tree.leaves(guard.trial):
    assert leaf[0].tobytes() == leaf[1].tobytes()
  assert guard.shared.all() and guard.trial.usual[0] > 0
  assert guard.trial.pair[0] >= 4
