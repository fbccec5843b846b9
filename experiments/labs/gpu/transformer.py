"""A small decoder-only transformer and Adam in plain JAX: the train step whose instrumentation is
measured."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

RATE, DECAY_1, DECAY_2, EPSILON = 1e-4, 0.9, 0.999, 1e-8


class Size(NamedTuple):
  """Of model and batch."""

  layers: int
  width: int
  heads: int
  sequence: int
  vocabulary: int
  batch: int


SIZES = {"20ms": Size(8, 1024, 16, 1024, 8192, 8), "2ms": Size(4, 512, 8, 256, 4096, 16),
         "small": Size(2, 256, 4, 128, 1024, 8), "tiny": Size(0, 16, 2, 8, 32, 2)}
"""By about what a step takes on an H200, where the batch is calibrated; `tiny` is for tests, quick
to compile."""


def parameters(size: Size, seed: int = 0) -> dict[str, Any]:
  """Float32 parameters, numpy."""
  rng = np.random.default_rng(seed)

  def matrix(rows: int, columns: int) -> np.ndarray:
    return (rng.standard_normal((rows, columns), dtype=np.float32)
            / np.float32(np.sqrt(rows))).astype(np.float32)

  width = size.width
  blocks = [{"qkv": matrix(width, 3 * width), "out": matrix(width, width),
             "up": matrix(width, 4 * width), "down": matrix(4 * width, width),
             "scale_1": np.ones(width, np.float32), "scale_2": np.ones(width, np.float32)}
            for _ in range(size.layers)]
  return {"embedding": matrix(size.vocabulary, width), "position": matrix(size.sequence, width),
          "blocks": blocks, "scale": np.ones(width, np.float32)}


def fresh(size: Size) -> Any:
  """Parameters, both moments and the count of steps, numpy."""
  start = parameters(size)
  return (start, jax.tree.map(np.zeros_like, start), jax.tree.map(np.zeros_like, start),
          np.zeros((), np.int32))


def tokens(size: Size, seed: int = 0) -> np.ndarray:
  """[batch, sequence + 1] int32."""
  return np.random.default_rng(seed).integers(0, size.vocabulary, (size.batch, size.sequence + 1),
                                              np.int32)


def _norm(x: jax.Array, scale: jax.Array) -> jax.Array:
  wide = x.astype(jnp.float32)
  return (wide * jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + np.float32(1e-6))
          * scale
          ).astype(x.dtype)


def loss(parameters: Any, batch: jax.Array, size: Size) -> jax.Array:
  """Mean cross-entropy of the next token, computed in bfloat16: batch [B, S + 1] int32 -> []
  float32."""
  low = jax.tree.map(lambda p: p.astype(jnp.bfloat16) if p.ndim == 2 else p, parameters)
  # A product, not a look-up: the gradient of that is a scatter, which adds in no fixed order on a
  # GPU.
  x = (jax.nn.one_hot(batch[:, :-1], size.vocabulary, dtype=jnp.bfloat16) @ low["embedding"]
       + low["position"])
  for block in low["blocks"]:
    heads = (*x.shape[:2], 3, size.heads, size.width // size.heads)
    query, key, value = (part[:, :, 0]
                         for part in jnp.split(
                             (_norm(x, block["scale_1"]) @ block["qkv"]).reshape(heads),
                             3, axis=2))
    mixed = jax.nn.dot_product_attention(query, key, value, is_causal=True)
    x = x + mixed.reshape(x.shape) @ block["out"]
    x = x + jax.nn.gelu(_norm(x, block["scale_2"]) @ block["up"]) @ block["down"]
  logits = (_norm(x, low["scale"]) @ low["embedding"].T).astype(jnp.float32)
  target = jax.nn.one_hot(batch[:, 1:], size.vocabulary, dtype=jnp.float32)
  return -jnp.mean(jnp.sum(target * jax.nn.log_softmax(logits), axis=-1))


def clipped(slopes: Any, most: float = 1.0) -> Any:
  """Gradients scaled to a global norm of at most `most`, as transformers are trained.

  It also keeps one device comparable with several: an all-reduce of one device is removed, and
  without it and without clipping XLA fuses the update into the backward pass, where gradients are
  never in memory, as they are for a real one.
  """
  norm = jnp.sqrt(sum(jnp.sum(slope * slope) for slope in jax.tree.leaves(slopes)))
  scale = jnp.minimum(np.float32(1), np.float32(most) / norm)
  return jax.tree.map(lambda slope: slope * scale, slopes)


def adam(state: Any, slopes: Any) -> Any:
  """One step of Adam on (parameters, first moments, second moments, count)."""
  start, first, second, count = state
  count = count + np.int32(1)
  age = count.astype(jnp.float32)
  first = jax.tree.map(lambda m, g: np.float32(DECAY_1) * m + np.float32(1 - DECAY_1) * g, first,
                       slopes)
  second = jax.tree.map(lambda v, g: np.float32(DECAY_2) * v + np.float32(1 - DECAY_2) * g * g,
                        second, slopes)
  whole_1 = np.float32(1) - np.float32(DECAY_1) ** age
  whole_2 = np.float32(1) - np.float32(DECAY_2) ** age
  moved = jax.tree.map(
      lambda p, m, v: p - np.float32(RATE) * (m / whole_1)
      / (jnp.sqrt(v / whole_2) + np.float32(EPSILON)),
      start, first, second)
  return moved, first, second, count


def mean(tree: Any) -> Any:
  """Means over the ranks."""
  return jax.lax.pmean(tree, "data")


def train_step(size: Size, averaged: Callable[[Any], Any] = mean
               ) -> Callable[[Any, jax.Array], tuple[Any, jax.Array]]:
  """The per-device step: (state, batch [B, S + 1]) -> (state, loss), averaged over "data"."""

  def step(state: Any, batch: jax.Array) -> tuple[Any, jax.Array]:
    value, slopes = jax.value_and_grad(loss)(state[0], batch, size)
    slopes, value = averaged((slopes, value))
    return adam(state, clipped(slopes)), value

  return step
