"""Which calls of an observed function run a program without timestamps, told from their arguments.

JAX dispatches a known program without saying which. What ran with timestamps is read from the ring;
of a function that also has programs without, calls of these are left out of the count. It is
looked at only where there is one.
"""

from __future__ import annotations

from typing import Any

import jax

from jaxpace.communication.partitioned import compiling


class Dispatched:
  """What programs of one function were compiled for, and whether they have timestamps."""

  def __init__(self) -> None:
    self.some_bare = False
    """Whether one has none."""
    self._known: dict[Any, bool] = {}

  def learn(self, look: Any, marked: bool) -> None:
    """Remembers whether calls that look so run a program with timestamps."""
    # A number may be a static argument, a program for each, or an operand of one program.
    self._known[_typed(look)] = self._known[look] = marked
    self.some_bare = self.some_bare or not marked

  def marked(self, look: Any) -> bool:
    """Whether calls that look so run a program with timestamps."""
    return self._known.get(look, self._known.get(_typed(look), True))

  def knows(self, look: Any) -> bool:
    """Whether a program was compiled for exactly such calls."""
    return look in self._known


def look_of(args: Any, kwargs: Any) -> Any:
  """What a program is compiled for: JAX's settings, the arguments' tree, and each leaf
  described."""
  leaves, tree = jax.tree.flatten((args, kwargs))
  return compiling.settings(), tree, tuple(_described(leaf) for leaf in leaves)


def _typed(look: Any) -> Any:
  """The same with the types of plain numbers only."""
  settings, tree, leaves = look
  return settings, tree, tuple(
      leaf[0] if isinstance(leaf, tuple) and isinstance(leaf[0], type)
      and issubclass(leaf[0], (int, float, complex)) and leaf[0] is not bool else leaf
      for leaf in leaves)


def _described(leaf: Any) -> Any:
  shape = getattr(leaf, "shape", None)
  if shape is None:
    try:
      hash(leaf)
    except TypeError:
      return type(leaf)
    return type(leaf), leaf
  return (tuple(shape), getattr(leaf, "dtype", None), getattr(leaf, "weak_type", False),
          getattr(leaf, "sharding", None), getattr(leaf, "committed", None))
