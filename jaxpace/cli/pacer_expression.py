"""Makes the pacer that a command line names, without evaluating it as Python."""

from __future__ import annotations

import ast
import importlib
import sys
from collections.abc import Callable, Mapping
from typing import Any

from jaxpace.core.types import Balancer, Pacer
from jaxpace.files import UserError

_EXAMPLES = {Balancer: "such as 'share_by_speed(total_micro_batches=32, capacity=16)'",
             Pacer: "such as 'pace_early_ranks(window=64, threshold=0.05)'"}
SWITCH = "--pacer-from"
"""The one switch whose argument names a module, which is imported and so run."""
_ON_THE_HOST = ("balance", "fit_costs")
"""What the layer has besides: nothing that decides in a step."""
_LONGEST, _MOST_RANKS = 10_000, 2**20


def factories() -> dict[str, Callable[..., Any]]:
  """Pacer factories and combinators among jaxpace's public names."""
  import jaxpace
  return {name: getattr(jaxpace, name) for name, home in jaxpace._HOMES.items()
          if home.startswith("coordination.") and name[0].islower() and name not in _ON_THE_HOST}


def make(text: str, kind: type[Any] = Pacer, *, imports: bool = False) -> Any:
  """Makes a pacer of an expression: data, which may come from a file. Nothing is imported for it,
  whatever it says.

  Calls of jaxpace's own factories with literals, `range(...)` and further calls, e.g.
  `chain(pace_early_ranks(), limit(pace_early_ranks(), 5e-3))`.

  >>> make("limit(pace_early_ranks(window=16), 5e-3)").init(2).active
  Array(False, dtype=bool)

  Args:
    kind: `Pacer`, or `Balancer`, of an expression such as `share_by_speed(total_micro_batches=32,
      capacity=16)`.
    imports: whether it may name a module, see `import_pacer`.

  Raises:
    UserError: it isn't such an expression, or it makes something else.
  """
  if _split(text)[0]:
    if imports:
      return import_pacer(text)
    raise UserError(f"{text!r} would import a module, and so run it; a file or a setting "
                    f"can't have that done. {SWITCH} of `jaxpace replay` does it, and a "
                    "Python config of `jaxpace simulate`.")
  return _made(_parsed(text.strip(), kind), factories(), text, kind)


def import_pacer(text: str) -> Pacer:
  """Imports `module:attribute`, a pacer of the user's or a factory of one, which may be called with
  literals.

  Only for what somebody wrote on the command line behind `SWITCH`, or in a program. The module is
  looked for in the current directory too.

  Args:
    text: such as `my_pacers:careful(rate=0.1)`.

  Raises:
    UserError: it names none, the module can't be imported, or it makes no pacer.
  """
  module, source = _split(text)
  if not module:
    raise UserError(f"{SWITCH} takes MODULE:ATTRIBUTE, such as "
                    f"'my_pacers:careful(rate=0.1)', not {text!r}. A pacer of jaxpace is "
                    "given without that switch.")
  node = _parsed(source, Pacer)
  name = ast.unparse(node.func if isinstance(node, ast.Call) else node)
  if "" not in sys.path and "." not in sys.path:
    sys.path.insert(0, "")
  try:
    found = getattr(importlib.import_module(module), name)
  except Exception as error:
    raise UserError(f"{module}:{name} can't be imported: {type(error).__name__}: {error}. "
                    "The module must be importable from here, and have that "
                    "attribute.") from error
  pacer: Pacer = _made(node, factories() | {name: found}, text, Pacer)
  return pacer


def _split(text: str) -> tuple[str, str]:
  """The module of `module:attribute(...)`, empty where it names none, and the rest."""
  module, colon, rest = text.strip().partition(":")
  named = colon and all(part.isidentifier() for part in module.split("."))
  return (module, rest) if named and rest[:1].isidentifier() else ("", text)


def _parsed(source: str, kind: type[Any]) -> ast.expr:
  hint = f"Give a {kind.__name__.lower()}, {_EXAMPLES[kind]}."
  if len(source) > _LONGEST:
    raise UserError(f"the expression has {len(source):,} characters; at most {_LONGEST:,} "
                    f"are read. {hint}")
  shown = repr(source if len(source) < 200 else f"{source[:200]}...")
  try:
    parsed = ast.parse(source, mode="eval").body
    ast.unparse(parsed)  # what is said of a part of it later is no deeper
  except (SyntaxError, ValueError) as error:
    raise UserError(f"{shown} is not an expression: {error.args[0]}. {hint}") from error
  except (RecursionError, MemoryError) as error:
    raise UserError(f"{shown} is nested too deeply. {hint}") from error
  return parsed


def _made(node: ast.expr, known: Mapping[str, Any], text: str, kind: type[Any]) -> Any:
  made = _value(node, known)
  if not isinstance(made, kind) and callable(made):
    made = _called(made, [], {}, text)
  if not isinstance(made, kind):
    raise UserError(f"{text!r} makes a {type(made).__name__}, not a {kind.__name__}. Give "
                    f"one, {_EXAMPLES[kind]}.")
  return made


def _value(node: ast.expr, known: Mapping[str, Any]) -> Any:
  match node:
    case ast.Constant() | ast.UnaryOp():
      try:
        return ast.literal_eval(node)
      except ValueError:
        pass
    case ast.List(elts=items) | ast.Tuple(elts=items):
      return [_value(item, known) for item in items]
    case ast.Name(id=name) | ast.Attribute(value=ast.Name(id="jaxpace"), attr=name):
      return _named(name, known)
    case ast.Call(func=ast.Name() | ast.Attribute() as function):
      if callable(called := _value(function, known)):
        if (any(isinstance(value, ast.Starred) for value in node.args)
            or any(word.arg is None for word in node.keywords)):
          raise UserError("* and ** can't be used here: write the arguments out.")
        return _called(called, [_value(value, known) for value in node.args],
                       {str(word.arg): _value(word.value, known) for word in node.keywords},
                       ast.unparse(function))
  raise UserError(f"{ast.unparse(node)!r} can't be used here: only jaxpace's pacers, "
                  "numbers, strings, lists and range. Put anything else into a module and "
                  f"name that with {SWITCH} MODULE:ATTRIBUTE.")


def _named(name: str, known: Mapping[str, Any]) -> Any:
  if name == "range":
    return _range
  if name not in known:
    raise UserError(f"jaxpace has no pacer {name!r}; there are: {', '.join(sorted(known))}. "
                    f"One of your own is given with {SWITCH} MODULE:ATTRIBUTE.")
  return known[name]


def _range(*bounds: int) -> range:
  """`range` of a number of ranks that there can be: whoever takes it writes it out."""
  made = range(*bounds)
  if len(made) > _MOST_RANKS:
    raise ValueError(f"{len(made):,} are more ranks than there can be, {_MOST_RANKS:,}.")
  return made


def _called(function: Callable[..., Any], args: list[Any], words: dict[str, Any], text: str) -> Any:
  # A pacer's name without parentheses stands for the pacer with its defaults, also inside a
  # combinator.
  known = set(factories().values())
  args = [value() if callable(value) and value in known else value for value in args]
  try:
    return function(*args, **words)
  except Exception as error:
    raise UserError(f"{text}: {error}") from error
