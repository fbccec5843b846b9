"""Reads what the partitioner made of a program from the compiler's own dump, as timestamps need it.

The compiler inlines calls, and two calls of one function would be two collectives under one
timestamp: so calls of functions that have collectives are inlined here. And widened values are
written as JAX writes them, so that the compiler simplifies them as it did before.
"""

from __future__ import annotations

import pathlib
import tempfile
import time
from typing import Any, NamedTuple

import jax
from jax.extend import mlir as extended
from jax.extend.mlir import ir

from jaxpace.core.observed import OF_OPERATION
from jaxpace.observation.partitioned import collectives, mlir, wire
from jaxpace.observation.partitioned.collectives import Found, TimestampError
from jaxpace.observation.partitioned.compiling import Request

TOO_NEW = (0, 11)
"""From this jax on arrays are cut up once more that are a partition's already (tried: 0.12.0.1)."""
_BROADCAST = "stablehlo.broadcast_in_dim"
_PASS = "spmd-partitioning"
_FLAGS = {
    "xla_dump_hlo_pass_re": _PASS,
    "xla_dump_hlo_as_proto": True,
    "xla_dump_hlo_as_text": True,
    # Only code generation is made cheap; passes over the program are the same ones.
    "xla_backend_optimization_level": 0,
}


class Partitioned(NamedTuple):
  """A program as one partition runs it."""

  module: Any
  """In StableHLO, in the context of the module it was made of; all collectives are in `main`."""
  met: tuple[Found, ...]
  """Its collectives, as the dump's text has them."""
  bare: Any
  """The executable of the program compiled unmodified."""
  seconds: float
  """What compiling it took."""


def partitioned(request: Request) -> Partitioned:
  """Compiles a program as it is, without much optimization of machine code, and reads the dump.

  Raises:
    TimestampError, WireError: the compiler left no dump that can be read.
  """
  if jax.__version_info__ >= TOO_NEW:
    raise TimestampError("jax 0.10 compiles what is partitioned already as it is, and this one "
                         "does not")
  began = time.monotonic()
  with tempfile.TemporaryDirectory(prefix="jaxpace-", ignore_cleanup_errors=True) as folder:
    executable = request.compile_apart({"xla_dump_to": folder, **_FLAGS})
    seconds = time.monotonic() - began
    found = sorted(pathlib.Path(folder).glob(f"*after_{_PASS}*.hlo.pb"))
    if not found:
      raise TimestampError("the compiler left no program of a single partition")
    data = found[-1].read_bytes()
    written = found[-1].with_name(found[-1].name.removesuffix(".hlo.pb") + ".txt").read_text()
  module = ir.Module.parse(
      extended.hlo_to_stablehlo(wire.first(wire.read(data), 1)), request.module.context)
  mlir.drop_copies(module)
  inline(module)
  rejoin(module)
  met = tuple(collectives.found_in(written, request.partitions))
  return Partitioned(module, met, executable, seconds)


AS_PARTITIONED = {"xla_disable_hlo_passes": f"shardy-xla,sharding-propagation,{_PASS}"}
"""The compiler's flags for what is partitioned already: nothing is laid out anew."""
_LAYOUTS = frozenset({"sdy.sharding", "mhlo.sharding"})
_SAID = ("mhlo.spmd_parameters_shardings", "mhlo.spmd_output_sharding")
"""How inputs and outputs are laid out. Plugins of JAX's can't be handed the one: MLIR looks for the
function that it is of, in vain. By the other jaxlib 0.12 cuts outputs up once more."""


def call_alike(module: Any, whole: Any) -> None:
  """Has a partitioned module take and give as the whole program does: donated and aliased inputs,
  kinds of memory and layouts, all but what lies on which partition.

  Raises:
    TimestampError: an input or output is no array.
  """
  inner, main = (mlir.functions(one)["main"] for one in (module, whole))
  kinds = ir.FunctionType(ir.TypeAttr(main.attributes["function_type"]).value)
  for kind in (*kinds.inputs, *kinds.results):
    if "token" in str(kind):
      raise TimestampError("it has an ordered effect, such as io_callback(ordered=True)")
    if mlir.tensor(kind) is None:
      raise TimestampError(f"one of its inputs or outputs is no array, but {kind}")
  with module.context:
    for name in _SAID:
      if name in module.operation.attributes:
        del module.operation.attributes[name]
    for name in ("arg_attrs", "res_attrs"):
      if name in inner.attributes:
        del inner.attributes[name]
      if name in main.attributes:
        listed: list[Any] = [ir.DictAttr(each) for each in main.attributes[name]]
        inner.attributes[name] = ir.ArrayAttr.get([
            ir.DictAttr.get({one.name: one.attr for one in each if one.name not in _LAYOUTS})
            for each in listed])


def inline(module: Any) -> None:
  """Puts the bodies of functions that have collectives in place of their calls, and drops them."""
  functions = mlir.functions(module)
  meeting = _meeting(functions)
  main = functions["main"]
  while calls := [op for op in mlir.operations(main) if _called(op) in meeting]:
    for call in calls:
      with module.context, ir.Location.unknown():
        copy = functions[_called(call)].clone(ip=ir.InsertionPoint(module.body)).operation
      block = copy.regions[0].blocks[0]
      for argument, value in zip(block.arguments, call.operands, strict=True):
        argument.replace_all_uses_with(value)
      *body, ending = [op.operation for op in block.operations]
      for op in body:
        op.move_before(call)
      for result, value in zip(call.results, ending.operands, strict=True):
        result.replace_all_uses_with(value)
      for op in (call, ending, copy):
        op.erase()
  for name in meeting - {"main"}:
    functions[name].erase()


def _meeting(functions: dict[str, Any]) -> set[str]:
  """Names of the functions that have collectives, or call one that has."""
  found: set[str] = set()
  while more := {name for name, function in functions.items() if name not in found and any(
      op.name in OF_OPERATION or _called(op) in found for op in mlir.operations(function))}:
    found |= more
  return found


def _called(op: Any) -> str:
  """Name of the function that a call is of; empty for what is none."""
  return "" if op.name != "func.call" else str(ir.FlatSymbolRefAttr(op.attributes["callee"]).value)


def rejoin(module: Any) -> int:
  """Makes one broadcast of each three that one was taken apart into, in place; returns how many."""
  joined = 0
  with module.context, ir.Location.unknown():
    for op in list(mlir.operations(module.operation)):
      if op.name == _BROADCAST and (source := _source(op)) is not None:
        rank = ir.RankedTensorType(op.result.type).rank
        with op.location, ir.InsertionPoint(op):
          new = ir.Operation.create(
              _BROADCAST, results=[op.result.type], operands=[source],
              attributes={"broadcast_dimensions": ir.DenseI64ArrayAttr.get(list(range(rank)))})
        op.result.replace_all_uses_with(new.result)
        joined += 1
  return joined


def _source(op: Any) -> Any | None:
  """What a broadcast's value had been before it was taken apart; None where it wasn't."""
  reshape = _made_by(op.operands[0], "stablehlo.reshape")
  same = None if reshape is None else _made_by(reshape.operands[0], _BROADCAST)
  if reshape is None or same is None or same.operands[0].type != same.result.type:
    return None
  before, after = mlir.tensor(same.result.type), mlir.tensor(op.result.type)
  left = mlir.tensor(reshape.result.type)
  if before is None or after is None or left is None or before.rank != after.rank:
    return None
  kept, identity = list(_dimensions(op)), list(range(before.rank))
  if list(_dimensions(same)) != identity or [before.shape[at] for at in kept] != list(left.shape):
    return None
  widened = [at for at in identity if at not in kept]
  return same.operands[0] if all(before.shape[at] == 1 for at in widened) else None


def _made_by(value: Any, name: str) -> Any | None:
  owner = value.owner
  if isinstance(owner, ir.Block):
    return None
  operation = owner.operation if hasattr(owner, "operation") else owner
  return operation if operation.name == name else None


def _dimensions(op: Any) -> list[int]:
  listed: Any = ir.DenseI64ArrayAttr(op.attributes["broadcast_dimensions"])
  return [int(one) for one in listed]
