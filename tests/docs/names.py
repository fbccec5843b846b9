"""Checks Python that is shown without being run: names of jaxpace must exist, and take the
arguments they are given."""

from __future__ import annotations

import ast
import importlib
import inspect
from collections.abc import Iterator
from typing import Any

import jaxpace
from jaxpace.instrumentation.instrument import Instrumented

KNOWN: dict[str, Any] = {
    "recorder": jaxpace.Recorder, "paced": Instrumented, "control": jaxpace.Control,
    "keeper": jaxpace.Housekeeper, "watchdog": jaxpace.Watchdog}
"""What variables of these names are in all pages: methods called on them must exist."""
OURS = ("jaxpace", "configs", "experiments")
ALIASES = {"jaxpace": "jaxpace", "jax": "jax", "jnp": "jax.numpy", "np": "numpy",
           "ocp": "orbax.checkpoint"}


def wrong(code: str) -> list[str]:
  """What is wrong with a piece of Python: names of ours that don't exist, arguments that they don't
  take.

  Raises:
    SyntaxError: it is no Python.
  """
  tree = ast.parse(code)
  modules = {name: importlib.import_module(path) for name, path in ALIASES.items()}
  complaints = []
  for node in ast.walk(tree):
    if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] in OURS:
      module = importlib.import_module(node.module)
      for alias in node.names:
        try:
          value = (getattr(module, alias.name, None)
                   or importlib.import_module(f"{node.module}.{alias.name}"))
        except ImportError:
          complaints.append(f"{node.module} has no {alias.name}")
          continue
        modules[alias.asname or alias.name] = value
  for node in ast.walk(tree):
    if isinstance(node, ast.Attribute):
      found, missing = _resolve(node, modules)
      if missing:
        complaints.append(f"{ast.unparse(node)}: there is no {missing}")
    if isinstance(node, ast.Call):
      found, missing = _resolve(node.func, modules)
      if found is not None and not missing and _ours(found):
        complaints += _unbindable(found, node, bound=_root(node.func) in KNOWN)
  return complaints


def _root(node: ast.expr) -> str | None:
  while isinstance(node, ast.Attribute):
    node = node.value
  return node.id if isinstance(node, ast.Name) else None


def _resolve(node: ast.expr, modules: dict[str, Any]) -> tuple[Any, str | None]:
  """What a dotted name stands for, and the part of it that does not exist."""
  names: list[str] = []
  while isinstance(node, ast.Attribute):
    names.append(node.attr)
    node = node.value
  if not isinstance(node, ast.Name):
    return None, None
  value = modules.get(node.id, KNOWN.get(node.id) if names else None)
  if value is None:
    return None, None
  for name in reversed(names):
    if node.id in KNOWN and value is KNOWN[node.id] and name in _set_by(value):
      return None, None  # an attribute of the object
    if not hasattr(value, name):
      return None, name
    value = getattr(value, name)
  return value, None


def _set_by(kind: type) -> set[str]:
  """Attributes that the class's own code sets on `self`."""
  source = ast.parse(inspect.getsource(kind))
  return {n.attr for n in ast.walk(source) if isinstance(n, ast.Attribute)
          and isinstance(n.ctx, ast.Store)}


def _ours(value: Any) -> bool:
  return (callable(value)
          and (getattr(value, "__module__", None) or "").split(".")[0] in (
              "jaxpace", "experiments"))


def _unbindable(function: Any, call: ast.Call, bound: bool) -> Iterator[str]:
  if (any(isinstance(argument, ast.Starred) for argument in call.args)
      or any(k.arg is None for k in call.keywords)):
    return
  if any(isinstance(argument, ast.Constant) and argument.value is ... for argument in call.args):
    return
  method = bound and inspect.isfunction(function)
  try:
    inspect.signature(function).bind(*[None] * (len(call.args) + method),
                                     **{str(k.arg): None for k in call.keywords})
  except TypeError as error:
    yield f"{ast.unparse(call)}: {error}"
