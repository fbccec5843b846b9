"""The CNN, in flax.linen."""

from __future__ import annotations

import flax.linen as nn
import jax


class CNN(nn.Module):
  """One convolution, one pooling, one dense layer: two small leaves, so a gradient is two messages
  of kilobytes."""

  features: int = 8
  classes: int = 10

  @nn.compact
  def __call__(self, image: jax.Array) -> jax.Array:  # [B, 8, 8, 1] -> [B, classes]
    x = nn.relu(nn.Conv(self.features, (3, 3), use_bias=False)(image))
    x = nn.max_pool(x, (2, 2), (2, 2))
    return nn.Dense(self.classes, use_bias=False)(x.reshape(len(x), -1))
