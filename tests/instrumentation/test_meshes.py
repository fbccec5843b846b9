"""Other meshes than one data axis, and more collectives than slots."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.instrumentation import models
from tests.instrumentation.running import P, extra_operands, mesh_of, pair, restless
from tests.quick import long

pytestmark = pytest.mark.optimized


@pytest.mark.parametrize("check_vma", [True, *long(False)])
def test_data_and_model_axes(check_vma):
  """Tensor parallel: a weight split over the model axis, gradients summed over the data axis."""

  def step(params, batch):
    def loss(params):
      h = jnp.tanh(batch[0] @ params["up"])  # [batch, own part of width]
      out = jax.lax.psum(h @ params["down"], "model")
      value = jnp.mean(jnp.square(out - batch[1]))
      return jax.lax.pmean(value, "data") if check_vma else value

    value, grads = jax.value_and_grad(loss)(params)
    if not check_vma:
      value, grads = jax.lax.pmean((value, grads), "data")
    return models.sgd(params, grads), value

  params = {"up": models.normal(0, models.FEATURES, 8), "down": models.normal(1, 8, models.CLASSES)}
  split = {"up": P(None, "model"), "down": P("model", None)}
  data = models.batches(2)
  both = pair(step, mesh_of(data=2, model=2), params, data[0], check_vma=check_vma,
              state_spec=split, pacer=restless(), share=True)
  both.check_bits(params, data, 6)
  assert both.paced.plan.ranks == 2
  assert np.asarray(both.pace.rank).tolist() == [0, 1, 2, 3]
  assert np.asarray(both.pace.step).tolist() == [6] * 4
  assert extra_operands(both.bare_hlo, both.hlo) == ["f32[6]"] * both.paced.plan.share


def test_two_axes_that_together_are_the_data_axis():
  def step(params, batch):
    loss, grads = jax.lax.pmean(jax.value_and_grad(models.square_loss)(params, batch),
                                ("host", "device"))
    return models.sgd(params, grads), loss

  params, data = models.mlp_params(), models.batches(4)
  both = pair(step, mesh_of(host=2, device=2), params, data[0], axis=("host", "device"),
              batch_spec=P(("host", "device")), share=True)
  both.check_bits(params, data, 6)
  assert both.paced.plan.ranks == 4 and both.paced.plan.share
  assert extra_operands(both.bare_hlo, both.hlo) == ["f32[8]"]
  shared = np.asarray(both.pace.arrivals)
  assert np.isfinite(shared).all() and (shared == shared[0]).all()


def test_more_collectives_than_slots():
  def step(params, batch):
    def loss(params):
      h = batch[0]
      for _ in range(3):
        h = jnp.tanh(models.mlp(params, h) @ jnp.ones((models.CLASSES, models.FEATURES)))
        h = h - jax.lax.pmean(jnp.mean(h, axis=0), "data")
      return jnp.mean(jnp.square(h))

    value, grads = jax.lax.pmean(jax.value_and_grad(loss)(params), "data")
    return models.sgd(params, grads), value

  params, data = models.mlp_params(), models.batches(2)
  both = pair(step, mesh_of(data=2), params, data[0], slots=1, pacer=restless())
  both.check_bits(params, data, 6)
  plan = both.paced.plan
  assert len(plan.collectives) == 1 and plan.overflow >= 3
  assert plan.collectives[0].operands == 1 + len(jax.tree.leaves(params)), "the largest is kept"
  assert len(plan.unstamped) >= plan.overflow
  assert all("slots" in u.reason for u in plan.unstamped)
