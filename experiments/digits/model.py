"""The CNN, in flax.linen."""

from __future__ import annotations

import flax.linen as nn
import jax


class CNN(nn.Module):
  """One convolution, one pooling, one dense layer: four small leaves, so that a gradient is a few kilobytes."""

  features: int = 8
  classes: int = 10

  @nn.compact
  def __call__(self, image: jax.Array) -> jax.Array:  # [B, 8, 8, 1] -> [B, classes]
    x = nn.relu(nn.Conv(self.features, (3, 3))(image))
    x = nn.max_pool(x, (2, 2), (2, 2))
    return nn.Dense(self.classes)(x.reshape(len(x), -1))
