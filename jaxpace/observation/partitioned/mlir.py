"""Small words for reading and writing the compiler's modules: walking, attributes, parsing."""

from __future__ import annotations

import io
import re
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from jax.extend.mlir import ir

from jaxpace.observation.partitioned import groups


def operations(operation: Any) -> Iterator[Any]:
  """Yields what is in an operation's regions, each before what is inside it."""
  for region in operation.regions:
    for block in region.blocks:
      for inside in list(block.operations):
        yield inside.operation
        yield from operations(inside.operation)


def text_attribute(operation: Any, name: str, default: str = "") -> str:
  """A string attribute, or `default` where there is none."""
  if name not in operation.attributes:
    return default
  return str(ir.StringAttr(operation.attributes[name]).value)


def copy(module: Any) -> Any:
  """A module of its own with the same content, in the same context."""
  written = io.BytesIO()
  module.operation.write_bytecode(written)
  return ir.Module.parse(written.getvalue(), module.context)


def functions(module: Any) -> dict[str, Any]:
  """A module's functions by name."""
  return {text_attribute(op.operation, "sym_name"): op.operation for op in module.body.operations
          if op.operation.name == "func.func"}


def drop_copies(module: Any) -> None:
  """Takes out copies of values, which the GPU's compiler puts in early and StableHLO has no word
  for."""
  for op in list(operations(module.operation)):
    if op.name == "mhlo.copy":
      op.result.replace_all_uses_with(op.operands[0])
      op.erase()


def integer(value: int) -> Any:
  return ir.IntegerAttr.get(ir.IntegerType.get_signless(32), value)


def rows_attribute(rows: Sequence[Sequence[int]]) -> Any:
  """A dense attribute of 64-bit integers."""
  numbers: Any = np.ascontiguousarray(rows, dtype=np.int64)
  return ir.DenseIntElementsAttr.get(numbers)


def layouts(types: Sequence[Any]) -> Any:
  """Row-major layouts of values of these types."""
  def row_major(kind: Any) -> Any:
    rank = ir.RankedTensorType(kind).rank
    order: Any = np.arange(rank, dtype=np.int64)[::-1].copy()
    return ir.DenseIntElementsAttr.get(order, type=ir.IndexType.get())
  return ir.ArrayAttr.get([row_major(kind) for kind in types])


def tensor(kind: Any) -> Any | None:
  """A type as that of an array of known sizes; None where it is none."""
  try:
    found = ir.RankedTensorType(kind)
  except ValueError:
    return None
  return found if found.has_static_shape else None


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
