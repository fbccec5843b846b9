"""What a lowered program says: text attributes, and its mesh."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
from jax.extend.mlir import ir

from jaxpace.observation.partitioned import groups


def text_attribute(operation: Any, name: str, default: str = "") -> str:
  """A string attribute, or `default` where there is none."""
  if name not in operation.attributes:
    return default
  return str(ir.StringAttr(operation.attributes[name]).value)


def mesh_of(module: Any) -> tuple[list[tuple[str, int]], np.ndarray | None]:
  """The mesh that a lowered program's arrays are laid out over: the one with the most axes.

  Returns:
    Names and sizes of its axes, slowest first, () without a mesh; and its partitions in that order,
    None where they are counted up.
  """
  best: tuple[list[tuple[str, int]], np.ndarray | None] = [], None
  for op in module.body.operations:
    if op.operation.name.endswith(".mesh"):
      said = str(op.operation.attributes["mesh"])
      axes = [(name, int(size)) for name, size in re.findall(r'"([^"]+)"=(\d+)', said)]
      ids = re.search(r"device_ids=\[([\d, ]*)\]", said)
      if len(axes) > len(best[0]):
        best = axes, np.array(groups.numbers(ids[1])) if ids else None
  return best
