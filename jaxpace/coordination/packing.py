"""Many scalars of a state carried as two vectors: every array that goes into a step and out of it costs its caller.

Some 0.7 us an array and a step (one CPU device, jax 0.10, donated), whatever its size: as scalars, the state of a
guarded pacer took the caller of its step several times as long as its `update`.
"""

from __future__ import annotations

from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

Tree = TypeVar("Tree")

REAL: Any = 0.0
WHOLE: Any = 0
FLAG: Any = False
"""A scalar of each kind, for the tree that `unpack` goes by."""


class Packed(NamedTuple):
  """The scalars of a tree, in its order."""

  reals: jax.Array  # [n] float32
  wholes: jax.Array  # [m] int32, booleans as 0 and 1 among them


def pack(tree: Any) -> Packed:
  """Packs a tree of [] float32, int32 and bool.

  >>> packed = pack((jnp.float32(1.5), jnp.int32(7), (jnp.bool_(True),)))
  >>> print(packed.reals, packed.wholes)
  [1.5] [7 1]
  >>> unpack(packed, (0.0, 0, (False,)))[2][0]
  Array(True, dtype=bool)
  """
  reals: list[Any] = []
  wholes: list[Any] = []
  for leaf in jax.tree.leaves(tree):
    (reals if jnp.result_type(leaf) == np.float32 else wholes).append(leaf)
  return Packed(_stacked(reals, np.float32), _stacked(wholes, np.int32))


def unpack(packed: Packed, like: Tree) -> Tree:
  """Returns the tree again.

  Args:
    packed: of `pack`; axes in front, of ranks say, stay in front.
    like: a tree of the same structure and types; Python's numbers will do.
  """
  leaves, structure = jax.tree.flatten(like)
  at = {"reals": 0, "wholes": 0}
  found = []
  for leaf in leaves:
    kind = jnp.result_type(leaf)
    name = "reals" if jnp.issubdtype(kind, np.floating) else "wholes"
    value = getattr(packed, name)[..., at[name]]
    at[name] += 1
    found.append(value != np.int32(0) if kind == np.bool_ else value)
  tree: Tree = jax.tree.unflatten(structure, found)
  return tree


def _stacked(values: list[Any], kind: Any) -> jax.Array:
  return jnp.stack([jnp.asarray(value).astype(kind) for value in values]) if values else jnp.zeros((0,), kind)
