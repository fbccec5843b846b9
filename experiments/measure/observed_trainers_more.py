"""Small train steps of every kind, after what trainers of their kind do; no text of theirs:
optimizers, layouts, precisions, layers, ways to parallelise."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from experiments.measure.observed_trainers_steps import (
  CLASSES,
  ROWS,
  Trainer,
  cross_entropy,
  mesh_of,
  rows,
)

WIDTH, LAYERS, LENGTH = 32, 3, 8
Loss = Callable[[Any, Any, jax.Array], jax.Array]


def weights(seed: int = 0, **shapes: tuple[int, ...]) -> dict[str, jax.Array]:
  rng = np.random.default_rng(seed)
  return {name: jnp.asarray(rng.normal(size=shape) / np.sqrt(shape[-2] if len(shape) > 1 else 1),
                            jnp.float32)
          for name, shape in shapes.items()}


def plain(mesh: Mesh, loss: Loss, params: Any, tx: optax.GradientTransformation, *,
          specs: Mapping[str, P] | None = None, data: P | None = None,
          shape: tuple[int, ...] = (WIDTH,), donate: bool = False) -> Trainer:
  """A step under `jit`: parameters by `specs`, rows of the batch by `data`."""
  laid_out = {name: NamedSharding(mesh, (specs or {}).get(name, P())) for name in params}
  everywhere = NamedSharding(mesh, P())

  def train_step(state: Any, batch: Any) -> Any:
    params, opt_state, key = state
    key, used = jax.random.split(key)
    value, grads = jax.value_and_grad(loss)(params, batch, used)
    updates, opt_state = tx.update(grads, opt_state, params)
    return (optax.apply_updates(params, updates), opt_state, key), value

  def start() -> Any:
    placed = {name: jax.device_put(np.array(value), laid_out[name])
              for name, value in params.items()}
    with jax.set_mesh(mesh):
      return placed, jax.jit(tx.init)(placed), jax.device_put(jax.random.key(0), everywhere)

  def batch(step: int) -> Any:
    return jax.device_put(rows(step, *shape),
                          NamedSharding(mesh, P(*mesh.axis_names[:1]) if data is None else data))

  def call(step: Any, state: Any, batch: Any) -> Any:
    with jax.set_mesh(mesh):
      return step(state, batch)
  return Trainer(lambda: jax.jit(train_step, donate_argnums=(0,) if donate else ()), start, batch,
                 call)


def _mlp(params: Any, x: jax.Array, act: Callable[[jax.Array], jax.Array] = jnp.tanh) -> jax.Array:
  return act(act(x @ params["in"] + params["bias"]) @ params["up"]) @ params["out"]


_MLP = {"in": (WIDTH, WIDTH), "bias": (WIDTH,), "up": (WIDTH, 2 * WIDTH),
        "out": (2 * WIDTH, CLASSES)}
_SPLIT = {"in": P(None, "tensor"), "bias": P("tensor"), "up": P("tensor", None),
          "out": P(None, None)}


def _mlp_loss(params: Any, batch: Any, key: jax.Array) -> jax.Array:
  del key
  return cross_entropy(_mlp(params, batch["x"]), batch["y"])


def data_parallel(tx: optax.GradientTransformation) -> Trainer:
  return plain(mesh_of(data=4), _mlp_loss, weights(**_MLP), tx)


def tensor_dropout() -> Trainer:
  """Tensor parallel, dropout, AdamW with clipping by the global norm."""
  def loss(params: Any, batch: Any, key: jax.Array) -> jax.Array:
    hidden = jax.nn.gelu(batch["x"] @ params["in"] + params["bias"])
    hidden = jnp.where(jax.random.bernoulli(key, 0.9, hidden.shape), hidden / 0.9, 0)
    return cross_entropy(jax.nn.gelu(hidden @ params["up"]) @ params["out"], batch["y"])
  tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-2))
  return plain(mesh_of(data=2, tensor=2), loss, weights(**_MLP), tx, specs=_SPLIT)


def fsdp_scan(dtype: Any, kind: AxisType = AxisType.Auto) -> Trainer:
  """Layers scanned under remat, their weights over the data axis, Adam, the state donated."""
  mesh = mesh_of(kind, fsdp=4)
  explicit = kind == AxisType.Explicit

  def layer(h: jax.Array, w: Any) -> tuple[jax.Array, None]:
    def product(a: jax.Array, b: jax.Array) -> jax.Array:
      return (jnp.einsum("bi,ij->bj", a, b, out_sharding=P("fsdp", None)) if explicit else a @ b)
    wide = jax.nn.silu(product(h, w["up"].astype(h.dtype)))
    h = h + product(wide, w["down"].astype(h.dtype))
    return h * jax.lax.rsqrt(jnp.square(h).mean(-1, keepdims=True) + 1e-6), None

  def loss(params: Any, batch: Any, key: jax.Array) -> jax.Array:
    del key
    h, _ = jax.lax.scan(jax.checkpoint(layer), batch["x"].astype(dtype),
                        {"up": params["up"], "down": params["down"]})
    out = params["out"].astype(dtype)
    logits = jnp.einsum("bi,ij->bj", h, out, out_sharding=P("fsdp", None)) if explicit else h @ out
    return cross_entropy(logits, batch["y"])

  params = weights(up=(LAYERS, WIDTH, 2 * WIDTH), down=(LAYERS, 2 * WIDTH, WIDTH),
                   out=(WIDTH, CLASSES))
  return plain(mesh, loss, params, optax.adam(1e-2), donate=True,
               specs={"up": P(None, "fsdp"), "down": P(None, None, "fsdp"), "out": P("fsdp")})


def pmap() -> Trainer:
  """pmap with a pmean of gradients, momentum, batch statistics."""
  tx, devices = optax.sgd(0.1, momentum=0.9), jax.local_devices()[:4]

  def train_step(state: Any, batch: Any) -> Any:
    params, opt_state, mean = state
    def loss(params: Any) -> Any:
      centred = batch["x"] - jax.lax.pmean(batch["x"].mean(0), "batch")
      return cross_entropy(_mlp(params, centred), batch["y"]), centred.mean(0)
    (value, seen), grads = jax.value_and_grad(loss, has_aux=True)(params)
    grads = jax.lax.pmean(grads, "batch")
    updates, opt_state = tx.update(grads, opt_state, params)
    return (optax.apply_updates(params, updates), opt_state, 0.9 * mean + 0.1 * seen), (
        jax.lax.pmean(value, "batch"))

  def start() -> Any:
    params = weights(**_MLP)
    one = (params, tx.init(params), jnp.zeros(WIDTH))
    return jax.tree.map(lambda leaf: jnp.stack([leaf] * len(devices)), one)

  return Trainer(lambda: jax.pmap(train_step, axis_name="batch", devices=devices), start,
                 lambda step: jax.tree.map(lambda leaf: leaf.reshape(4, -1, *leaf.shape[1:]),
                                           rows(step, WIDTH)),
                 lambda step, state, batch: step(state, batch))


def manual(update: Callable[[Any, Any], Any], specs: Any, params: Any) -> Trainer:
  """A step under `shard_map` over an axis "data" of four."""
  mesh = mesh_of(data=4)

  def train_step(params: Any, batch: Any) -> Any:
    return jax.shard_map(update, mesh=mesh, in_specs=(specs, P("data")),
                         out_specs=(specs, P()), check_vma=False)(params, batch)
  return Trainer(
      lambda: jax.jit(train_step),
      lambda: {name: jax.device_put(value, NamedSharding(mesh, specs[name]))
               for name, value in params.items()},
      lambda step: jax.device_put(rows(step, WIDTH), NamedSharding(mesh, P("data"))),
      lambda step, state, batch: step(state, batch))


def manual_psum() -> Trainer:
  def update(params: Any, batch: Any) -> Any:
    value, grads = jax.value_and_grad(_mlp_loss)(params, batch, jax.random.key(0))
    value, grads = jax.lax.pmean((value, grads), "data")
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value
  return manual(update, dict.fromkeys(_MLP, P()), weights(**_MLP))


def manual_zero() -> Trainer:
  """Weights gathered, gradients by psum_scatter."""
  def update(params: Any, batch: Any) -> Any:
    whole = {name: jax.lax.all_gather(value, "data", tiled=True)
             for name, value in params.items()}
    value, grads = jax.value_and_grad(_mlp_loss)(whole, batch, jax.random.key(0))
    own = {name: jax.lax.psum_scatter(grad, "data", tiled=True) / 4
           for name, grad in grads.items()}
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, own), jax.lax.pmean(value, "data")
  return manual(update, dict.fromkeys(_MLP, P("data")), weights(**_MLP))


def manual_experts() -> Trainer:
  """One expert a device; tokens go to theirs by all_to_all, those of the highest score."""
  def update(params: Any, batch: Any) -> Any:
    def loss(params: Any) -> jax.Array:
      scores = jax.nn.softmax(batch["x"] @ params["gate"])
      _, chosen = jax.lax.top_k(scores.T, 2)
      picked = jnp.take(batch["x"], chosen, axis=0)
      sent = jax.lax.all_to_all(picked, "data", 0, 0, tiled=True)
      done = jax.lax.all_to_all(jax.nn.gelu(sent @ params["in"][0]), "data", 0, 0, tiled=True)
      kept = jnp.take_along_axis(scores.T, chosen, axis=1)[..., None]
      mixed = jnp.zeros_like(batch["x"]).at[chosen.reshape(-1)].add(
          (kept * done).reshape(-1, done.shape[-1]))
      return cross_entropy(mixed @ params["out"], batch["y"])
    value, grads = jax.value_and_grad(loss)(params)
    grads = {name: grad if name == "in" else jax.lax.pmean(grad, "data")
             for name, grad in grads.items()}
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), jax.lax.pmean(value, "data")
  return manual(update, {"gate": P(), "in": P("data"), "out": P()},
                weights(gate=(WIDTH, 4), **{"in": (4, WIDTH, WIDTH)}, out=(WIDTH, CLASSES)))


def manual_ring() -> Trainer:
  """Attention over keys that go round a ring, by ppermute in a scan."""
  def update(params: Any, batch: Any) -> Any:
    def loss(params: Any) -> jax.Array:
      q, k, v = (batch["x"] @ params[name] for name in ("q", "k", "v"))
      def turn(carry: Any, _: None) -> Any:
        k, v, most, total, mixed = carry
        scores = q @ k.T / np.float32(np.sqrt(WIDTH))
        higher = jnp.maximum(most, scores.max(-1))
        scale, part = jnp.exp(most - higher), jnp.exp(scores - higher[:, None])
        mixed = mixed * scale[:, None] + part @ v
        passed = jax.lax.ppermute((k, v), "data", [(i, (i + 1) % 4) for i in range(4)])
        return (*passed, higher, total * scale + part.sum(-1), mixed), None
      begin = (k, v, jnp.full(len(q), -1e9), jnp.zeros(len(q)), jnp.zeros_like(q))
      (_, _, _, total, mixed), _ = jax.lax.scan(turn, begin, None, length=4)
      return cross_entropy((mixed / total[:, None]) @ params["out"], batch["y"])
    value, grads = jax.lax.pmean(jax.value_and_grad(loss)(params), "data")
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value
  square = dict.fromkeys(("q", "k", "v"), (WIDTH, WIDTH))
  return manual(update, dict.fromkeys((*square, "out"), P()),
                weights(**square, out=(WIDTH, CLASSES)))


def experts() -> Trainer:
  """Experts over a mesh axis under `jit`: two of eight by top_k, a sort, a balancing loss."""
  def loss(params: Any, batch: Any, key: jax.Array) -> jax.Array:
    scores = jax.nn.softmax(batch["x"] @ params["gate"] + 0.01 * jax.random.normal(key, (8,)))
    best, which = jax.lax.top_k(scores, 2)
    sent = jnp.einsum("bke,bd->ebd", jax.nn.one_hot(which, 8) * best[..., None], batch["x"])
    hidden = jax.nn.gelu(jnp.einsum("ebd,edh->ebh", sent, params["in"]))
    mixed = jnp.einsum("ebh,ehd->bd", hidden, params["down"])
    ordered = jnp.sort(scores.mean(0))
    return (cross_entropy(mixed @ params["out"], batch["y"])
            + 0.1 * jnp.square(ordered[-1] - ordered[0]))
  return plain(mesh_of(data=2, expert=2), loss,
               weights(gate=(WIDTH, 8), **{"in": (8, WIDTH, WIDTH)}, down=(8, WIDTH, WIDTH),
                       out=(WIDTH, CLASSES)), optax.adam(1e-2),
               specs={"in": P("expert"), "down": P("expert")})


def attention(dtype: Any) -> Trainer:
  """A pre-norm block over data and tensor axes, softmax with a causal mask."""
  def loss(params: Any, batch: Any, key: jax.Array) -> jax.Array:
    del key
    low = jax.tree.map(lambda leaf: leaf.astype(dtype), params)
    x = batch["x"].astype(dtype)
    normed = jax.nn.standardize(x.astype(jnp.float32), epsilon=1e-5).astype(dtype)
    q, k, v = (part.reshape(*part.shape[:2], 4, -1)
               for part in jnp.split(normed @ low["qkv"], 3, -1))
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) / q.shape[-1] ** 0.5
    scores = jnp.where(jnp.tril(jnp.ones(scores.shape[-2:], bool)), scores, -1e9)
    x = x + jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores), v).reshape(x.shape) @ low["mix"]
    x = x + jax.nn.gelu(x @ low["up"]) @ low["down"]
    return cross_entropy(x.mean(1) @ low["out"], batch["y"])
  params = weights(qkv=(WIDTH, 3 * WIDTH), mix=(WIDTH, WIDTH), up=(WIDTH, 4 * WIDTH),
                   down=(4 * WIDTH, WIDTH), out=(WIDTH, CLASSES))
  return plain(mesh_of(data=2, tensor=2), loss, params, optax.adamw(1e-2), shape=(LENGTH, WIDTH),
               specs={"qkv": P(None, "tensor"), "mix": P("tensor"), "up": P(None, "tensor"),
                      "down": P("tensor")})


def lstm() -> Trainer:
  def loss(params: Any, batch: Any, key: jax.Array) -> jax.Array:
    del key
    def cell(carry: Any, x: jax.Array) -> Any:
      h, c = carry
      i, f, g, o = jnp.split(jnp.concatenate([x, h], -1) @ params["gates"] + params["bias"], 4, -1)
      c = jax.nn.sigmoid(f + 1) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
      h = jax.nn.sigmoid(o) * jnp.tanh(c)
      return (h, c), h
    zeros = jnp.zeros((ROWS, WIDTH))
    _, seen = jax.lax.scan(cell, (zeros, zeros), batch["x"].swapaxes(0, 1))
    return cross_entropy(seen.mean(0) @ params["out"], batch["y"])
  return plain(mesh_of(data=4), loss,
               weights(gates=(2 * WIDTH, 4 * WIDTH), bias=(4 * WIDTH,), out=(WIDTH, CLASSES)),
               optax.rmsprop(1e-2), shape=(LENGTH, WIDTH))


def accumulated() -> Trainer:
  """Gradients of four micro-batches added up in a scan, bf16 compute, Adafactor."""
  def loss(params: Any, batch: Any, key: jax.Array) -> jax.Array:
    parts = jax.tree.map(lambda leaf: leaf.reshape(4, -1, *leaf.shape[1:]), batch)
    def one(total: jax.Array, part: Any) -> tuple[jax.Array, None]:
      low = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), params)
      return total + cross_entropy(_mlp(low, part["x"].astype(jnp.bfloat16)), part["y"]), None
    return jax.lax.scan(jax.checkpoint(one), jnp.zeros(()), parts)[0] / 4
  return plain(mesh_of(data=4), loss, weights(**_MLP), optax.adafactor(1e-2))


def loss_scaling() -> Trainer:
  """float16 with a scale that halves where a gradient is no number."""
  tx = optax.apply_if_finite(optax.adam(1e-2), 3)

  def loss(params: Any, batch: Any, key: jax.Array) -> jax.Array:
    del key
    low = jax.tree.map(lambda leaf: leaf.astype(jnp.float16), params)
    return cross_entropy(_mlp(low, batch["x"].astype(jnp.float16), jax.nn.relu), batch["y"]) * 128
  return plain(mesh_of(data=4), loss, weights(**_MLP), tx, donate=True)


def sharpness() -> Trainer:
  """Sharpness-aware: a gradient at the point that another one leads to."""
  def loss(params: Any, batch: Any, key: jax.Array) -> jax.Array:
    grads = jax.lax.stop_gradient(jax.grad(_mlp_loss)(params, batch, key))
    scale = 0.05 / (optax.tree.norm(grads) + 1e-12)
    return _mlp_loss(jax.tree.map(lambda p, g: p + scale * g, params, grads), batch, key)
  return plain(mesh_of(data=4), loss, weights(**_MLP), optax.sgd(0.1, momentum=0.9, nesterov=True))


def spectral() -> Trainer:
  """A Fourier layer, a cumulative sum, a norm over rows."""
  def loss(params: Any, batch: Any, key: jax.Array) -> jax.Array:
    del key
    seen = jnp.fft.rfft(batch["x"] @ params["in"])
    x = jnp.fft.irfft(seen * jax.lax.complex(params["bias"][:17], 0.1 * params["bias"][-17:]))
    x = jnp.cumsum(x, -1) / (1 + jnp.linalg.norm(x, axis=-1, keepdims=True))
    return cross_entropy(jnp.tanh(x @ params["up"]) @ params["out"], batch["y"])
  return plain(mesh_of(data=4), loss, weights(**_MLP), optax.adam(1e-2))


class _Conv(nn.Module):

  @nn.compact
  def __call__(self, x: jax.Array) -> jax.Array:
    for features in (8, 16):
      y = nn.Conv(features, (3, 3), strides=2, use_bias=False)(x)
      y = nn.relu(nn.BatchNorm(use_running_average=False, momentum=0.9)(y))
      x = y + nn.avg_pool(nn.Dense(features)(x), (2, 2), (2, 2))
    return nn.Dense(CLASSES)(nn.GroupNorm(4)(x).mean((1, 2)))


def convolutions() -> Trainer:
  """linen: strided convolutions, batch norm over the whole batch, group norm, residuals, LAMB."""
  mesh, model, tx = mesh_of(data=4), _Conv(), optax.lamb(1e-2)

  def train_step(state: Any, batch: Any) -> Any:
    params, stats, opt_state = state
    def loss(params: Any) -> Any:
      logits, new = model.apply({"params": params, "batch_stats": stats}, batch["x"],
                                mutable=["batch_stats"])
      return cross_entropy(logits, batch["y"]), new["batch_stats"]
    (value, stats), grads = jax.value_and_grad(loss, has_aux=True)(params)
    updates, opt_state = tx.update(grads, opt_state, params)
    return (optax.apply_updates(params, updates), stats, opt_state), value

  def start() -> Any:
    made = model.init(jax.random.key(0), jnp.ones((1, 8, 8, 3)))
    return jax.device_put((made["params"], made["batch_stats"], tx.init(made["params"])),
                          NamedSharding(mesh, P()))
  return Trainer(lambda: jax.jit(train_step), start,
                 lambda step: jax.device_put(rows(step, 8, 8, 3), NamedSharding(mesh, P("data"))),
                 lambda step, state, batch: step(state, batch))


MORE: dict[str, Callable[[], Trainer]] = {
    "data parallel, momentum": lambda: data_parallel(optax.sgd(0.1, momentum=0.9)),
    "data parallel, Lion": lambda: data_parallel(optax.lion(1e-3)),
    "data parallel, an update every third call": lambda: data_parallel(
        optax.MultiSteps(optax.chain(optax.clip(1.0), optax.lion(1e-3)), 3)),
    "tensor parallel, dropout, AdamW": tensor_dropout,
    "FSDP, scan, remat, float32": lambda: fsdp_scan(jnp.float32),
    "FSDP, scan, remat, bf16": lambda: fsdp_scan(jnp.bfloat16),
    "FSDP, scan, explicit mesh": lambda: fsdp_scan(jnp.float32, AxisType.Explicit),
    "pmap": pmap,
    "shard_map, psum": manual_psum,
    "shard_map, psum_scatter": manual_zero,
    "shard_map, all_to_all experts": manual_experts,
    "shard_map, ring attention": manual_ring,
    "experts under jit": experts,
    "attention, float32": lambda: attention(jnp.float32),
    "attention, bf16": lambda: attention(jnp.bfloat16),
    "LSTM, RMSprop": lstm,
    "micro-batches in a scan, bf16": accumulated,
    "float16, scaled loss": loss_scaling,
    "sharpness-aware": sharpness,
    "Fourier layer": spectral,
    "convolutions, batch norm, LAMB": convolutions,
}
