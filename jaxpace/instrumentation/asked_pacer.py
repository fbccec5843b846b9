"""What an instrumented step does for a pacer that holds collectives back: who is asked, and what it
sees of what was held."""

from __future__ import annotations

from collections.abc import Mapping

import jax
import jax.numpy as jnp

from jaxpace.core import packing
from jaxpace.core.pace import PaceState
from jaxpace.core.types import Pacer
from jaxpace.instrumentation import before_collective, checks


def holder(pacer: Pacer | None, max_hold: float, one: PaceState, axis: tuple[str, ...]
           ) -> tuple[before_collective.Holder | None, jax.Array | None]:
  """Who is asked before collectives, and the number by which ranks are compared.

  Args:
    pacer: the step's.
    max_hold: seconds per step.
    one: one rank's state.
    axis: the data axis.

  Returns:
    None twice where nobody is asked.
  """
  packed = checks.packed_pacer(one)
  if pacer is None or pacer.hold is None or packed is None or isinstance(one.alike, tuple):
    return None, None
  asked = before_collective.Holder(pacer, max_hold, one.step, packing.unpack(packed), one.alike,
                                   axis)
  return asked, before_collective.digest(packed, pacer)


def seconds(held: Mapping[int, before_collective.Held], slots: int) -> jax.Array:
  """How long each slot's collective was held back: float32 [slots] s, 0 where it was not."""
  return jnp.stack([held[slot].seconds if slot in held else jnp.float32(0)
                    for slot in range(slots)])


__all__ = ["holder", "seconds"]
