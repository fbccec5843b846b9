"""Plain values, as JSON holds them, of ours, named tuples, structs and numbers of numpy among
them."""

from __future__ import annotations

import math
from typing import Any

import msgspec
import numpy as np


def to_plain(value: Any, digits: int | None = None) -> Any:
  """Named tuples and structs as dicts, other tuples and arrays as lists, numpy's scalars as
  Python's, what is not finite as None; floats rounded to so many digits, if given."""
  if isinstance(value, msgspec.Struct):
    value = msgspec.structs.asdict(value)
  if isinstance(value, dict):
    return {str(key): to_plain(v, digits) for key, v in value.items()}
  if isinstance(value, np.ndarray | np.generic):
    value = value.tolist()
  if isinstance(value, list | tuple):
    if hasattr(value, "_asdict"):
      return {name: to_plain(v, digits) for name, v in value._asdict().items()}
    if value and all(type(v) is int for v in value):
      return list(value)
    return [to_plain(v, digits) for v in value]
  if isinstance(value, float):
    if not math.isfinite(value):
      return None
    return value if digits is None else float(f"{value:.{digits}g}")
  return value
