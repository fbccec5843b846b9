"""What an instrumented step does for a pacer that holds collectives back: who is asked, and what is
kept of what was held."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxpace.communication import holds
from jaxpace.communication.rewrite import Measurements
from jaxpace.core import packing, ring
from jaxpace.core.pace import PaceState
from jaxpace.core.types import Pacer
from jaxpace.step import checks


def holder(pacer: Pacer | None, max_hold: float, one: PaceState, axis: tuple[str, ...]
           ) -> tuple[holds.Holder | None, jax.Array | None]:
  """Who is asked before collectives, and the number by which ranks are compared.

  Args:
    pacer: the step's.
    max_hold: seconds a step.
    one: one rank's state.
    axis: the data axis.

  Returns:
    None twice where nobody is asked.
  """
  packed = checks.packed_pacer(one)
  if pacer is None or pacer.hold is None or packed is None or isinstance(one.alike, tuple):
    return None, None
  asked = holds.Holder(pacer, max_hold, one.step, packing.unpack(packed), one.alike, axis)
  return asked, holds.digest(packed, pacer)


def seconds(held: Mapping[int, holds.Held], slots: int) -> jax.Array:
  """How long each slot's collective was held back: float32 [slots] s, 0 where it was not."""
  return jnp.stack([held[slot].seconds if slot in held else jnp.float32(0)
                    for slot in range(slots)])


def words(measured: Measurements, allowed: jax.Array | tuple[()]) -> jax.Array | None:
  """What a row of the ring keeps of it; None without such a pacer.

  Args:
    measured: in the step.
    allowed: bool [], whether the pacer's answers were followed in it.

  Returns:
    uint32 [ring.held_width(stamped collectives)], see `jaxpace.core.ring`.
  """
  if measured.pacer is None or measured.readings is None or isinstance(allowed, tuple):
    return None
  unknown = jnp.float32(np.nan)
  bits = functools.partial(jax.lax.bitcast_convert_type, new_dtype=jnp.uint32)
  nothing = np.full((2,), ring.NOT_HELD, np.uint32)
  columns: list[Any] = []
  for held in map(measured.held.get, range(len(measured.waits))):
    if held is None:
      columns += [nothing, bits(jnp.stack([unknown, unknown])), np.zeros((1,), np.uint32)]
    else:
      seconds = jnp.where(allowed, held.seconds, unknown)
      columns += [held.lost, bits(jnp.stack([seconds, held.heard])),
                  held.listened.astype(jnp.uint32)[None]]
  readings = measured.readings
  return jnp.concatenate([*columns, readings.number.astype(jnp.uint32)[None],
                          bits(readings.first).reshape(-1)])


__all__ = ["holder", "seconds", "words"]
