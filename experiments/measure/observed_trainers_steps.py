"""Train steps as their authors write them, shrunk, on synthetic data: after flax's example mnist
(nnx), the shape of MaxText's step, jax's training cookbook (docs.jax.dev) and its example
spmd_mnist; no text of theirs."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

VOCAB, LENGTH, BATCH, WIDTH = 64, 8, 16, 16
ROWS, CLASSES = 32, 8


class Trainer(NamedTuple):
  """A step that is jitted anew, and a state that is made anew, each time."""

  jitted: Callable[[], Any]
  start: Callable[[], Any]
  batch: Callable[[int], Any]
  call: Callable[[Any, Any, Any], tuple[Any, Any]]
  """(step, state, batch) -> (state, what is logged)."""


def mesh_of(kind: AxisType = AxisType.Auto, **axes: int) -> Mesh:
  count = int(np.prod(list(axes.values())))
  return jax.make_mesh(tuple(axes.values()), tuple(axes), axis_types=(kind,) * len(axes),
                       devices=jax.devices()[:count])


def rows(step: int, *shape: int) -> dict[str, np.ndarray]:
  rng = np.random.default_rng(step)
  x = rng.normal(size=(ROWS, *shape)).astype(np.float32)
  return {"x": x, "y": (np.abs(x.reshape(ROWS, -1)).sum(1) * 7).astype(np.int32) % CLASSES}


def cross_entropy(logits: jax.Array, labels: jax.Array) -> jax.Array:
  return optax.softmax_cross_entropy_with_integer_labels(
      logits.astype(jnp.float32), labels).mean()


def _tokens(mesh: Mesh, spec: P, step: int) -> dict[str, jax.Array]:
  """Text of a chain that a model can learn, the last tokens padding."""
  rng = np.random.default_rng(step)
  text = (rng.integers(1, VOCAB, (BATCH, 1)) + np.arange(LENGTH + 1) * 3) % (VOCAB - 1) + 1
  text[:, -2:] = 0
  sharding = NamedSharding(mesh, spec)
  return {"inputs": jax.device_put(text[:, :-1].astype(np.int32), sharding),
          "targets": jax.device_put(text[:, 1:].astype(np.int32), sharding)}


def _weighted(logits: jax.Array, targets: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
  weights = jnp.where(targets > 0, 1.0, 0.0)
  losses = optax.softmax_cross_entropy_with_integer_labels(logits, targets) * weights
  return losses.sum(), weights.sum(), ((logits.argmax(-1) == targets) * weights).sum()


def _warmup(rate: float, steps: int) -> optax.Schedule:
  return optax.join_schedules(
      [optax.linear_schedule(0.0, rate, steps),
       lambda count: rate * ((count + steps) / steps) ** -0.5], [steps])


class _Digits(nnx.Module):

  def __init__(self, rngs: nnx.Rngs):
    self.conv = nnx.Conv(1, 8, (3, 3), rngs=rngs)
    self.norm, self.dropout = nnx.BatchNorm(8, rngs=rngs), nnx.Dropout(0.1, rngs=rngs)
    self.last = nnx.Linear(8 * 16, 10, rngs=rngs)

  def __call__(self, x: jax.Array) -> jax.Array:
    x = nnx.avg_pool(nnx.relu(self.norm(self.conv(x))), (2, 2), (2, 2))
    return self.last(self.dropout(x.reshape(x.shape[0], -1)))


def mnist() -> Trainer:
  """`nnx.jit`: model, optimizer and metrics changed in place, batch norm over the whole batch,
  dropout."""
  mesh = mesh_of(data=4)

  def train_step(model: Any, optimizer: Any, metrics: Any, batch: Any) -> None:
    def loss_fn(model: Any) -> Any:
      logits = model(batch["image"])
      return optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"]).mean(), logits
    (loss, logits), grads = nnx.value_and_grad(loss_fn, has_aux=True)(model)
    metrics.update(loss=loss, logits=logits, labels=batch["label"])
    optimizer.update(model, grads)

  def start() -> Any:
    model = _Digits(nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.adamw(5e-3, 0.9), wrt=nnx.Param)
    metrics = nnx.MultiMetric(accuracy=nnx.metrics.Accuracy(), loss=nnx.metrics.Average("loss"))
    for one in (model, optimizer, metrics):
      nnx.update(one, jax.tree.map(lambda leaf: jax.device_put(leaf, NamedSharding(mesh, P())),
                                   nnx.state(one)))
    return model, optimizer, metrics

  def batch(step: int) -> Any:
    rng = np.random.default_rng(step)
    label = rng.integers(0, 10, 32).astype(np.int32)
    image = rng.normal(size=(32, 8, 8, 1)).astype(np.float32) + label[:, None, None, None] / 5
    return jax.device_put({"image": image, "label": label}, NamedSharding(mesh, P("data")))

  def call(step: Any, state: Any, batch: Any) -> Any:
    step(*state, batch)
    return state, state[2].compute()
  return Trainer(lambda: nnx.jit(train_step), start, batch, call)


def maxtext() -> Trainer:
  """Layers scanned and rematerialised, parameters over fsdp and tensor axes, micro-batches,
  dropout, bf16, AdamW."""
  mesh, layers, micro = mesh_of(data=2, fsdp=2, tensor=2), 3, 2
  specs = {"embed": P("tensor", "fsdp"), "qkv": P(None, "fsdp", "tensor"),
           "out": P(None, "tensor", "fsdp"), "up": P(None, "fsdp", "tensor"),
           "down": P(None, "tensor", "fsdp"), "norm": P()}
  layout = {name: NamedSharding(mesh, spec) for name, spec in specs.items()}
  tx = optax.chain(optax.clip_by_global_norm(1.0),
                   optax.adamw(_warmup(1e-2, 5), b2=0.95, weight_decay=0.1))
  rows = P(("data", "fsdp"))

  def keep(x: jax.Array, *spec: Any) -> jax.Array:
    return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, P(*rows, *spec)))

  def layer(x: jax.Array, weights: Any) -> tuple[jax.Array, None]:
    normed = x * jax.lax.rsqrt(jnp.square(x).mean(-1, keepdims=True) + 1e-6) * weights["norm"]
    q, k, v = jnp.split(keep(normed @ weights["qkv"], None, "tensor"), 3, -1)
    q, k, v = (part.reshape(*part.shape[:2], 4, -1) for part in (q, k, v))
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) / q.shape[-1] ** 0.5
    scores = jnp.where(jnp.tril(jnp.ones(scores.shape[-2:], bool)), scores, -1e9)
    mixed = jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores), v).reshape(x.shape)
    x = x + keep(mixed @ weights["out"], None, None)
    wide = keep(jax.nn.silu(x @ weights["up"]), None, "tensor")
    kept = jax.random.bernoulli(weights["key"], 0.9, wide.shape)
    return keep(x + jnp.where(kept, wide / 0.9, 0) @ weights["down"], None, None), None

  def loss_fn(params: Any, batch: Any, key: jax.Array) -> jax.Array:
    low = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), params)
    stacked = {name: low[name] for name in ("qkv", "out", "up", "down", "norm")}
    x, _ = jax.lax.scan(jax.checkpoint(layer, policy=jax.checkpoint_policies.nothing_saveable),
                        keep(low["embed"][batch["inputs"]], None, None),
                        {**stacked, "key": jax.random.split(key, layers)})
    loss, weight, _ = _weighted((x @ low["embed"].T).astype(jnp.float32), batch["targets"])
    return loss / weight

  def train_step(state: Any, batch: Any) -> Any:
    params, opt_state, key = state
    key, *keys = jax.random.split(key, micro + 1)
    parts = jax.tree.map(lambda leaf: leaf.reshape(micro, -1, *leaf.shape[1:]), batch)

    def one(total: Any, part: Any) -> Any:
      loss, grads = jax.value_and_grad(loss_fn)(params, *part)
      return jax.tree.map(jnp.add, total, (loss, grads)), None

    zeros = jnp.zeros(()), jax.tree.map(jnp.zeros_like, params)
    (loss, grads), _ = jax.lax.scan(one, zeros, (parts, jnp.stack(keys)))
    grads = jax.tree.map(lambda leaf: leaf / micro, grads)
    updates, opt_state = tx.update(grads, opt_state, params)
    return (optax.apply_updates(params, updates), opt_state, key), {
        "loss": loss / micro, "norm": optax.tree.norm(grads)}

  def start() -> Any:
    keys = jax.random.split(jax.random.key(0), 5)
    shapes = {"embed": (VOCAB, WIDTH), "qkv": (layers, WIDTH, 3 * WIDTH),
              "out": (layers, WIDTH, WIDTH), "up": (layers, WIDTH, 4 * WIDTH),
              "down": (layers, 4 * WIDTH, WIDTH)}
    params = {name: jax.random.normal(key, shape) * 0.1
              for key, (name, shape) in zip(keys, shapes.items(), strict=True)}
    params = jax.device_put({**params, "norm": jnp.ones((layers, WIDTH))}, layout)
    return (params, jax.jit(tx.init)(params),
            jax.device_put(jax.random.key(1), NamedSharding(mesh, P())))

  return Trainer(lambda: jax.jit(train_step, donate_argnums=0), start,
                 functools.partial(_tokens, mesh, rows),
                 lambda step, state, batch: step(state, batch))


def spmd_mnist() -> Trainer:
  """Two layers over a mesh of data and model, log-softmax, plain SGD."""
  mesh, sizes = mesh_of(data=2, model=2), (64, 64, 64, CLASSES)

  def loss(params: Any, batch: Any) -> jax.Array:
    x = batch["x"]
    for w, b in params[:-1]:
      x = jnp.tanh(jnp.dot(x, w) + b)
    w, b = params[-1]
    logits = jnp.dot(x, w) + b
    logits = logits - jax.scipy.special.logsumexp(logits, axis=1, keepdims=True)
    return -jnp.mean(jnp.sum(logits * jax.nn.one_hot(batch["y"], CLASSES), axis=1))

  def train_step(params: Any, batch: Any) -> Any:
    value, grads = jax.value_and_grad(loss)(params, batch)
    return [(w - 0.1 * dw, b - 0.1 * db)
            for (w, b), (dw, db) in zip(params, grads, strict=True)], value

  def start() -> Any:
    rng = np.random.default_rng(0)
    return [(jax.device_put(0.1 * rng.normal(size=(m, n)).astype(np.float32),
                            NamedSharding(mesh, P(None, "model") if n == 64 else P())),
             jax.device_put(0.1 * rng.normal(size=n).astype(np.float32),
                            NamedSharding(mesh, P("model") if n == 64 else P())))
            for m, n in zip(sizes[:-1], sizes[1:], strict=True)]
  return Trainer(lambda: jax.jit(train_step), start,
                 lambda step: jax.device_put(rows(step, 64), NamedSharding(mesh, P("data"))),
                 lambda step, state, batch: step(state, batch))


def cookbook(dtype: str, width: int = 64, layers: int = 2) -> Trainer:
  """Explicit mesh, FSDP, parameters and Adam's moments as Refs that the step changes in place."""
  mesh, heads, vocab, length = mesh_of(AxisType.Explicit, fsdp=4), 4, 256, 32
  shapes = {"embed": ((vocab, width), P(None, None)), "out": ((width, vocab), P("fsdp", None))}
  for layer in range(layers):
    shapes |= {f"qkv{layer}": ((3, width, heads, width // heads), P(None, "fsdp", None, None)),
               f"mix{layer}": ((heads, width // heads, width), P("fsdp", None, None)),
               f"up{layer}": ((width, 4 * width), P("fsdp", None)),
               f"down{layer}": ((4 * width, width), P(None, "fsdp"))}
  act = P("fsdp", None, None)

  def apply(params: Any, tokens: jax.Array) -> jax.Array:
    x = params["embed"].at[tokens].get(out_sharding=act)
    for layer in range(layers):
      skip = x
      qkv = jnp.einsum("bsd,3dkh->bs3kh", x, params[f"qkv{layer}"],
                       out_sharding=P("fsdp", None, None, None))
      x = jax.nn.dot_product_attention(qkv[:, :, 0], qkv[:, :, 1], qkv[:, :, 2], is_causal=True)
      x = jnp.einsum("bskh,khd->bsd", x, params[f"mix{layer}"], out_sharding=act) + skip
      x *= jax.lax.rsqrt(jnp.mean(x**2, axis=-1, keepdims=True) + 1e-6)
      skip = x
      x = jax.nn.gelu(jnp.einsum("bsd,dh->bsh", x, params[f"up{layer}"], out_sharding=act))
      x = jnp.einsum("bsh,hd->bsd", x, params[f"down{layer}"], out_sharding=act) + skip
      x *= jax.lax.rsqrt(jnp.mean(x**2, axis=-1, keepdims=True) + 1e-6)
    return jnp.einsum("bsd,dl->bsl", x, params["out"], out_sharding=act)

  def adam(param: Any, grad: jax.Array, moments: Any) -> None:
    moments["mu"][...] = 0.9 * moments["mu"][...] + 0.1 * grad
    moments["nu"][...] = 0.999 * moments["nu"][...] + 0.001 * grad**2
    moments["count"][...] += 1
    mean = moments["mu"][...] / (1 - 0.9 ** moments["count"][...])
    size = moments["nu"][...] / (1 - 0.999 ** moments["count"][...])
    param[...] -= 1e-4 * mean / (jnp.sqrt(size) + 1e-8)

  def train_step(state: Any, batch: Any) -> jax.Array:
    def loss(params: Any) -> jax.Array:
      labels = jax.nn.one_hot(batch["y"], vocab)
      return -(labels * jax.nn.log_softmax(apply(params, batch["x"]))).sum(axis=-1).mean()
    params = jax.tree.map(jax.ref.get, state["params"])
    value, grads = jax.value_and_grad(loss)(params)
    jax.tree.map(adam, state["params"], grads, state["moments"])
    return value

  def start() -> Any:
    rng = np.random.default_rng(0)
    params = {name: jax.device_put(
        jnp.asarray(rng.normal(size=shape) / np.sqrt(width), dtype), NamedSharding(mesh, spec))
        for name, (shape, spec) in shapes.items()}
    with jax.set_mesh(mesh):
      moments = jax.tree.map(lambda param: {"mu": jnp.zeros_like(param),
                                            "nu": jnp.zeros_like(param), "count": jnp.array(0)},
                             params)
      return jax.tree.map(jax.new_ref, {"params": params, "moments": moments})

  def batch(step: int) -> Any:
    text = np.random.default_rng(step).integers(0, vocab, (16, length)).astype(np.uint8)
    return jax.device_put({"x": text, "y": np.roll(text, -1)},
                          NamedSharding(mesh, P("fsdp", None)))

  def call(step: Any, state: Any, batch: Any) -> Any:
    with jax.set_mesh(mesh):
      return state, step(state, batch)
  return Trainer(lambda: jax.jit(train_step), start, batch, call)


TRAINERS: dict[str, Callable[[], Trainer]] = {
    "mnist": mnist, "maxtext": maxtext, "spmd_mnist": spmd_mnist,
    "cookbook float32": lambda: cookbook("float32"),
    "cookbook bf16": lambda: cookbook("bfloat16")}
