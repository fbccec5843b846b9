"""What timestamps are called and numbered by, and words that reading programs back needs."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
from jax.extend.mlir import ir

from jaxpace.core.observed import OF_OPERATION, TAG_BITS
from jaxpace.observation.partitioned import groups, mlir

TARGET = "jaxpace_mark"
START_TAG, END_TAG, FIRST_TAG = 0, 1, 2
# The highest two are those of the ring itself.
MOST_TAGS = (1 << TAG_BITS) - 2


class TimestampError(ValueError):
  """Timestamps can't be put into this program; the message says why, as the end of a sentence."""


class Grouped(Protocol):
  """A collective as the compiler's text has it: `collectives.Found`."""

  @property
  def kind(self) -> str: ...
  @property
  def channel(self) -> int | None: ...
  @property
  def groups(self) -> groups.Groups: ...
  @property
  def types(self) -> tuple[tuple[str, tuple[int, ...]], ...]: ...


class TimestampedCollective(NamedTuple):
  """A collective that has timestamps."""

  kind: str
  enter_tag: int
  exit_tag: int


def once(values: list[Any]) -> list[Any]:
  seen: list[Any] = []
  for value in values:
    if all(value != other for other in seen):
      seen.append(value)
  return seen


def small(kind: Any) -> int | None:
  """Elements of an array; None for what is none (tokens, dynamic shapes)."""
  tensor = mlir.tensor(kind)
  return None if tensor is None else int(np.prod(tensor.shape, dtype=np.int64))


def list_groups(op: Any, met: Sequence[Grouped]) -> None:
  """Writes groups that are axes of a mesh as lists.

  Reading a module back loses the order of a mesh's devices (jaxlib 0.10.2), and so which ranks
  meet; another module's mesh may have the same name besides.
  """
  if "replica_groups" not in op.attributes or "mesh" not in str(op.attributes["replica_groups"]):
    return
  handle = re.search(r"handle = (\d+)", str(op.attributes["channel_handle"])
                     ) if "channel_handle" in op.attributes else None
  sizes = [tuple(ir.RankedTensorType(value.type).shape) for value in op.operands]
  found = {one.groups for one in met
           if handle is not None and one.channel == int(handle[1])
           and one.kind == OF_OPERATION[op.name]
           and sorted(shape for _, shape in one.types) == sorted(sizes)}
  if len(found) != 1:
    raise TimestampError(
        f"the compiler does not say who meets in its {OF_OPERATION[op.name]} of {sizes[:3]}")
  op.attributes["replica_groups"] = mlir.rows_attribute(found.pop())


def mesh_of(mesh: Any) -> tuple[list[tuple[str, int]], np.ndarray | None]:
  """Axes of a mesh and the order of its devices, None where they are counted up."""
  said = str(mesh.attributes["mesh"])
  axes = [(name, int(size)) for name, size in re.findall(r'"([^"]+)"=(\d+)', said)]
  ids = re.search(r"device_ids=\[([\d, ]*)\]", said)
  return axes, np.array(groups.numbers(ids[1])) if ids else None
