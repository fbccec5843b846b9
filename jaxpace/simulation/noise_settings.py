"""Reads what makes ranks differ from a config: noise components, causes of pauses, traffic of
others."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from jaxpace.core.fields import SettingsError, choice, known, number, section, truth, whole
from jaxpace.runs.step_causes import PAUSES
from jaxpace.simulation import noise as noises

CAUSES = ("", *PAUSES)
"""What a pause may be: one that a column of a recorded run shows; "" where nothing shows it."""
_RANGES: dict[str, tuple[float, float, str]] = {
    "deviation": (0, 10, "a share of the compute"), "mean": (0, 100, "a share of the compute"),
    "scale": (0, 100, "a share of the compute"),
    "tail": (1.01, 100, "above 1, or there is no mean"),
    "extra": (-0.9, 100, "a share of the compute"), "spread": (0, 10, "a share of extra"),
    "probability": (0, 1, "of a pause in a step"), "seconds": (0, 3600, "seconds"),
    "begins": (0, 1, "in a step"), "length": (1, 1e7, "steps"),
    "load": (0, 0.99, "a share of the link"), "steps": (0, 1e7, "steps"),
    "every": (1, 1e7, "steps")}


def components(at: str, given: Mapping[str, Any],
               ranks: int) -> tuple[tuple[Any, ...], tuple[str, ...]]:
  """Reads noise components, and what their pauses are."""
  parts, causes = [], []
  for key, value in given.items():
    where = f"{at}.{key}"
    values = dict(section(where, value))
    kind = choice(f"{where}.kind", values.pop("kind", key), tuple(noises.COMPONENTS))
    causes.append("")
    if noises.COMPONENTS[kind] in noises.IN_GAP:
      causes[-1] = choice(f"{where}.cause", values.pop("cause", ""), CAUSES)
    parts.append(_slow(where, values, ranks) if kind == "slow"
                 else _numbers(where, noises.COMPONENTS[kind], values))
  return tuple(parts), tuple(causes)


def traffic(at: str, given: Mapping[str, Any]) -> noises.Traffic:
  """Reads others' traffic."""
  read: noises.Traffic = _numbers(at, noises.Traffic, given)
  return read


def _slow(at: str, values: Mapping[str, Any], ranks: int) -> noises.Slow:
  known(at, values, {"ranks", "extra"})
  extra = number(f"{at}.extra", values.get("extra", 0.0), *_RANGES["extra"])
  slower = values.get("ranks", ())
  if isinstance(slower, (str, bytes)) or not isinstance(slower, Iterable):
    raise SettingsError(
        f"{at}.ranks={slower!r} must be a list of the job's ranks, 0 to {ranks - 1}.")
  share = np.zeros(ranks, np.float32)
  for rank in slower:
    share[whole(f"{at}.ranks", rank, 0, ranks - 1)] = extra
  return noises.Slow(share)


def _numbers(at: str, kind: Any, values: Mapping[str, Any]) -> Any:
  """Makes a component whose fields are numbers."""
  names = set(kind._fields)
  known(at, values, {*names, "cause"} if kind in noises.IN_GAP else names)
  missing = [field for field in kind._fields if field not in values
             and field not in kind._field_defaults]
  if missing:
    raise SettingsError(
        f"{at}.{missing[0]} is missing: {kind.__name__.lower()} needs {', '.join(kind._fields)}.")
  read_fields: dict[str, Any] = {}
  for field, value in values.items():
    if field == "aligned":
      read_fields[field] = np.bool_(truth(f"{at}.{field}", value))
    elif field == "every":
      read_fields[field] = np.int32(whole(f"{at}.{field}", value, 1, 10_000_000))
    else:
      least, most, hint = _RANGES[field]
      if field == "steps" and kind is not noises.Common:
        least = 1e-3
      read_fields[field] = np.float32(number(f"{at}.{field}", value, least, most, hint))
  return kind(**read_fields)
