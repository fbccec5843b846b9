"""What can be wrong about a setting of a pacer, said in a sentence that names the fix."""

from __future__ import annotations

from typing import Any

import numpy as np

from jaxpace.core import fields
from jaxpace.core.types import Pacer


def steps(name: str, value: Any, least: int) -> int:
  """Checks a number of steps, from `least` to a million."""
  return fields.whole(name, value, least, 1_000_000, of="steps")


def slots(value: Any) -> int:
  """Checks how many collectives of a step a pacer looks at: no more than a step's stamps are of."""
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
