"""Which recorded ranks synchronise with each other: those along the data axis of the mesh."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

_MOST = 1 << 20
"""Devices of a mesh that is believed."""


def groups(info: dict[str, Any], ranks: int) -> np.ndarray | None:
  """Lays the recorded ranks (devices of the mesh, in its order) out by data axis.

  Args:
    info: `run.json`.
    ranks: recorded ranks.

  Returns:
    [groups, R] int64: in each row the devices along the data axis, by their index along it; rows
    differ in the place along the mesh's other axes. None where `run.json` does not tell.
  """
  found = laid_out(info)
  if found is not None and found.size == ranks:
    return found
  plan = info.get("plan")
  declared = plan.get("ranks") if isinstance(plan, dict) else None
  return np.arange(ranks)[None] if declared in (None, ranks) else None


def laid_out(info: dict[str, Any], axis: Sequence[str] | None = None) -> np.ndarray | None:
  """Lays all devices of the mesh out by some of its axes.

  Args:
    info: `run.json`.
    axis: names of the axes; by default those in the run's settings.

  Returns:
    [groups, R] int64 as `groups` does, of the whole mesh; None where mesh or axis are not told.
  """
  settings = info.get("settings")
  mesh = settings.get("mesh") if isinstance(settings, dict) else None
  if axis is None:
    axis = settings.get("axis") if isinstance(settings, dict) else None
  if isinstance(axis, str):
    axis = axis.split(",")
  if not isinstance(mesh, dict) or not mesh or not isinstance(axis, list | tuple) or not axis:
    return None
  if not all(isinstance(size, int) and 0 < size <= _MOST for size in mesh.values()):
    return None
  size = math.prod(mesh.values())
  if (size > _MOST or not all(isinstance(name, str) and name in mesh for name in axis)
      or len(set(axis)) < len(axis)):
    return None
  names = list(mesh)
  others = [place for place, name in enumerate(names) if name not in axis]
  order = others + [names.index(name) for name in axis]
  along = math.prod(mesh[name] for name in axis)
  return np.arange(size).reshape(tuple(mesh.values())).transpose(order).reshape(-1, along)
