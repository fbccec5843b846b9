"""Puts timestamps for GPUs into a partitioned program: kernels on the stream, which stay in CUDA
  graphs.

A timestamp hands on what it stands before or after, its memory aliased, so that order is kept by
data. Layouts are pinned, row-major: left open, XLA may choose different ones for the two ends of
one piece of memory, and the numbers are scrambled. A stream runs kernels in the order of the
compiler's schedule, so the start timestamp must hold back what the step computes from; each
timestamp is given the block that says where events of its device go; and the compiler still makes
reduce-scatters of all-reduces that are cut right away, so nothing may come between those.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import Any

from jax.extend.mlir import ir
from jax.extend.mlir.dialects import stablehlo

from jaxpace.core.observed import OF_OPERATION
from jaxpace.core.ring_layout import END_TAG, FIRST_TAG, NUMBER, START_TAG
from jaxpace.observation.clocks import kernels
from jaxpace.observation.partitioned import mlir
from jaxpace.observation.partitioned.collectives import Found, TimestampError

_MOST_HELD = 64 << 20
"""Bytes of an input that the start timestamp may hold back: where it isn't donated, it is
  copied."""
_HEAVY = frozenset({
    *OF_OPERATION, "stablehlo.dot_general", "stablehlo.convolution", "stablehlo.while",
    "stablehlo.case", "stablehlo.if", "stablehlo.custom_call", "func.call"})
_MOVES = frozenset({"stablehlo.reshape", "stablehlo.transpose"})


def put_timestamps(module: Any, program: int,
                   met: Sequence[Found]) -> list[tuple[int, int]]:
  """Puts timestamps into a partitioned module, in place.

  Args:
    module: what one partition runs, in StableHLO, without functions called twice for one
      collective.
    program: number that its timestamps carry.
    met: its collectives, as the compiler's text has them.

  Returns:
    Tags of the enter and the exit timestamp of each collective, in the order of the module's text.

  Raises:
    TimestampError: it has collectives that can't be marked.
  """
  main = mlir.functions(module)["main"]
  block = main.regions[0].blocks[0]
  found = [op for op in mlir.operations(module.operation) if op.name in OF_OPERATION]
  with module.context, ir.Location.unknown():
    for op in found:
      _list_groups(op, met)
  if not found:
    return []
  if FIRST_TAG + 2 * len(found) > NUMBER:
    raise TimestampError(f"it has {len(found)} collectives, more than tags can number")
  marked: list[tuple[int, int]] = []
  exits: list[tuple[Any, int, Any]] = []
  with module.context, ir.Location.unknown():
    buffers = _buffers(module, _begin(block, program))
    for place, op in enumerate(found):
      enter, leave = FIRST_TAG + 2 * place, FIRST_TAG + 2 * place + 1
      buffer, operands = buffers[_function(op)], list(op.operands)
      with ir.InsertionPoint(op):
        for at, value in enumerate(_mark(program, enter, operands, [], buffer)):
          op.operands[at] = value
      last = _kept_with(op)
      shared = [tag for other, tag, _ in exits if other == last]
      if shared:
        leave = shared[0]
      else:
        exits.append((last, leave, buffer))
      marked.append((enter, leave))
    # After all enter timestamps, so that what follows a collective was looked at as it was.
    for last, leave, buffer in exits:
      _after(last, program, leave, buffer)
    _end(block, program, buffers["main"])
  return marked


def _list_groups(op: Any, met: Sequence[Found]) -> None:
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


def _begin(block: Any, program: int) -> Any:
  """The first operations: the device's block, and the start timestamp, which hands it on."""
  held = _held(block)
  with ir.InsertionPoint.at_block_begin(block):
    buffer = _buffer()
    values = [buffer.result] if held is None else [buffer.result, held]
    start = _launch(kernels.mark(program, START_TAG, 0, 2 * len(values)), values, len(values))
  if held is not None:
    held.replace_all_uses_except(start.results[1], start)
  return start.results[0]


def _buffer() -> Any:
  """The call that gives the program its device's block."""
  words = ir.RankedTensorType.get([kernels.BLOCK_WORDS], ir.IntegerType.get_unsigned(32))
  return ir.Operation.create(
      "stablehlo.custom_call", results=[words], operands=[], attributes={
          "call_target_name": ir.StringAttr.get(kernels.DEVICE_BUFFER),
          "api_version": mlir.integer(4),
          "has_side_effect": ir.BoolAttr.get(False), "backend_config": ir.DictAttr.get({}),
          "operand_layouts": mlir.layouts([]), "result_layouts": mlir.layouts([words])})


def _mark(program: int, tag: int, values: list[Any], waited: list[Any], block: Any) -> list[Any]:
  """A timestamp; returns the values it hands on.

  Raises:
    TimestampError: there are more values than a kernel takes.
  """
  if len(values) > kernels.MOST_OPERANDS // 2:
    raise TimestampError(f"one of its collectives has {len(values)} arrays, and a kernel takes "
                        f"{kernels.MOST_OPERANDS // 2}")
  # What there is no room for is waited for by kernels of its own.
  room = kernels.MOST_OPERANDS - len(values)
  while len(waited) > room:
    lot, waited = waited[:room], waited[room:]
    passed = _launch(kernels.wait(len(lot) + 2), [block, *lot], 1)
    block = passed.results[0]
  operands = [*values, *waited, block]
  kernel = kernels.mark(program, tag, len(operands) - 1, len(operands) + len(values))
  return list(_launch(kernel, operands, len(values)).results)


def _launch(kernel: kernels.Kernel, operands: list[Any], handed_on: int) -> Any:
  """A kernel that hands its first operands on in their own memory."""
  results = [value.type for value in operands[:handed_on]]
  aliases = [stablehlo.OutputOperandAlias.get(
      output_tuple_indices=[] if handed_on == 1 else [place], operand_index=place,
      operand_tuple_indices=[]) for place in range(handed_on)]
  return ir.Operation.create(
      "stablehlo.custom_call", results=results, operands=operands, attributes={
          "call_target_name": ir.StringAttr.get(kernels.TARGET), "api_version": mlir.integer(4),
          "has_side_effect": ir.BoolAttr.get(False),
          "backend_config": ir.DictAttr.get({
              "name": ir.StringAttr.get(kernel.name), "kernel_type": ir.StringAttr.get("ptx"),
              "kernel_data": ir.StringAttr.get(kernel.text),
              "shared_mem_bytes": mlir.integer(0),
              **dict.fromkeys(kernels.ONE_THREAD, mlir.integer(1))}),
          "output_operand_aliases": ir.ArrayAttr.get(aliases),
          "operand_layouts": mlir.layouts([value.type for value in operands]),
          "result_layouts": mlir.layouts(results)})


def _after(op: Any, program: int, tag: int, block: Any) -> None:
  """A timestamp over all results of an operation."""
  following = list(op.block.operations)
  place = next(at for at, other in enumerate(following) if other.operation == op) + 1
  results = list(op.results)
  with ir.InsertionPoint(following[place]):
    handed_on = _mark(program, tag, results, [], block)
  mark = handed_on[0].owner.operation
  for result, new in zip(results, handed_on, strict=True):
    result.replace_all_uses_except(new, mark)


def _kept_with(op: Any) -> Any:
  """What the exit timestamp follows: the last operation that the compiler joins with a collective,
  or it.

  It makes one all-reduce of the sum of several, a reduce-scatter of one that is cut, and it moves
  changes of type to where fewer bytes are sent. A timestamp between them would keep it from that.
  """
  now, found = op, op
  while len(now.results) == 1:
    uses = list(now.result.uses)
    if len(uses) != 1:
      break
    user = uses[0].owner.operation
    if user.block != op.block:
      break
    if user.name == "stablehlo.add" and all(_summed(value) for value in user.operands):
      found = user
    elif user.name == "stablehlo.dynamic_slice" and op.name == "stablehlo.all_reduce":
      return user
    elif user.name == "stablehlo.convert":
      found = user
    elif user.name not in _MOVES:
      break
    now = user
  return found


def _summed(value: Any) -> bool:
  """Whether a value is an all-reduce, or a sum of some, of which nothing else is used."""
  if isinstance(value.owner, ir.Block) or len(list(value.uses)) != 1:
    return False
  op = value.owner.operation if hasattr(value.owner, "operation") else value.owner
  if op.name == "stablehlo.all_reduce":
    return len(op.results) == 1
  if op.name in ("stablehlo.add", *_MOVES, "stablehlo.convert"):
    return all(_summed(each) for each in op.operands)
  return False


def _end(block: Any, program: int, buffer: Any) -> None:
  """An end timestamp, which waits for all results."""
  ending = list(block.operations)[-1].operation
  results = list(ending.operands)
  kinds = {place: kind for place, value in enumerate(results)
           if (kind := mlir.tensor(value.type)) is not None}
  if not kinds:
    raise TimestampError("it returns no arrays, so its end can't be marked")
  value = results[min(kinds, key=lambda place: math.prod(kinds[place].shape))]
  others: list[Any] = []
  for other in (results[place] for place in kinds):
    if other != value and all(other != one for one in others):
      others.append(other)
  with ir.InsertionPoint(ending):
    end = _mark(program, END_TAG, [value], others, buffer)
  for place in kinds:
    if results[place] == value:
      ending.operands[place] = end[0]


def _function(op: Any) -> str:
  """Name of the function that an operation is in."""
  while op.name != "func.func":
    op = op.parent.operation
  return mlir.text_attribute(op, "sym_name")


def _buffers(module: Any, buffer: Any) -> dict[str, Any]:
  """The device's block in each function that has collectives, or calls one that has: one argument
  more."""
  functions = mlir.functions(module)
  buffers = {"main": buffer}

  def visit(name: str) -> bool:
    """Whether it is needed in a function, after it was seen to in those that are called."""
    needed = False
    for op in list(mlir.operations(functions[name])):
      if op.name in OF_OPERATION:
        needed = True
      elif op.name == "func.call":
        called = str(ir.FlatSymbolRefAttr(op.attributes["callee"]).value)
        if called in buffers:
          continue
        buffers[called] = None
        if visit(called):
          calls.append((name, op, called))
          needed = True
    return needed

  calls: list[tuple[str, Any, str]] = []
  visit("main")
  # The outermost first.
  for name, op, called in reversed(calls):
    function = functions[called]
    kind = ir.FunctionType(ir.TypeAttr(function.attributes["function_type"]).value)
    function.attributes["function_type"] = ir.TypeAttr.get(
        ir.FunctionType.get([*kind.inputs, buffer.type], list(kind.results)))
    if "arg_attrs" in function.attributes:
      function.attributes["arg_attrs"] = ir.ArrayAttr.get(
          [*function.attributes["arg_attrs"], ir.DictAttr.get({})])
    buffers[called] = function.regions[0].blocks[0].add_argument(buffer.type, ir.Location.unknown())
    with op.location, ir.InsertionPoint(op):
      new = ir.Operation.create(
          "func.call", results=[value.type for value in op.results],
          operands=[*op.operands, buffers[name]],
          attributes={each: op.attributes[each] for each in _names(op)})
    for old, result in zip(op.results, new.results, strict=True):
      old.replace_all_uses_with(result)
    op.erase()
  return buffers


def _names(op: Any) -> list[str]:
  return [str(each if isinstance(each, str) else each.name) for each in op.attributes]


# What the start timestamp holds back.


def _held(block: Any) -> Any | None:
  """The input that most of the work is computed from; None where there is none of a bounded
  size."""
  best: tuple[int, int] | None = None
  chosen = None
  reached = _reached(block)
  for place, argument in enumerate(block.arguments):
    size = _bytes(argument.type)
    count = sum(place in each for each in reached)
    if size is None or size > _MOST_HELD or not count:
      continue
    if best is None or (count, -size) > best:
      best, chosen = (count, -size), argument
  return chosen


def _reached(block: Any) -> list[set[int]]:
  """For each operation that is work in itself the places of the inputs it is computed from."""
  known: dict[Any, set[int]] = {
      argument: {place} for place, argument in enumerate(block.arguments)}
  reached = []
  for op in block.operations:
    sources: set[int] = set()
    for value in _read(op.operation):
      sources |= known.get(value, set())
    for result in op.operation.results:
      known[result] = sources
    if op.operation.name in _HEAVY:
      reached.append(sources)
  return reached


def _read(op: Any) -> list[Any]:
  """Values an operation reads, those that its regions take from outside too."""
  return [*op.operands, *(value for inside in mlir.operations(op) for value in inside.operands)]


def _bytes(kind: Any) -> int | None:
  tensor = mlir.tensor(kind)
  if tensor is None:
    return None
  try:
    bits = int(ir.IntegerType(tensor.element_type).width)
  except ValueError:
    # Floats of 4 bytes, or less.
    bits = 32
  return math.prod(tensor.shape) * max(bits, 8) // 8
