"""Makes the whole program again of what one partition runs: the same inputs, outputs, donation.

The whole module's `main` keeps its signature and its attributes (donated and aliased inputs, kinds
of memory, layouts). Its body becomes one manual computation over all partitions, laid out as the
compiler had chosen, with the partition's program in it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jax.extend.mlir import ir
from jax.extend.mlir.dialects import func, sdy

from jaxpace.observation.partitioned import mlir, shardings
from jaxpace.observation.partitioned.collectives import TimestampError

_MESH = "jaxpace_partitions"


def whole(module: Any, local: Any, partitions: int) -> Any:
  """Builds the whole program.

  Args:
    module: the program as it was lowered. It is not changed.
    local: what one partition runs, in the same context. Its functions are taken out of it.
    partitions: how many there are.

  Returns:
    A new module.

  Raises:
    TimestampError: an input or output is laid out in a way that can't be written.
  """
  new = mlir.copy(module)
  with new.context, ir.Location.unknown():
    main = mlir.functions(new)["main"]
    inner = mlir.functions(local)["main"]
    kinds = ir.FunctionType(ir.TypeAttr(main.attributes["function_type"]).value)
    inputs, outputs = list(kinds.inputs), list(kinds.results)
    laid_out = _laid_out(local, [*inputs, *outputs], len(inputs), partitions)
    for op in list(new.body.operations):
      if op.operation != main:
        op.operation.erase()
    with ir.InsertionPoint.at_block_begin(new.body):
      sdy.MeshOp(_MESH, sdy.MeshAttr.get(
          [sdy.MeshAxisAttr.get(_axis(place), size) for place, size in enumerate(laid_out.sizes)]))
    written = [_written(dims, len(laid_out.sizes)) for dims in laid_out.dims]
    _annotate(main, "arg_attrs", written[:len(inputs)])
    _annotate(main, "res_attrs", written[len(inputs):])
    _fill(main, inner, outputs, written, len(laid_out.sizes))
    for op in list(local.body.operations):
      if op.operation.name == "func.func" and op.operation != inner:
        op.operation.clone(ip=ir.InsertionPoint(new.body))
  new.operation.verify()
  return new


def _axis(place: int) -> str:
  return f"digit{place}"


def _laid_out(local: Any, kinds: Sequence[Any], inputs: int, partitions: int) -> shardings.Digits:
  attributes = local.operation.attributes
  if "mhlo.spmd_output_sharding" not in attributes:
    raise TimestampError("the compiler does not say how its outputs are laid out")
  said = [str(ir.StringAttr(each).value) for each in attributes["mhlo.spmd_parameters_shardings"]
          ] if "mhlo.spmd_parameters_shardings" in attributes else []
  results = shardings.split(str(ir.StringAttr(attributes["mhlo.spmd_output_sharding"]).value))
  if len(results) == 1:
    results = results * (len(kinds) - inputs)
  if len(said) == 1:
    said = said * inputs
  if len(said) != inputs or len(said) + len(results) != len(kinds):
    raise TimestampError(f"the compiler says how {len(said)} inputs and {len(results)} outputs are "
                        f"laid out, of {inputs} and {len(kinds) - inputs}")
  for kind in kinds:
    if "token" in str(kind):
      raise TimestampError("it has an ordered effect, such as io_callback(ordered=True)")
    if mlir.tensor(kind) is None:
      raise TimestampError(f"one of its inputs or outputs is no array, but {kind}")
  return shardings.digits(
      [shardings.tiles(text, ir.RankedTensorType(kind).rank, partitions)
       for text, kind in zip([*said, *results], kinds, strict=True)], partitions)


def _written(dims: Sequence[Sequence[int]], count: int) -> Any:
  """A value's layout over the mesh of digits; what is left is the same on all partitions."""
  used = {digit for dim in dims for digit in dim}
  return sdy.TensorShardingAttr.get(
      _MESH,
      [sdy.DimensionShardingAttr.get([sdy.AxisRefAttr.get(_axis(digit)) for digit in dim],
                                     is_closed=True) for dim in dims],
      replicated_axes=[sdy.AxisRefAttr.get(_axis(digit)) for digit in range(count)
                       if digit not in used])


def _annotate(main: Any, name: str, written: Sequence[Any]) -> None:
  if not written:
    return
  before = ([dict(_items(each)) for each in main.attributes[name]]
            if name in main.attributes else [{} for _ in written])
  for attributes, sharding in zip(before, written, strict=True):
    attributes["sdy.sharding"] = sharding
  main.attributes[name] = ir.ArrayAttr.get([ir.DictAttr.get(each) for each in before])


def _items(attribute: Any) -> list[tuple[str, Any]]:
  listed: Any = ir.DictAttr(attribute)
  return [(one.name, one.attr) for one in listed]


def _fill(main: Any, inner: Any, outputs: Sequence[Any], written: Sequence[Any],
          count: int) -> None:
  """Replaces the body of `main` by a manual computation that holds that of `inner`."""
  block = main.regions[0].blocks[0]
  for op in reversed(list(block.operations)):
    op.operation.erase()
  source = inner.regions[0].blocks[0]
  arguments = list(block.arguments)
  per_value = sdy.TensorShardingPerValueAttr.get
  with ir.InsertionPoint(block):
    manual = sdy.ManualComputationOp(
        list(outputs), arguments, per_value(list(written[:len(arguments)])),
        per_value(list(written[len(arguments):])),
        sdy.ManualAxesAttr.get([ir.StringAttr.get(_axis(place)) for place in range(count)]))
    func.ReturnOp(list(manual.operation.results))
  body = manual.body.blocks.append(*[argument.type for argument in source.arguments])
  for old, argument in zip(source.arguments, body.arguments, strict=True):
    old.replace_all_uses_with(argument)
  operations = [op.operation for op in source.operations]
  with ir.InsertionPoint(body):
    ending = sdy.ReturnOp(list(operations[-1].operands))
  # What is left behind would use values of a module that may be gone first.
  operations[-1].erase()
  for op in operations[:-1]:
    op.move_before(ending.operation)
