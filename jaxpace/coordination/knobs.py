"""Settings of a pacer that may be changed while the job runs, carried in its state as arrays."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxpace.core import fields
from jaxpace.core.types import Pacer

# What can be wrong about a setting of a pacer, said in a sentence that names the fix.

def steps(name: str, value: Any, least: int) -> int:
  """Checks a number of steps, from `least` to a million."""
  return fields.whole(name, value, least, 1_000_000, of="steps")


def slots(value: Any) -> int:
  """Checks how many collectives of a step a pacer looks at: no more than have timestamps."""
  return fields.whole("slots", value, 1, 256, of="collectives")


def number(name: str, value: Any, least: float, most: float, hint: str, *,
           open_ended: bool = False) -> np.float32:
  """Checks a number in [least, most], or strictly between them if `open_ended`."""
  return np.float32(fields.number(name, value, least, most, hint, strictly=open_ended))


def delay(name: str, value: Any) -> np.float32:
  """Checks a longest delay, in seconds."""
  return number(name, value, 0, 10, "seconds, 20 ms is 20e-3")


def pacers(*candidates: Any) -> None:
  """Checks that these are pacers."""
  for candidate in candidates:
    if not isinstance(candidate, Pacer):
      hint = " Did you forget to call the factory?" if callable(candidate) else ""
      raise ValueError(f"{candidate!r} is not a Pacer. Pass what a factory returns, such as "
                       f"jaxpace.pace_early_ranks(), or jaxpace.Pacer(init, update).{hint}")


class Knobs(NamedTuple):
  """What `jaxpace.steerable` sets. A pacer that keeps one in its state, and reads it, can be
  steered by it."""

  threshold: jax.Array  # [] float32, a share of the median step; NaN: as the pacer was made
  max_delay: jax.Array  # [] float32 s; NaN: as the pacer was made


def init() -> Knobs:
  """Returns knobs that leave everything as the pacer was made."""
  return Knobs(jnp.full((), np.nan, jnp.float32), jnp.full((), np.nan, jnp.float32))


def chosen(knob: jax.Array, made: np.float32) -> jax.Array:
  """Returns the knob's value, or `made` where it is NaN: [] float32."""
  return jnp.where(jnp.isnan(knob), made, knob)


def turned(state: Any, to: Knobs) -> Any:
  """A pacer's or a balancer's state with all its knobs at `to`."""
  return jax.tree.map(lambda node: to if isinstance(node, Knobs) else node, state,
                      is_leaf=lambda node: isinstance(node, Knobs))
