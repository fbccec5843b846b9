"""Between nested NamedTuples and the plain values JSON holds."""

from __future__ import annotations

import types
import typing
from typing import Any, TypeVar

T = TypeVar("T")


def to_plain(value: Any) -> Any:
  """Named tuples as dicts, other tuples as lists."""
  if hasattr(value, "_asdict"):
    return {name: to_plain(v) for name, v in value._asdict().items()}
  if isinstance(value, (list, tuple)):
    return [to_plain(v) for v in value]
  return value


def from_plain(kind: type[T], value: Any) -> T:
  """Inverse of `to_plain`. Fields that are absent take their defaults; unknown ones, of a newer version, are ignored.

  Raises:
    ValueError: a value is of the wrong type, or a field without default is absent.
  """
  return _convert(kind, value, kind.__name__)


def _convert(kind: Any, value: Any, where: str) -> Any:
  if typing.get_origin(kind) in (types.UnionType, typing.Union):
    options = [k for k in typing.get_args(kind) if k is not type(None)]
    return None if value is None else _convert(options[0], value, where)
  if typing.get_origin(kind) is tuple:
    if not isinstance(value, list):
      raise ValueError(f"{where} is no list")
    return tuple(_convert(typing.get_args(kind)[0], v, where) for v in value)
  if hasattr(kind, "_fields"):
    if not isinstance(value, dict):
      raise ValueError(f"{where} is no object")
    hints = typing.get_type_hints(kind)
    try:
      return kind(**{n: _convert(hints[n], value[n], f"{where}.{n}") for n in kind._fields if n in value})
    except TypeError:
      raise ValueError(f"{where} lacks a field") from None
  if kind is float and isinstance(value, int) and not isinstance(value, bool):
    return float(value)
  if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
    raise ValueError(f"{where} is no {kind.__name__}")
  return value
