"""Steps as trainers write them, jitted as a whole."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

P = PartitionSpec
VOCABULARY, LENGTH, ROWS = 2048, 256, 4


class Step(NamedTuple):
  """A jittable step, and the types and places of its arguments."""

  function: Callable[..., Any]
  state: Any
  batch: Any
  out_shardings: Any


def _shapes(blocks: int, width: int) -> dict[str, Any]:
  return {"embedding": (VOCABULARY, width),
          "blocks": {"qkv": (blocks, width, 3 * width), "out": (blocks, width, width),
                     "up": (blocks, width, 4 * width), "down": (blocks, 4 * width, width),
                     "scale": (blocks, 2, width)}}


def _norm(x: jax.Array, scale: jax.Array) -> jax.Array:
  wide = x.astype(jnp.float32)
  return (wide * jax.lax.rsqrt(jnp.mean(wide * wide, -1, keepdims=True) + 1e-6) * scale).astype(
      x.dtype)


def _block(x: jax.Array, weights: dict[str, jax.Array], heads: int) -> jax.Array:
  low = {name: leaf.astype(jnp.bfloat16) for name, leaf in weights.items()}
  scales = weights["scale"]
  parts = (_norm(x, scales[0]) @ low["qkv"]).reshape(*x.shape[:2], 3, heads, x.shape[-1] // heads)
  mixed = jax.nn.dot_product_attention(parts[:, :, 0], parts[:, :, 1], parts[:, :, 2],
                                       is_causal=True)
  x = x + mixed.reshape(x.shape) @ low["out"]
  return x + jax.nn.gelu(_norm(x, scales[1]) @ low["up"]) @ low["down"]


def transformer(mesh: Mesh, blocks: int, width: int, *, fsdp: bool, scan: bool) -> Step:
  """A decoder with AdamW and clipping, in bfloat16; scanned blocks under remat.

  Args:
    mesh: one axis, "data".
    blocks: how many.
    width: of the model; heads are 64 wide.
    fsdp: parameters and moments are sharded along their second last dimension, else on all devices.
    scan: blocks are scanned with `jax.checkpoint`, else written out.
  """
  heads = max(width // 64, 1)
  tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))

  def loss(params: Any, batch: jax.Array) -> jax.Array:
    table = params["embedding"].astype(jnp.bfloat16)
    x = jax.nn.one_hot(batch[:, :-1], VOCABULARY, dtype=jnp.bfloat16) @ table
    if scan:
      x, _ = jax.lax.scan(jax.checkpoint(lambda x, one: (_block(x, one, heads), None)), x,
                          params["blocks"])
    else:
      for place in range(blocks):
        x = _block(x, jax.tree.map(lambda leaf, at=place: leaf[at], params["blocks"]), heads)
    logits = (x @ table.T).astype(jnp.float32)
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch[:, 1:]).mean()

  def step(state: Any, batch: jax.Array) -> Any:
    params, opt = state
    value, slopes = jax.value_and_grad(loss)(params, batch)
    updates, opt = tx.update(slopes, opt, params)
    return (optax.apply_updates(params, updates), opt), value

  params = jax.tree.map(lambda shape: jax.ShapeDtypeStruct(shape, jnp.float32),
                        _shapes(blocks, width), is_leaf=lambda leaf: isinstance(leaf, tuple))
  state = (params, jax.eval_shape(tx.init, params))

  def placed(leaf: Any) -> Any:
    sharded = fsdp and leaf.ndim >= 2 and leaf.shape[-2] % mesh.size == 0
    spec = P(*[None] * (leaf.ndim - 2), "data") if sharded else P()
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=NamedSharding(mesh, spec))

  state = jax.tree.map(placed, state)
  batch = jax.ShapeDtypeStruct((mesh.size * ROWS, LENGTH + 1), jnp.int32,
                               sharding=NamedSharding(mesh, P("data")))
  outs = (jax.tree.map(lambda leaf: leaf.sharding, state), NamedSharding(mesh, P()))
  return Step(step, state, batch, outs)
