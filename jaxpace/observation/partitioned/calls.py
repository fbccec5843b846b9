"""Gives each call of a function that has collectives a function of its own.

The compiler inlines calls: two calls of one function would be two collectives under one timestamp.
"""

from __future__ import annotations

from typing import Any

from jax.extend.mlir import ir

from jaxpace.core.observed import OF_OPERATION
from jaxpace.observation.partitioned import mlir

# Writes widened values as JAX writes them, so that the compiler simplifies them as it did before.

_BROADCAST = "stablehlo.broadcast_in_dim"


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
