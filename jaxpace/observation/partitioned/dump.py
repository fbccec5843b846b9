"""Reads what the partitioner made of a program from the compiler's own dump, as timestamps need it.

The compiler inlines calls, and two calls of one function would be two collectives under one
timestamp: so each call of a function that has collectives gets a function of its own. And widened
values are written as JAX writes them, so that the compiler simplifies them as it did before.
"""

from __future__ import annotations

import pathlib
import tempfile
import time
from typing import Any, NamedTuple

from jax.extend import mlir as extended
from jax.extend.mlir import ir

from jaxpace.core.observed import OF_OPERATION
from jaxpace.observation.partitioned import collectives, mlir, wire
from jaxpace.observation.partitioned.collectives import Found, TimestampError
from jaxpace.observation.partitioned.compiling import Request, text_of

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
  """In StableHLO, in the context of the module it was made of; each function with collectives is
  called once."""
  met: tuple[Found, ...]
  """Its collectives, as the dump's text has them."""
  compiled: str
  """Text of the program compiled unmodified."""
  seconds: float
  """What compiling it took."""


def partitioned(request: Request) -> Partitioned:
  """Compiles a program as it is, without much optimization of machine code, and reads the dump.

  Raises:
    TimestampError, WireError: the compiler left no dump that can be read.
  """
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
  called_once(module)
  rejoin(module)
  met = tuple(collectives.found_in(written, request.partitions))
  return Partitioned(module, met, text_of(executable), seconds)


def called_once(module: Any) -> None:
  """Copies functions with collectives for each call, and drops functions that nobody calls."""
  functions = mlir.functions(module)
  seen: set[str] = set()
  _visit(module, functions["main"], functions, seen, {})
  for name, function in functions.items():
    if name != "main" and name not in seen:
      function.erase()


def _visit(module: Any, function: Any, functions: dict[str, Any], seen: set[str],
           meets: dict[str, bool]) -> None:
  for op in list(mlir.operations(function)):
    if op.name != "func.call":
      continue
    name = str(ir.FlatSymbolRefAttr(op.attributes["callee"]).value)
    callee = functions[name]
    if name in seen and _meets(name, functions, meets):
      with module.context, ir.Location.unknown():
        copy = callee.clone(ip=ir.InsertionPoint(module.body))
        name = f"{name}_jaxpace{len(functions)}"
        copy.attributes["sym_name"] = ir.StringAttr.get(name)
        op.attributes["callee"] = ir.FlatSymbolRefAttr.get(name)
      callee = functions[name] = copy.operation
      meets[name] = True
    elif name in seen:
      continue
    seen.add(name)
    _visit(module, callee, functions, seen, meets)


def _meets(name: str, functions: dict[str, Any], meets: dict[str, bool]) -> bool:
  if name not in meets:
    meets[name] = False
    meets[name] = any(
        op.name in OF_OPERATION or op.name == "func.call" and _meets(
            str(ir.FlatSymbolRefAttr(op.attributes["callee"]).value), functions, meets)
        for op in mlir.operations(functions[name]))
  return meets[name]


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
