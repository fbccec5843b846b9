"""Which recorded ranks synchronise with each other: those along the data axis of the mesh."""

from __future__ import annotations

import math
from typing import Any

import numpy as np


def groups(info: dict[str, Any], ranks: int) -> np.ndarray | None:
  """Lays the recorded ranks (devices of the mesh, in its order) out by data axis.

  Args:
    info: `run.json`.
    ranks: recorded ranks.

  Returns:
    [groups, R] int64: in each row the devices along the data axis, by their index along it; rows differ in the place
    along the mesh's other axes. None where `run.json` does not tell.
  """
  settings = info.get("settings")
  mesh = settings.get("mesh") if isinstance(settings, dict) else None
  axis = settings.get("axis") if isinstance(settings, dict) else None
  if isinstance(mesh, dict) and mesh and all(isinstance(size, int) and size > 0 for size in mesh.values()):
    named = isinstance(axis, list) and axis and all(name in mesh for name in axis)
    if named and math.prod(mesh.values()) == ranks:
      assert isinstance(axis, list)
      names = list(mesh)
      others = [place for place, name in enumerate(names) if name not in axis]
      order = others + [names.index(name) for name in axis]
      along = math.prod(mesh[name] for name in axis)
      return np.arange(ranks).reshape(tuple(mesh.values())).transpose(order).reshape(-1, along)
  plan = info.get("plan")
  declared = plan.get("ranks") if isinstance(plan, dict) else None
  return np.arange(ranks)[None] if declared in (None, ranks) else None
