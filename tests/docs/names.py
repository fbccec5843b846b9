"""Checks Python of the pages where it is not run, as in functions that nobody calls: names of
modules must exist, and what is ours take the arguments it is given."""

from __future__ import annotations

import ast
import importlib
import inspect
from typing import Any

OURS = ("jaxpace", "configs", "experiments")
ALIASES = {"jaxpace": "jaxpace", "jax": "jax", "jnp": "jax.numpy", "np": "numpy",
           "ocp": "orbax.checkpoint"}


def wrong(code: str) -> list[str]:
  """What is wrong with a piece of Python: names that don't exist, arguments that ours don't take.

  Raises:
    SyntaxError: it is no Python.
  """
  tree = ast.parse(code)
  known = {name: importlib.import_module(path) for name, path in ALIASES.items()}
  complaints = []
  for node in ast.walk(tree):
    try:
      if isinstance(node, ast.ImportFrom) and _is_ours(node.module):
        known |= {alias.asname or alias.name: _imported(str(node.module), alias.name)
                  for alias in node.names}
    except ImportError as error:
      complaints.append(str(error))
  for node in ast.walk(tree):
    try:
      if isinstance(node, ast.Attribute):
        _value(node, known)
      elif isinstance(node, ast.Call):
        _bind(_value(node.func, known), node)
    except (AttributeError, TypeError) as error:
      complaints.append(f"{ast.unparse(node)}: {error}")
  return complaints


def _is_ours(module: str | None) -> bool:
  return (module or "").split(".")[0] in OURS


def _imported(module: str, name: str) -> Any:
  """What `from module import name` gives; ImportError where it gives nothing."""
  found = getattr(importlib.import_module(module), name, None)
  return importlib.import_module(f"{module}.{name}") if found is None else found


def _value(node: ast.expr, known: dict[str, Any]) -> Any:
  """What a dotted name stands for, None where nobody knows; AttributeError where a part of it does
  not exist."""
  if isinstance(node, ast.Attribute):
    owner = _value(node.value, known)
    return None if owner is None else getattr(owner, node.attr)
  return known.get(node.id) if isinstance(node, ast.Name) else None


def _bind(function: Any, call: ast.Call) -> None:
  """TypeError where a function of ours does not take these arguments; dots stand for some."""
  if not callable(function) or not _is_ours(getattr(function, "__module__", None)):
    return
  if any(isinstance(each, ast.Starred) or getattr(each, "value", 0) is ... for each in call.args):
    return
  named = {each.arg: None for each in call.keywords}
  if None not in named:
    inspect.signature(function).bind(*call.args, **named)
