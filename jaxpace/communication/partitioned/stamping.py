"""Puts marks into a partitioned program: one at its start, around each collective, and at its end.

A mark hands its operands on, their memory aliased, so that what is marked neither moves nor waits
for anything new; only what it stands between is kept in order. Layouts of operands and results are
pinned, row-major: left open, XLA may choose different ones for the two ends of one piece of memory,
and the numbers are scrambled.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
from jax.extend.mlir import ir
from jax.extend.mlir.dialects import stablehlo

from jaxpace.communication.partitioned import groups, mlir
from jaxpace.core.kinds import OF_OPERATION
from jaxpace.core.observed import TAG_BITS

TARGET = "jaxpace_mark"
START_TAG, END_TAG, FIRST_TAG = 0, 1, 2
# The highest two are those of the ring itself.
MOST_TAGS = (1 << TAG_BITS) - 2


class StampingError(ValueError):
  """Marks can't be put into this program; the message says why, as the end of a sentence."""


class Met(Protocol):
  """A collective as the compiler's text has it: `collectives.Found`."""

  @property
  def kind(self) -> str: ...
  @property
  def channel(self) -> int | None: ...
  @property
  def groups(self) -> groups.Groups: ...
  @property
  def types(self) -> tuple[tuple[str, tuple[int, ...]], ...]: ...


class MarkedCollective(NamedTuple):
  """A collective that has marks."""

  kind: str
  enter_tag: int
  exit_tag: int


def stamp(module: Any, program: int, met: Sequence[Met]) -> list[MarkedCollective]:
  """Puts marks into a partitioned module, in place.

  Args:
    module: what one partition runs, in StableHLO, its `main` without private functions called
      twice for one collective.
    program: number that its marks carry.
    met: its collectives, as the compiler's text has them.

  Returns:
    What has marks, in the order of the module's text.

  Raises:
    StampingError: it has more collectives than there are tags, or none.
  """
  main = mlir.functions(module)["main"]
  found = [op for op in mlir.operations(module.operation) if op.name in OF_OPERATION]
  with module.context, ir.Location.unknown():
    for op in found:
      list_groups(op, met)
  if not found:
    return []
  if FIRST_TAG + 2 * len(found) > MOST_TAGS:
    raise StampingError(f"it has {len(found)} collectives, more than can be told apart")
  marked = []
  with module.context, ir.Location.unknown():
    for place, op in enumerate(found):
      enter, leave = FIRST_TAG + 2 * place, FIRST_TAG + 2 * place + 1
      _around(op, program, enter, leave)
      marked.append(MarkedCollective(OF_OPERATION[op.name], enter, leave))
    _ends(main, program)
  return marked


def _mark(program: int, tag: int, values: list[Any], waited: list[Any], results: list[Any]) -> Any:
  operands = [*values, *waited]
  aliases = [stablehlo.OutputOperandAlias.get(
      output_tuple_indices=[] if len(results) == 1 else [place], operand_index=place,
      operand_tuple_indices=[]) for place in range(len(values))]
  return ir.Operation.create(
      "stablehlo.custom_call", results=results, operands=operands, attributes={
          "call_target_name": ir.StringAttr.get(TARGET),
          # Typed FFI.
          "api_version": mlir.integer(4),
          "has_side_effect": ir.BoolAttr.get(False),
          "backend_config": ir.DictAttr.get({
              "program": mlir.integer(program), "tag": mlir.integer(tag),
              "values": mlir.integer(len(values))}),
          "output_operand_aliases": ir.ArrayAttr.get(aliases),
          "operand_layouts": mlir.layouts([value.type for value in operands]),
          "result_layouts": mlir.layouts(results)})


def _around(op: Any, program: int, enter: int, leave: int) -> None:
  """Marks before and after a collective, each over all of its operands or results."""
  values = list(op.operands)
  with ir.InsertionPoint(op):
    before = _mark(program, enter, values, [], [value.type for value in values])
  for place, result in enumerate(before.results):
    op.operands[place] = result
  block = list(op.block.operations)
  following = next(place for place, other in enumerate(block) if other.operation == op) + 1
  results = list(op.results)
  with ir.InsertionPoint(block[following]):
    after = _mark(program, leave, results, [], [result.type for result in results])
  for result, handed_on in zip(results, after.results, strict=True):
    result.replace_all_uses_except(handed_on, after)


def _ends(main: Any, program: int) -> None:
  """A start mark, and an end mark that all results are waited for by."""
  block = main.regions[0].blocks[0]
  ending = list(block.operations)[-1].operation
  results = list(ending.operands)
  # What is handed on is the smallest: XLA may have to copy it.
  places = [place for place, value in enumerate(results) if small(value.type) is not None]
  if not places:
    raise StampingError("it returns no arrays, so its end can't be marked")
  smallest = min(places, key=lambda place: small(results[place].type) or 0)
  word = ir.RankedTensorType.get([], ir.IntegerType.get_unsigned(32))
  first = _first_marks(block)
  with ir.InsertionPoint.at_block_begin(block):
    start = _mark(program, START_TAG, [], [], [word])
  # The start is waited for by each collective that waits for no other one, and at the end: so it
  # is kept, and they come after it. One in a loop can't wait for what is outside of it.
  for mark in first:
    _wait_too(mark, start.result)
  with ir.InsertionPoint(ending):
    value = results[smallest]
    others = [results[place] for place in places
              if place != smallest and results[place] != value]
    end = _mark(program, END_TAG, [value], [start.result, *once(others)], [value.type])
  for place in places:
    if results[place] == value:
      ending.operands[place] = end.result


def _first_marks(block: Any) -> list[Any]:
  """Marks of a block that depend on no other one."""
  first, after = [], set()
  for each in list(block.operations):
    op = each.operation
    marked, depends = _tag(op) is not None, any(value in after for value in op.operands)
    if marked and not depends:
      first.append(op)
    if marked or depends:
      after.update(op.results)
  return first


def _wait_too(op: Any, word: Any) -> None:
  """Replaces a mark by the same one that waits for another word."""
  config = ir.DictAttr(op.attributes["backend_config"])
  program, tag = (ir.IntegerAttr(config[name]).value for name in ("program", "tag"))
  with ir.InsertionPoint(op):
    new = _mark(program, tag, list(op.operands), [word], [result.type for result in op.results])
  for old, result in zip(op.results, new.results, strict=True):
    old.replace_all_uses_with(result)
  op.erase()


def once(values: list[Any]) -> list[Any]:
  seen: list[Any] = []
  for value in values:
    if all(value != other for other in seen):
      seen.append(value)
  return seen


def _tag(op: Any) -> int | None:
  if op.name != "stablehlo.custom_call" or mlir.text_attribute(op, "call_target_name") != TARGET:
    return None
  return int(ir.IntegerAttr(ir.DictAttr(op.attributes["backend_config"])["tag"]).value)


def small(kind: Any) -> int | None:
  """Elements of an array; None for what is none (tokens, dynamic shapes)."""
  tensor = mlir.tensor(kind)
  return None if tensor is None else int(np.prod(tensor.shape, dtype=np.int64))


def list_groups(op: Any, met: Sequence[Met]) -> None:
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
    raise StampingError(
        f"the compiler does not say who meets in its {OF_OPERATION[op.name]} of {sizes[:3]}")
  op.attributes["replica_groups"] = mlir.rows_attribute(found.pop())


def mesh_of(mesh: Any) -> tuple[list[tuple[str, int]], np.ndarray | None]:
  """Axes of a mesh and the order of its devices, None where they are counted up."""
  said = str(mesh.attributes["mesh"])
  axes = [(name, int(size)) for name, size in re.findall(r'"([^"]+)"=(\d+)', said)]
  ids = re.search(r"device_ids=\[([\d, ]*)\]", said)
  return axes, np.array(groups.numbers(ids[1])) if ids else None
