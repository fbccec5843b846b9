"""Between values of ours, nested named tuples and numbers of numpy among them, and the plain ones
that JSON holds."""

from __future__ import annotations

import functools
import math
import types
import typing
from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np

T = TypeVar("T")
_LARGE = 1 << 63


def to_plain(value: Any, digits: int | None = None) -> Any:
  """Named tuples as dicts, other tuples and arrays as lists, numpy's scalars as Python's, what is
  not finite as None.

  Args:
    value: of dicts, sequences, arrays and scalars inside each other.
    digits: that floats are rounded to, if given.
  """
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


def from_plain(kind: type[T], value: Any) -> T:
  """Inverse of `to_plain`. Fields that are absent take their defaults; unknown ones, of a newer
  version, are ignored.

  Raises:
    ValueError: a value is of the wrong type, or a field without default is absent.
  """
  converter: Any = _converter
  return converter(kind)(value)


@functools.cache  # A job has thousands of these documents, each of hundreds of values.
def _converter(kind: Any) -> Callable[[Any], Any]:
  if typing.get_origin(kind) in (types.UnionType, typing.Union):
    convert = _converter(next(k for k in typing.get_args(kind) if k is not type(None)))
    return lambda value: None if value is None else convert(value)
  if typing.get_origin(kind) is tuple:
    return functools.partial(_list, _converter(typing.get_args(kind)[0]))
  if hasattr(kind, "_fields"):
    hints = typing.get_type_hints(kind)
    return functools.partial(_named, kind, {name: _converter(hints[name]) for name in kind._fields})
  return functools.partial(_scalar, kind)


def _list(convert: Callable[[Any], Any], value: Any) -> Any:
  if not isinstance(value, list):
    raise ValueError(f"{value!r:.40} is no list")
  return tuple(map(convert, value))


def _named(kind: Any, fields: dict[str, Callable[[Any], Any]], value: Any) -> Any:
  if not isinstance(value, dict):
    raise ValueError(f"{kind.__name__} is no object: {value!r:.40}")
  try:
    return kind(**{name: convert(value[name]) for name, convert in fields.items() if name in value})
  except TypeError:
    raise ValueError(f"{kind.__name__} lacks a field") from None
  except ValueError as error:
    raise ValueError(f"in {kind.__name__}: {error}") from None


def _scalar(kind: Any, value: Any) -> Any:
  if kind is float and type(value) is int:
    value = float(value) if abs(value) < _LARGE else value
  # JSON as Python reads it holds NaN, Infinity and numbers of any length: no such number was ever
  # written.
  if type(value) is kind and (kind not in (int, float) or abs(value) < _LARGE):
    return value
  raise ValueError(f"{value!r:.40} is no {kind.__name__}")
