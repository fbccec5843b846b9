"""The loss that `jaxpace.accumulate` is given: in each of its forms a sum and its weight, or a
sentence on what it returned instead."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp


def exact(dtype: Any) -> Any:
  """The type to add up in: float32, or the type itself where that has more digits."""
  wide = jnp.issubdtype(dtype, jnp.inexact) and jnp.dtype(dtype).itemsize > 4
  return jnp.dtype(dtype) if wide else jnp.dtype(jnp.float32)


def checked(loss_fn: Callable[..., Any], tree: Any, has_aux: bool, weighted: bool
            ) -> Callable[..., Any]:
  """The loss of parameters and the leaves of a micro-batch, which is a `tree`; its results checked:
  (loss, (weight, aux)), both numbers in float32 at least; with a weight of one where it has none.
  """
  name = getattr(loss_fn, "__name__", "loss_fn")
  wanted = "(loss_sum, weight_sum, aux)" if has_aux else "(loss_sum, weight_sum)"

  def called(params: Any, leaves: Any, *key: Any) -> Any:
    found = loss_fn(params, _built(tree, leaves), *key)
    if not weighted:
      if has_aux and (not isinstance(found, tuple) or len(found) != 2):
        raise ValueError("With has_aux=True and weighted=False the loss must return (loss, aux).")
      if not has_aux and isinstance(found, tuple):
        raise ValueError("With weighted=False the loss must return the loss alone, and it returned "
                         f"{len(found)} things: leave weighted out where the second is its weight, "
                         "or give has_aux=True.")
      found = (found[0], 1.0, found[1]) if has_aux else (found, 1.0)
    if not isinstance(found, tuple) or len(found) != 2 + has_aux:
      what = (f"{len(found)} things" if isinstance(found, tuple) else
              "a list, not a tuple" if isinstance(found, list) else "one thing")
      hint = (": ranks run different numbers of micro-batches, so a mean over each would weigh "
              "them wrongly. Return losses.sum(), mask.sum(); or give jaxpace.accumulate "
              "weighted=False where each micro-batch counts as one, as in a loop that divides by "
              "their number.")
      if isinstance(found, tuple) and len(found) == 3:
        hint = ". For a third thing that is summed up too give has_aux=True."
      raise ValueError(f"{name} must return {wanted}, and it returned {what}{hint}")
    for one in found[:2]:
      if one is None or isinstance(one, (str, dict)):
        raise ValueError(f"{name} must return {wanted}, both single numbers, and one of them is "
                         f"{one!r:.40}.")
    loss, weight = jnp.asarray(found[0]), jnp.asarray(found[1])
    if not jnp.issubdtype(loss.dtype, jnp.floating):
      raise ValueError(f"The loss of {name} is {loss.dtype}, which has no gradient: return a sum "
                       "of floating-point losses.")
    if loss.shape or weight.shape:
      raise ValueError(f"{name} must return {wanted}, both single numbers; their shapes are "
                       f"{list(loss.shape)} and {list(weight.shape)}. Sum over the micro-batch: "
                       "losses.sum(), mask.sum().")
    dtype = exact(loss.dtype)
    aux = jax.tree.map(jnp.asarray, found[2]) if has_aux else ()
    return loss.astype(dtype), (jax.lax.stop_gradient(weight).astype(dtype), aux)

  return called


def _built(tree: Any, leaves: Any) -> Any:
  try:
    return jax.tree.unflatten(tree, leaves)
  except Exception as error:
    raise ValueError(
        f"micro_batches can't lose its axis in front, as a micro-batch has none ({error}): arrays "
        "that keep their shape or their axes' names beside them, such as haliax's, are made inside "
        "the loss. Give micro_batches their plain arrays.") from error
