"""What can be wrong about a setting of a pacer, said in a sentence that names the fix."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from jaxpace.core.types import Pacer


def steps(name: str, value: Any, least: int) -> int:
  """Checks a number of steps, from `least` to a million."""
  if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or not least <= value <= 1_000_000:
    raise ValueError(f"{name}={value!r} must be a whole number of steps, from {least} to 1,000,000.")
  return int(value)


def number(name: str, value: Any, least: float, most: float, hint: str, *, open_ended: bool = False) -> np.float32:
  """Checks a number in [least, most], or strictly between them if `open_ended`."""
  ok = not isinstance(value, bool) and isinstance(value, (int, float, np.integer, np.floating)) and math.isfinite(value)
  if ok and open_ended:
    ok = least < value < most
  if not ok or not least <= value <= most:
    between = "strictly between" if open_ended else "from"
    link = "and" if open_ended else "to"
    raise ValueError(f"{name}={value!r} must be a number {between} {least:g} {link} {most:g}: {hint}.")
  return np.float32(value)


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
