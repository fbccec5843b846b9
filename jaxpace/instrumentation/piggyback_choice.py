"""Whether the ranks' arrivals ride in an instrumented step's all-reduce, and why or why not."""

from __future__ import annotations

from typing import Literal

import jax

from jaxpace.coordination.share_work import shares_work
from jaxpace.core import packing
from jaxpace.core.packing import Packed
from jaxpace.core.types import Pacer
from jaxpace.instrumentation import piggyback, script
from jaxpace.observation.clocks import Clock

Share = Literal["auto"] | bool | None


def chosen(wanted: Share, written: script.Script, clock: Clock, pacer: Pacer | None,
           packed: Packed | None, axis: tuple[str, ...], platform: str) -> tuple[bool, str]:
  """Chooses, and says why in a few words.

  Args:
    wanted: what the user asked for.
    written: the step's.
    clock: what timestamps are taken with.
    pacer: the step's.
    packed: its state.
    axis: the data axis.
    platform: of the devices.

  Raises:
    ValueError: the pacer shares out work by speed, and nothing can be shared.
  """
  by_speed = packed is not None and shares_work(packing.unpack(packed))
  if not wanted:
    if by_speed:
      raise ValueError("jaxpace.share_work takes to know how long every rank was busy, and "
                       f"share={wanted} keeps that from it: leave share out.")
    return False, "not shared: share=None"
  refusal = piggyback.refusal(written.carrier, axis)
  if refusal and by_speed:
    raise ValueError("jaxpace.share_work takes to know how long every rank was busy, and that "
                     f"can't be shared: {refusal}.")
  if refusal:
    return False, f"not shared: {refusal}"
  if wanted == "auto" and pacer is None and clock.in_stream:
    return False, ("not shared: no pacer would see it, and it would be some kernels more "
                   "(share=True shares)")
  processes = jax.process_count()
  # All ranks must hold alike, and share out work alike.
  needed = by_speed or (pacer is not None and pacer.hold is not None)
  if wanted == "auto" and not needed and platform == "cpu" and processes > 2:
    # gloo sends every operand in turn: one more operand is one more round of messages.
    return False, (f"not shared: gloo would send {processes} processes one more message a step "
                   "(share=True shares)")
  slot = written.carrier.slot if written.carrier else 0
  return True, f"shared in the all-reduce of collective {slot}"


__all__ = ["Share", "chosen"]
