"""The character transformer, in flax.nnx."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx


class Block(nnx.Module):
  """Causal self-attention and a two-layer perceptron, each on a normalised residual stream."""

  def __init__(self, width: int, heads: int, *, rngs: nnx.Rngs) -> None:
    self.norm1 = nnx.RMSNorm(width, rngs=rngs)
    self.norm2 = nnx.RMSNorm(width, rngs=rngs)
    self.qkv = nnx.LinearGeneral(width, (3, heads, width // heads), use_bias=False, rngs=rngs)
    self.out = nnx.LinearGeneral((heads, width // heads), width, axis=(-2, -1), use_bias=False,
                                 rngs=rngs)
    self.up = nnx.Linear(width, 4 * width, use_bias=False, rngs=rngs)
    self.down = nnx.Linear(4 * width, width, use_bias=False, rngs=rngs)

  def __call__(self, x: jax.Array) -> jax.Array:  # [B, T, width] -> the same
    q, k, v = jnp.moveaxis(self.qkv(self.norm1(x)), 2, 0)  # [B, T, heads, width // heads] each
    x = x + self.out(jax.nn.dot_product_attention(q, k, v, is_causal=True))
    return x + self.down(nnx.gelu(self.up(self.norm2(x))))


class Transformer(nnx.Module):
  """A decoder-only transformer over bytes."""

  def __init__(self, vocabulary: int, context: int, width: int, heads: int, blocks: int, *,
               rngs: nnx.Rngs) -> None:
    self.characters = nnx.Embed(vocabulary, width, rngs=rngs)
    self.positions = nnx.Embed(context, width, rngs=rngs)
    self.blocks = nnx.List([Block(width, heads, rngs=rngs) for _ in range(blocks)])
    self.norm = nnx.RMSNorm(width, rngs=rngs)

  # [B, T] int32 -> [B, T, vocabulary] logits
  def __call__(self, characters: jax.Array) -> jax.Array:
    x = self.characters(characters) + self.positions(jnp.arange(characters.shape[1]))
    for block in self.blocks:
      x = block(x)
    return self.characters.attend(self.norm(x))
