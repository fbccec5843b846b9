"""Checks of single fields of a config: each says which field is wrong, and what it may be."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from typing import Any

import numpy as np


class SettingsError(ValueError):
  """A field is wrong: a sentence that names it and the allowed range."""


def section(at: str, value: Any) -> Mapping[str, Any]:
  """Returns a dict of fields as it is."""
  if not isinstance(value, Mapping):
    raise SettingsError(f"{at}={value!r} must be a dict of fields.")
  return value


def known(at: str, given: Mapping[str, Any], names: Collection[str]) -> None:
  """Refuses fields that there aren't."""
  for name in given:
    if name not in names:
      where = f"{at}.{name}" if at else str(name)
      raise SettingsError(f"{where} is no field; there are {', '.join(sorted(names)) or 'none'}.")


def whole(at: str, value: Any, least: int, most: int, more: str = "") -> int:
  """Returns a whole number; `more` is said after the range."""
  if isinstance(value, (bool, np.bool_)) or not isinstance(value, (int, np.integer)) or not least <= value <= most:
    raise SettingsError(f"{at}={value!r} must be a whole number from {least:,} to {most:,}{more}.")
  return int(value)


def number(at: str, value: Any, least: float, most: float, hint: str = "") -> float:
  """Returns a finite number; `hint` says what it is."""
  numeric = isinstance(value, (int, float, np.integer, np.floating)) and not isinstance(value, (bool, np.bool_))
  if not numeric or not math.isfinite(value) or not least <= value <= most:
    raise SettingsError(f"{at}={value!r} must be a number from {least:g} to {most:g}{': ' if hint else ''}{hint}.")
  return float(value)


def truth(at: str, value: Any) -> bool:
  """Returns a bool."""
  if not isinstance(value, (bool, np.bool_)):
    raise SettingsError(f"{at}={value!r} must be True or False.")
  return bool(value)


def choice(at: str, value: Any, names: Collection[str]) -> str:
  """Returns one of the names."""
  if not isinstance(value, str) or value not in names:
    raise SettingsError(f"{at}={value!r} must be one of {', '.join(names)}.")
  return value
