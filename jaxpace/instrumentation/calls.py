"""A call of the user's step as a function of arrays alone, whatever its arguments and results are.

What is no array (a flag, a name) is the step's own business, as it is without jaxpace. Objects of
`flax.nnx` may be changed by the step in place, and the transforms of nnx carry that out. The step
is traced here on copies, so the changes are carried from the copies to the originals, by the means
that nnx's own transforms use.
"""

from __future__ import annotations

import contextlib
import sys
from types import TracebackType
from typing import Any, Self

import jax
import numpy as np

_OBJECTS = ("Pytree", "Variable")
_CONTEXTS = ("update_context", "split_context", "merge_context")


class Call:
  """One call of a step.

      with Call(step, args, kwargs) as call:
        closed = jax.make_jaxpr(call.traced)(*call.leaves)
        out = call.result(evaluate(closed, call.leaves))

  Attributes:
    leaves: the arrays among the arguments, flat.
  """

  def __init__(self, step: Any, args: tuple[Any, ...], kwargs: dict[str, Any]):
    self._step = step
    self._open = contextlib.ExitStack()
    # Where nobody has imported it there are no objects of it.
    self._nnx = sys.modules.get("flax.nnx")
    self._kinds = tuple(getattr(self._nnx, name) for name in _OBJECTS if hasattr(self._nnx, name))
    everything, self._tree = jax.tree.flatten((args, kwargs), is_leaf=self._is_object)
    self._objects = [leaf for leaf in everything if self._is_object(leaf)]
    self._everything = everything
    self._graph: Any = None
    self.leaves: list[Any] = []

  def __enter__(self) -> Self:
    with contextlib.ExitStack() as opening:
      if self._objects:
        self._check_contexts()
        opening.enter_context(self._nnx.update_context(self))  # type: ignore[union-attr]
        with self._nnx.split_context(self) as split:  # type: ignore[union-attr]
          self._graph = split.split(self._objects)
      rest = [leaf for leaf in self._everything if not self._is_object(leaf)]
      state = self._graph[1] if self._graph else ()
      self._given, self._given_tree = jax.tree.flatten((state, rest))
      # Of the places of `_given`, those of arrays.
      self._places = [i for i, leaf in enumerate(self._given)
                      if isinstance(leaf, (jax.Array, np.ndarray, np.generic))]
      self.leaves = [self._given[i] for i in self._places]
      self._open = opening.pop_all()
    return self

  def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
               trace: TracebackType | None) -> None:
    self._open.close()

  def traced(self, *leaves: Any) -> list[Any]:
    """Calls the step on arrays in place of `leaves`. Returns its results, flat, those changed in
    place among them."""
    given = list(self._given)
    for place, leaf in zip(self._places, leaves, strict=True):
      given[place] = leaf
    state, rest = jax.tree.unflatten(self._given_tree, given)
    objects: list[Any] = []
    if self._graph:
      with self._nnx.merge_context(self, True) as merge:  # type: ignore[union-attr]
        objects = merge.merge(self._graph[0], state)
    args, kwargs = self._assembled(self._tree, self._everything, objects, rest)
    out = self._step(*args, **kwargs)
    found, self._out_tree = jax.tree.flatten(out, is_leaf=self._is_object if self._graph else None)
    self._out, state = found, ()
    if self._graph:
      returned = [leaf for leaf in found if self._is_object(leaf)]
      with self._nnx.split_context(self) as split:  # type: ignore[union-attr]
        self._graph_out, state = split.split((objects, returned))
      found = [leaf for leaf in found if not self._is_object(leaf)]
    flat, self._flat_tree = jax.tree.flatten((state, found))
    return flat

  def result(self, outputs: list[Any]) -> Any:
    """Returns what the step returned, given its flat results, and changes in place what it did."""
    state, rest = jax.tree.unflatten(self._flat_tree, outputs)
    returned: list[Any] = []
    if self._graph:
      with self._nnx.merge_context(self, False) as merge:  # type: ignore[union-attr]
        _, returned = merge.merge(self._graph_out, state)
    return self._assembled(self._out_tree, self._out, returned, rest)

  def _assembled(self, tree: Any, like: list[Any], objects: list[Any], rest: list[Any]) -> Any:
    """The tree with these objects and other leaves, in the places that they have in `like`."""
    if not self._graph:
      return jax.tree.unflatten(tree, rest)
    object_of, other_of = iter(objects), iter(rest)
    leaves = [next(object_of if self._is_object(leaf) else other_of) for leaf in like]
    return jax.tree.unflatten(tree, leaves)

  def _is_object(self, leaf: Any) -> bool:
    return isinstance(leaf, self._kinds)

  def _check_contexts(self) -> None:
    missing = [name for name in _CONTEXTS if not hasattr(self._nnx, name)]
    if missing:
      raise ValueError(
          "The step is given objects of flax.nnx, and this version of flax has no "
          f"nnx.{missing[0]} to carry out what it changes in them. Give it their state instead: "
          "graphdef, state = nnx.split(model); inside, model = nnx.merge(graphdef, state), and "
          "return nnx.state(model).")
