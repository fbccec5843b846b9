"""Gives each call of a function that has collectives a function of its own.

The compiler inlines calls: two calls of one function would be two collectives under one mark.
"""

from __future__ import annotations

from typing import Any

from jax.extend.mlir import ir

from jaxpace.core.kinds import OF_OPERATION
from jaxpace.observation.partitioned import mlir


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
