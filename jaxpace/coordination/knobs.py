"""Settings of a pacer that may be changed while the job runs, carried in its state as arrays."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np


class Knobs(NamedTuple):
  """What `jaxpace.steerable` sets. A pacer that keeps one in its state, and reads it, can be
  steered by it."""

  threshold: jax.Array  # [] float32, a share of the median step; NaN: as the pacer was made
  max_delay: jax.Array  # [] float32 s; NaN: as the pacer was made


class Switch(NamedTuple):
  """Whether what acts may act. Who keeps one in its state, and obeys it, is switched by
  `jaxpace.steerable`."""

  on: jax.Array  # [] bool


def init() -> Knobs:
  """Returns knobs that leave everything as the pacer was made."""
  return Knobs(jnp.full((), np.nan, jnp.float32), jnp.full((), np.nan, jnp.float32))


def chosen(knob: jax.Array, made: np.float32) -> jax.Array:
  """Returns the knob's value, or `made` where it is NaN: [] float32."""
  return jnp.where(jnp.isnan(knob), made, knob)
