"""The ways people write train steps, each as a case: the step, its state, and what can't be
timestamped in it."""

from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from tests.instrumentation import models
from tests.instrumentation.running import P, mesh_of


class Case(NamedTuple):
  step: Any
  state: Any
  check_vma: bool = False
  hidden: int = 0


def _pmean_step(loss_fn):
  def step(params, batch):
    loss, grads = jax.lax.pmean(jax.value_and_grad(loss_fn)(params, batch), "data")
    return models.sgd(params, grads), loss

  return step


def _loss_with(apply):
  return lambda params, batch: jnp.mean(jnp.square(apply(params, batch[0]) - batch[1]))


def by_user():
  return Case(models.plain_step, models.mlp_params())


def by_autodiff():
  return Case(models.vma_step, models.mlp_params(), check_vma=True)


def linen_sync_batch_norm():
  class Cnn(nn.Module):
    @nn.compact
    def __call__(self, x):
      x = nn.Conv(4, (3,))(x[..., None])
      x = nn.relu(nn.BatchNorm(use_running_average=False, axis_name="data")(x))
      return nn.Dense(models.CLASSES)(x.reshape(x.shape[0], -1))

  model = Cnn()
  # On the host: it is made on a mesh of one device, and used on another.
  state = jax.tree.map(np.asarray, jax.jit(jax.shard_map(
      lambda x: model.init(jax.random.key(0), x), mesh=mesh_of(data=1), in_specs=P(), out_specs=P(),
      check_vma=False))(jnp.ones((1, models.FEATURES))))

  def step(state, batch):
    def loss(params):
      out, new = model.apply({"params": params, "batch_stats": state["batch_stats"]}, batch[0],
                             mutable=["batch_stats"])
      return jnp.mean(jnp.square(out - batch[1])), new

    (value, new), grads = jax.value_and_grad(loss, has_aux=True)(state["params"])
    grads = jax.lax.pmean(grads, "data")
    return {"params": models.sgd(state["params"], grads), **new}, jax.lax.pmean(value, "data")

  return Case(step, state)


def nnx_model():
  class Mlp(nnx.Module):
    def __init__(self, rngs):
      self.a = nnx.Linear(models.FEATURES, 16, rngs=rngs)
      self.b = nnx.Linear(16, models.CLASSES, rngs=rngs)

    def __call__(self, x):
      return self.b(nnx.relu(self.a(x)))

  graph, state = nnx.split(Mlp(nnx.Rngs(0)))

  @nnx.jit
  def loss_fn(model, batch):
    return jnp.mean(jnp.square(model(batch[0]) - batch[1]))

  def step(state, batch):
    model = nnx.merge(graph, state)
    loss, grads = jax.lax.pmean(nnx.value_and_grad(loss_fn)(model, batch), "data")
    return models.sgd(state, grads), loss

  return Case(step, state)


def remat_by_autodiff():
  """JAX puts the gradient's sum inside the remat."""
  apply = jax.checkpoint(models.mlp)

  def step(params, batch):
    loss, grads = jax.value_and_grad(lambda p: jax.lax.pmean(_loss_with(apply)(p, batch), "data"))(
        params)
    return models.sgd(params, grads), loss

  return Case(step, models.mlp_params(), check_vma=True, hidden=-1)


def scanned_layers():
  def apply(params, x):
    x, _ = jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, params["layers"])
    return x @ params["out"]

  f = models.FEATURES
  return Case(_pmean_step(_loss_with(apply)),
              {"layers": models.normal(0, 3, f, f), "out": models.normal(1, f, models.CLASSES)})


def collective_in_a_scan():
  def apply(params, x):
    x, _ = jax.lax.scan(lambda x, w: (jnp.tanh(x @ w) + jax.lax.pmean(jnp.mean(x), "data"), None),
                        x, params["layers"])
    return x @ params["out"]

  return scanned_layers()._replace(step=_pmean_step(_loss_with(apply)), hidden=2)


def collective_in_a_cond():
  def step(params, batch):
    params, loss = models.plain_step(params, batch)
    return params, jax.lax.cond(loss > 0, lambda x: jax.lax.pmax(x, "data"), lambda x: x, loss)

  return Case(step, models.mlp_params(), hidden=1)


def custom_gradient():
  """A function whose gradient is summed over the ranks by its own rule."""

  @jax.custom_vjp
  def shared(params):
    return params

  shared.defvjp(lambda params: (params, None), lambda _, grads: (jax.lax.pmean(grads, "data"),))

  def step(params, batch):
    loss, grads = jax.value_and_grad(lambda p: models.square_loss(shared(p), batch))(params)
    return models.sgd(params, grads), jax.lax.pmean(loss, "data")

  return Case(step, models.mlp_params())


def sharpness_aware():
  def step(params, batch):
    grads = jax.lax.pmean(jax.grad(models.square_loss)(params, batch), "data")
    scale = jnp.float32(0.05) / optax.tree.norm(grads)
    climbed = jax.tree.map(lambda p, g: p + scale * g, params, grads)
    loss, grads = jax.lax.pmean(jax.value_and_grad(models.square_loss)(climbed, batch), "data")
    return models.sgd(params, grads), loss

  return Case(step, models.mlp_params())


def dropout_and_odd_leaves():
  """Typed keys, integers, None and empty containers in the state."""

  def step(state, batch):
    key, now = jax.random.split(state["key"])
    now = jax.random.fold_in(now, jax.lax.axis_index("data"))

    def loss(params):
      kept = jax.random.bernoulli(now, 0.8, batch[0].shape)
      return models.square_loss(params, (jnp.where(kept, batch[0], jnp.float32(0)), batch[1]))

    grads = jax.lax.psum(jax.grad(loss)(state["params"]), "data")
    new = dict(state, key=key, params=models.sgd(state["params"], grads, 0.01),
               count=state["count"] + 1)
    return new, {"norm": optax.tree.norm(grads), "nothing": None}

  # jaxlib 0.11.2 crashes where it partitions an array of nothing, bare.
  void = {} if jax.__version__ == "0.11.2" else {"void": jnp.zeros((0, 3))}
  return Case(step, {"params": models.mlp_params(), "key": jax.random.key(3), "count": jnp.int32(0),
                     "none": None, "empty": {}, "flag": jnp.bool_(True), **void})


def matrices_clipped_and_cast():
  """No flat gradient: the entry waits for an element of matrices that are fused from others."""
  def step(params, batch):
    loss = jax.checkpoint(
        lambda params: jnp.mean(jnp.square(jnp.tanh(batch[0] @ params[0]) @ params[1] - batch[1])))
    value, grads = jax.value_and_grad(loss)(params)
    scale = jnp.minimum(jnp.float32(1), jnp.float32(0.1) / optax.tree.norm(grads))
    grads = jax.tree.map(lambda g, p: (g * scale + jnp.float32(0.01) * p).astype(jnp.bfloat16),
                         grads, params)
    value, grads = jax.lax.pmean((value, grads), "data")
    return models.sgd(params, grads), value

  return Case(step, [models.normal(0, models.FEATURES, 32), models.normal(1, 32, models.CLASSES)])


def reduce_scatter_all_gather():
  def step(params, batch):
    grads = jax.grad(lambda w: jnp.mean(jnp.square(batch[0] @ w - batch[1])))(params)
    part = jax.lax.psum_scatter(grads.reshape(2, -1), "data", tiled=True)
    mine = jax.lax.dynamic_slice_in_dim(params.reshape(2, -1), jax.lax.axis_index("data"), 1)
    new = jax.lax.all_gather(mine - jnp.float32(0.05) * part, "data", tiled=True)
    return new.reshape(params.shape), jnp.sum(new)

  return Case(step, models.normal(0, models.FEATURES, models.CLASSES))


def max_and_permute():
  def step(params, batch):
    def loss(params):
      out = models.mlp(params, batch[0])
      top = jax.lax.pmax(jax.lax.stop_gradient(jnp.max(out)), "data")
      next_door = jax.lax.ppermute(out, "data", [(0, 1), (1, 0)])
      return jnp.mean(jnp.square((out - next_door) / (1.0 + jnp.abs(top)) - batch[1]))

    loss, grads = jax.lax.pmean(jax.value_and_grad(loss)(params), "data")
    return models.sgd(params, grads), loss

  return Case(step, models.mlp_params())


CASES = [by_user, by_autodiff, linen_sync_batch_norm, nnx_model, remat_by_autodiff, scanned_layers,
         collective_in_a_scan, collective_in_a_cond, custom_gradient, sharpness_aware,
         dropout_and_odd_leaves, matrices_clipped_and_cast, reduce_scatter_all_gather,
         max_and_permute]
