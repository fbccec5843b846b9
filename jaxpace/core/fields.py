"""Checks of single settings: each says which is wrong, and what it may be.

Without numpy, whose numbers count all the same: `jaxpace control` waits for nothing.
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Collection, Mapping
from typing import Any, TypeGuard


class SettingsError(ValueError):
  """A setting is wrong: a sentence that names it and the allowed range."""


def is_whole(value: Any, least: float = -math.inf, most: float = math.inf) -> TypeGuard[int]:
  """Whether it is a whole number in this range; True and False are none."""
  whole = isinstance(value, numbers.Integral) and not isinstance(value, bool)
  found: Any = value
  return whole and bool(least <= found <= most)


def is_number(value: Any, least: float = -math.inf, most: float = math.inf, *,
              strictly: bool = False) -> TypeGuard[float]:
  """Whether it is a finite number in this range, its ends left out if `strictly`; True and False
  are none."""
  if not isinstance(value, numbers.Real) or isinstance(value, bool):
    return False
  found: Any = value
  return bool((least < found < most if strictly else least <= found <= most)
              and -math.inf < found < math.inf)


def whole(at: str, value: Any, least: int, most: int | None = None, *, of: str = "",
          more: str = "") -> int:
  """Returns a whole number; `of` says of what, `more` is said after the range."""
  if not is_whole(value, least, math.inf if most is None else most):
    span = f"at least {least:,}" if most is None else f"from {least:,} to {most:,}"
    what = f"{f' of {of}' if of else ''}{',' if of or most is None else ''}"
    raise SettingsError(f"{at}={value!r} must be a whole number{what} {span}{more}.")
  return int(value)


def number(at: str, value: Any, least: float, most: float, hint: str = "", *,
           strictly: bool = False) -> float:
  """Returns a finite number; `hint` says what it is. `strictly` leaves the ends of the range
  out."""
  if not is_number(value, least, most, strictly=strictly):
    span = f"strictly between {least:g} and {most:g}" if strictly else f"from {least:g} to {most:g}"
    raise SettingsError(f"{at}={value!r} must be a number {span}{': ' if hint else ''}{hint}.")
  return float(value)


def truth(at: str, value: Any) -> bool:
  """Returns a bool."""
  # numpy's is no number and has no type that can be named without it.
  if (not isinstance(value, bool)
      and (str(getattr(value, "dtype", "")), getattr(value, "ndim", 1)) != ("bool", 0)):
    raise SettingsError(f"{at}={value!r} must be True or False.")
  return bool(value)


def choice(at: str, value: Any, names: Collection[str]) -> str:
  """Returns one of the names."""
  if not isinstance(value, str) or value not in names:
    raise SettingsError(f"{at}={value!r} must be one of {', '.join(names)}.")
  return value


def section(at: str, value: Any) -> Mapping[str, Any]:
  """Returns a dict of settings as it is."""
  if not isinstance(value, Mapping):
    raise SettingsError(f"{at}={value!r} must be a dict of fields.")
  return value


def known(at: str, given: Mapping[str, Any], names: Collection[str]) -> None:
  """Refuses settings that there aren't."""
  for name in given:
    if name not in names:
      where = f"{at}.{name}" if at else str(name)
      raise SettingsError(f"{where} is no field; there are {', '.join(sorted(names)) or 'none'}.")
