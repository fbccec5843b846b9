"""Jitted steps of many kinds, small, for tests of `observe`: functions with their arguments."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

LAYERS, WIDTH, BATCH = 3, 16, 16


def mesh_of(**axes):
  return jax.make_mesh(tuple(axes.values()), tuple(axes), axis_types=(AxisType.Auto,) * len(axes))


def put(mesh, tree, specs):
  return jax.tree.map(lambda leaf, spec: jax.device_put(leaf, NamedSharding(mesh, spec)), tree,
                      specs)


def params():
  keys = jax.random.split(jax.random.key(0), 3)
  return {"w": jax.random.normal(keys[0], (LAYERS, WIDTH, WIDTH)) / 4,
          "b": jnp.zeros((LAYERS, WIDTH)), "v": jax.random.normal(keys[1], (WIDTH, 4)) / 4}


def batch(rows=BATCH):
  rng = np.random.default_rng(rows)
  return (rng.normal(size=(rows, WIDTH)).astype(np.float32),
          rng.integers(0, 4, size=(rows,)).astype(np.int32))


def loss(params, x, y, *, remat=False):
  def layer(h, wb):
    return jnp.tanh(h @ wb[0] + wb[1]) + h, None
  body = jax.checkpoint(layer) if remat else layer
  h, _ = jax.lax.scan(body, x, (params["w"], params["b"]))
  return optax.softmax_cross_entropy_with_integer_labels(h @ params["v"], y).mean()


def sgd(params, x, y, *, remat=False):
  value, grads = jax.value_and_grad(functools.partial(loss, remat=remat))(params, x, y)
  return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value


def data_parallel(remat=False):
  """A step with parameters on all devices, and its arguments."""
  mesh = mesh_of(data=4)
  specs = {"w": P(), "b": P(), "v": P()}
  x, y = batch()
  args = put(mesh, params(), specs), *put(mesh, (x, y), (P("data"), P("data")))
  return functools.partial(sgd, remat=remat), args


def fsdp(remat=False):
  """A step with parameters sharded over the data axis."""
  mesh = mesh_of(data=4)
  specs = {"w": P(None, "data"), "b": P(), "v": P("data")}
  out = jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs)
  x, y = batch()
  args = put(mesh, params(), specs), *put(mesh, (x, y), (P("data"), P("data")))

  def step(params, x, y):
    new, value = sgd(params, x, y, remat=remat)
    return jax.lax.with_sharding_constraint(new, out), value
  return step, args


def everything():
  """Data, FSDP and tensor axes, remat, dropout, micro-batches, clipping, AdamW."""
  mesh = mesh_of(data=2, fsdp=2, tensor=2)
  specs = {"up": P(None, "fsdp", "tensor"), "down": P(None, "tensor", "fsdp"), "v": P("fsdp")}
  keys = jax.random.split(jax.random.key(1), 4)
  start = {"up": jax.random.normal(keys[0], (LAYERS, WIDTH, 32)) / 4,
           "down": jax.random.normal(keys[1], (LAYERS, 32, WIDTH)) / 6,
           "v": jax.random.normal(keys[2], (WIDTH, 4)) / 4}
  tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-2))

  def model(params, x, y, key):
    @jax.checkpoint
    def layer(h, inputs):
      up, down, key = inputs
      wide = jax.lax.with_sharding_constraint(
          jax.nn.gelu(h @ up), NamedSharding(mesh, P(("data", "fsdp"), "tensor")))
      kept = jax.random.bernoulli(key, 0.9, wide.shape)
      return h + jnp.where(kept, wide / 0.9, 0.0) @ down, None
    h, _ = jax.lax.scan(layer, x, (params["up"], params["down"], jax.random.split(key, LAYERS)))
    return optax.softmax_cross_entropy_with_integer_labels(h @ params["v"], y).mean()

  def step(state, xs, ys):
    params, opt, key = state
    key, sub = jax.random.split(key)

    def micro(total, one):
      grads = jax.grad(model)(params, *one, sub)
      return jax.tree.map(jnp.add, total, grads), None
    grads, _ = jax.lax.scan(micro, jax.tree.map(jnp.zeros_like, params), (xs, ys))
    updates, opt = tx.update(grads, opt, params)
    return (optax.apply_updates(params, updates), opt, key), optax.tree.norm(grads)

  placed = put(mesh, start, specs)
  x, y = batch(2 * BATCH)
  xs, ys = put(mesh, (x.reshape(2, BATCH, WIDTH), y.reshape(2, BATCH)),
               (P(None, ("data", "fsdp")), P(None, ("data", "fsdp"))))
  key = jax.device_put(jax.random.key(2), NamedSharding(mesh, P()))
  return step, ((placed, jax.jit(tx.init)(placed), key), xs, ys)


def bits(tree):
  """All arrays of a tree as bytes, keys too."""
  def one(leaf):
    if isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
      leaf = jax.random.key_data(leaf)
    return np.asarray(leaf).tobytes()
  return [one(leaf) for leaf in jax.tree.leaves(tree)]
