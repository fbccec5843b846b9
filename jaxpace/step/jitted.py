"""What `observe` takes: functions that JAX compiles as a whole."""

from __future__ import annotations

import functools
from typing import Any

import jax

from jaxpace.core.recordable import Marked

_DEEPEST = 3
"""Functions around a jitted one, each in what the next closes over."""


def check_jitted(jitted: Any) -> None:
  """Checks that this is what `observe` takes.

  Raises:
    TypeError: it is not jitted, or is observed, lowered or compiled already.
  """
  if isinstance(jitted, Marked):
    raise TypeError("jaxpace.observe was given a step that is observed already.")
  if isinstance(jitted, (jax.stages.Lowered, jax.stages.Compiled)):
    kind = type(jitted).__name__.lower()
    raise TypeError(
        f"jaxpace.observe was given a step that is {kind} already: timestamps go in before that. "
        "Give it the jitted function, `observed = jaxpace.observe(step)`, and lower and compile "
        "what it returns: `observed.lower(state, batch).compile()`.")
  if not callable(jitted) or not _jits(jitted):
    raise TypeError(
        f"jaxpace.observe takes a jitted function, not {jitted!r}: `jaxpace.observe(jax.jit("
        "train_step, ...))`. For a per-device function under shard_map, jit what "
        "shard_map returns.")


def _jits(function: Any, deep: int = 0) -> bool:
  """Whether a function is jitted, or wraps one that is, as what `nnx.pmap` returns does."""
  while isinstance(function, functools.partial):
    function = function.func
  if hasattr(function, "lower"):
    return True
  if deep == _DEEPEST or not (deep or hasattr(function, "__wrapped__")):
    return False
  cells = getattr(function, "__closure__", None) or ()
  held = [getattr(cell, "cell_contents", None) for cell in cells]
  return any(_jits(value, deep + 1) for value in held if callable(value))
