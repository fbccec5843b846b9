"""Makes the pacer that a command line names, without evaluating it as Python."""

from __future__ import annotations

import ast
import importlib
import operator
import re
import sys
from collections.abc import Callable
from typing import Any

from jaxpace.core.types import Balancer, Pacer
from jaxpace.files import UserError

_OWN = re.compile(r"^([A-Za-z_][\w.]*):([A-Za-z_]\w*)(\(.*\))?$", re.DOTALL)
_BALANCER = "such as 'share_by_speed(total_micro_batches=32, capacity=16)'"
_EXAMPLE = "such as 'pace_early_ranks(window=64, threshold=0.05)'"
SWITCH = "--pacer-from"
"""The one switch that lets a command line name a module, which is imported and so run."""
_ON_THE_HOST = ("balance", "fit_costs")
"""What the layer has besides: nothing that decides in a step."""
_LONGEST, _MOST_RANKS = 10_000, 2**20
_SIGNS: dict[type, Callable[[Any], Any]] = {ast.USub: operator.neg, ast.UAdd: operator.pos}


class ExpressionError(UserError, ValueError):
  """The expression names no pacer: a sentence that says what is wrong."""


def factories() -> dict[str, Callable[..., Any]]:
  """Pacer factories and combinators among jaxpace's public names."""
  import jaxpace
  return {name: getattr(jaxpace, name) for name, home in jaxpace._HOMES.items()
          if home.startswith("coordination.") and name[0].islower() and name not in _ON_THE_HOST}


def make(text: str) -> Pacer:
  """Makes a pacer of an expression: data, which may come from a file. Nothing is imported for it,
  whatever it says.

  Calls of jaxpace's own factories with literals, `range(...)` and further calls, e.g.
  `chain(pace_early_ranks(), limit(pace_early_ranks(), 5e-3))`.

  >>> make("limit(pace_early_ranks(window=16), 5e-3)").init(2).active
  Array(False, dtype=bool)

  Args:
    text: the expression.

  Raises:
    ExpressionError: it isn't such an expression, or it makes no pacer.
  """
  if _OWN.match(text.strip()):
    raise ExpressionError(f"{text!r} would import a module, and so run it; a file or a setting "
                          f"can't have that done. On the command line {SWITCH} does it.")
  return _pacer(_value(_parsed(text.strip(), text, f"Give a pacer, {_EXAMPLE}.")), text)


def make_balancer(text: str) -> Balancer:
  """Makes a balancer of an expression, as `make`: `share_by_speed(total_micro_batches=32,
  capacity=16)`.

  Raises:
    ExpressionError: it isn't such an expression, or it makes no balancer.
  """
  made = _value(_parsed(text.strip(), text, f"Give a balancer, {_BALANCER}."))
  if not isinstance(made, Balancer):
    raise ExpressionError(
        f"{text!r} makes a {type(made).__name__}, not a Balancer. Give one, {_BALANCER}.")
  return made


def import_pacer(text: str) -> Pacer:
  """Imports `module:attribute`, a pacer of the user's or a factory of one, which may be called with
  literals.

  Only for what somebody wrote on the command line behind `SWITCH`. The module is looked for in the
  current directory too.

  Args:
    text: such as `my_pacers:careful(rate=0.1)`.

  Raises:
    ExpressionError: it names none, the module can't be imported, or it makes no pacer.
  """
  own = _OWN.match(text.strip())
  if not own:
    raise ExpressionError(f"{SWITCH} takes MODULE:ATTRIBUTE, such as "
                          f"'my_pacers:careful(rate=0.1)', not {text!r}. A pacer of jaxpace is "
                          "given without that switch.")
  module, attribute, call = own.groups()
  return _pacer(_from_module(module, attribute, _arguments(call) if call else None), text)


def _parsed(source: str, text: str, hint: str) -> ast.expr:
  if len(source) > _LONGEST:
    raise ExpressionError(
        f"a pacer's expression has {len(source):,} characters; at most {_LONGEST:,} are "
        f"read. {hint}")
  shown = repr(text if len(text) < 200 else f"{text[:200]}...")
  try:
    parsed = ast.parse(source, mode="eval").body
    ast.unparse(parsed)  # what is said of a part of it later is no deeper
  except (SyntaxError, ValueError) as error:
    raise ExpressionError(f"{shown} is not an expression: {error.args[0]}. {hint}") from error
  except (RecursionError, MemoryError) as error:
    raise ExpressionError(f"{shown} is nested too deeply. {hint}") from error
  return parsed


def _pacer(made: Any, text: str) -> Pacer:
  if not isinstance(made, Pacer) and callable(made):
    made = _called(made, [], {}, text)
  if not isinstance(made, Pacer):
    raise ExpressionError(
        f"{text!r} makes a {type(made).__name__}, not a Pacer. Give one, {_EXAMPLE}.")
  return made


def _from_module(module: str, attribute: str,
                 arguments: tuple[list[Any], dict[str, Any]] | None) -> Any:
  if "" not in sys.path and "." not in sys.path:
    sys.path.insert(0, "")
  try:
    found = getattr(importlib.import_module(module), attribute)
  except Exception as error:
    raise ExpressionError(f"{module}:{attribute} can't be imported: {type(error).__name__}: "
                          f"{error}. The module must be importable from here, and have that "
                          "attribute.") from error
  return found if arguments is None else _called(found, *arguments, f"{module}:{attribute}")


def _arguments(call: str) -> tuple[list[Any], dict[str, Any]]:
  tree = _parsed(f"f{call}", call, "Give arguments, such as '(rate=0.1)'.")
  if not isinstance(tree, ast.Call) or not isinstance(tree.func, ast.Name):
    raise ExpressionError(f"{call!r} is not the arguments of one call.")
  return _given(tree)


def _given(call: ast.Call) -> tuple[list[Any], dict[str, Any]]:
  if (any(isinstance(value, ast.Starred) for value in call.args)
      or any(word.arg is None for word in call.keywords)):
    raise ExpressionError("* and ** can't be used here: write the arguments out.")
  return ([_value(value) for value in call.args],
          {str(word.arg): _value(word.value) for word in call.keywords})


def _value(node: ast.expr) -> Any:
  match node:
    case ast.Constant(value=value) if value is None or isinstance(value, (bool, int, float, str)):
      return value
    case ast.UnaryOp(op=op, operand=operand) if type(op) in _SIGNS:
      value = _value(operand)
      if isinstance(value, (int, float)):
        return _SIGNS[type(op)](value)
    case ast.List(elts=items) | ast.Tuple(elts=items):
      return [_value(item) for item in items]
    case ast.Name(id=name):
      return _named(name)
    case ast.Attribute(value=ast.Name(id="jaxpace"), attr=name):
      return _named(name)
    case ast.Call(func=function):
      called = _value(function) if isinstance(function, (ast.Name, ast.Attribute)) else None
      if callable(called):
        return _called(called, *_given(node), ast.unparse(function))
  raise ExpressionError(f"{ast.unparse(node)!r} can't be used here: only jaxpace's pacers, "
                        "numbers, strings, lists and range. Put anything else into a module and "
                        f"name that with {SWITCH} MODULE:ATTRIBUTE.")


def _named(name: str) -> Any:
  known = factories()
  if name in _NAMED:
    return _NAMED[name]
  if name not in known:
    raise ExpressionError(f"jaxpace has no pacer {name!r}; there are: {', '.join(sorted(known))}. "
                          f"One of your own is given with {SWITCH} MODULE:ATTRIBUTE.")
  return known[name]


def _range(*bounds: int) -> range:
  """`range` of a number of ranks that there can be: whoever takes it writes it out."""
  made = range(*bounds)
  if len(made) > _MOST_RANKS:
    raise ValueError(f"{len(made):,} are more ranks than there can be, {_MOST_RANKS:,}.")
  return made


_NAMED = {"range": _range, "True": True, "False": False, "None": None}


def _called(function: Callable[..., Any], args: list[Any], words: dict[str, Any], text: str) -> Any:
  # A pacer's name without parentheses stands for the pacer with its defaults, also inside a
  # combinator.
  known = set(factories().values())
  args = [value() if callable(value) and value in known else value for value in args]
  try:
    return function(*args, **words)
  except Exception as error:
    raise ExpressionError(f"{text}: {error}") from error
