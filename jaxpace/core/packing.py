"""A state's many small arrays carried as one vector: every array that goes into a step and out of
it costs its caller.

Some 0.7 us an array and a step (one CPU device, jax 0.10, donated), whatever its size. Pacers know
nothing of this: their states are plain trees, packed where a step takes them in and gives them out.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import zlib
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

KINDS = (np.dtype(np.float32), np.dtype(np.int32), np.dtype(np.uint32), np.dtype(np.bool_))
"""What is packed, in this order: by its bits, a boolean as 0 or 1."""

LARGEST = 256
"""Numbers in the largest array that is packed: copying a larger one costs more than carrying it by
itself.

Chosen, not measured: an array by itself costs some 0.7 us per step, about as much as copying so
many numbers twice.
"""


class Layout(NamedTuple):
  """How a tree is packed; known before the first step, and the same in every step."""

  structure: Any  # jax.tree_util.PyTreeDef
  shapes: tuple[tuple[int, ...], ...]  # of its leaves, without axes in front
  kinds: tuple[np.dtype[Any], ...]
  mark: int  # 32 bits that tell this layout from another one's: its names, shapes and kinds, hashed

  def places(self) -> list[tuple[int, int] | None]:
    """Where each leaf's numbers begin and end in the vector, after the mark; None for a leaf that
    is not in it."""
    places: list[tuple[int, int] | None] = [None] * len(self.shapes)
    begin = 1
    for kind in KINDS:
      for i, shape in enumerate(self.shapes):
        if self.kinds[i] == kind and math.prod(shape) <= LARGEST:
          places[i] = begin, begin + math.prod(shape)
          begin += math.prod(shape)
    return places


@functools.partial(jax.tree_util.register_dataclass, data_fields=["words", "others"],
                   meta_fields=["layout"])
@dataclasses.dataclass(frozen=True)
class Packed:
  """A tree, packed. Axes in front, of ranks say, may stand before every leaf's own."""

  words: jax.Array  # [1 + n] uint32: the layout's mark, then the bits of all that is packed
  others: tuple[jax.Array, ...]  # leaves that are not: of other kinds, or large
  layout: Layout  # not an array: part of the tree's structure


def layout_of(tree: Any, axes: int = 0) -> Layout:
  """Returns how a tree is packed: of arrays, or of anything that has a shape and a dtype, such as
  what `jax.eval_shape` returns, of whose axes the first `axes` are not its own."""
  found, structure = jax.tree_util.tree_flatten_with_path(tree)
  shapes = tuple(tuple(np.shape(leaf))[axes:] for _, leaf in found)
  kinds = tuple(_kind(leaf) for _, leaf in found)
  names = [jax.tree_util.keystr(path) for path, _ in found]
  said = "\n".join(f"{name} {kind}{list(shape)}"
                   for name, shape, kind in zip(names, shapes, kinds, strict=True))
  return Layout(structure, shapes, kinds, zlib.crc32(said.encode()))


def pack(tree: Any, layout: Layout | None = None, lead: tuple[int, ...] = (),
         xp: Any = jnp) -> Packed:
  """Packs a tree of arrays.

  >>> packed = pack({"mean": jnp.ones(3), "seen": jnp.int32(7), "active": jnp.bool_(True)})
  >>> packed.words.shape
  (6,)
  >>> unpack(packed)["seen"]
  Array(7, dtype=int32)

  Args:
    lead: lengths of the axes in front, which stay in front.
    xp: `jax.numpy`, or `numpy` on the host.
  """
  layout = layout_of(tree, len(lead)) if layout is None else layout
  leaves = jax.tree.leaves(tree)
  places = layout.places()
  parts = [xp.full((*lead, 1), np.uint32(layout.mark))]
  for kind in KINDS:
    these = [xp.asarray(leaf, kind).reshape((*lead, place[1] - place[0]))
             for leaf, its, place in zip(leaves, layout.kinds, places, strict=True) if place
             and its == kind]
    if these:
      parts.append(_viewed(xp.concatenate(these, -1), np.dtype(np.uint32)))
  others = tuple(leaf for leaf, place in zip(leaves, places, strict=True) if not place)
  return Packed(xp.concatenate(parts, -1), others, layout)


def unpack(packed: Packed) -> Any:
  """Returns the tree again; axes in front stay in front. In numpy where `packed` is."""
  words, others, layout = packed.words, iter(packed.others), packed.layout
  lead = words.shape[:-1]
  viewed = {kind: _viewed(words, kind) for kind in KINDS if kind in layout.kinds}
  leaves: list[Any] = []
  for shape, kind, place in zip(layout.shapes, layout.kinds, layout.places(), strict=True):
    leaves.append(viewed[kind][..., slice(*place)].reshape((*lead, *shape)) if place
                  else next(others))
  return jax.tree.unflatten(layout.structure, leaves)


def not_finite(begun: Any, saved: Any) -> list[str]:
  """Names the leaves of a state that are NaN or infinite where a new one, `begun`, is not: of a
  checkpoint, they are damaged.

  >>> not_finite({"mean": np.zeros(2), "knob": np.nan}, {"mean": np.r_[1, np.nan], "knob": np.nan})
  ["['mean']"]

  Args:
    begun: a tree of arrays.
    saved: the same tree in numpy; axes in front, of ranks say, may stand before each leaf's own.
  """
  leaves = zip(jax.tree_util.tree_leaves_with_path(begun), jax.tree.leaves(saved), strict=True)
  return [jax.tree_util.keystr(path) for (path, new), old in leaves
          if jnp.issubdtype(jnp.result_type(old), jnp.inexact)
          and np.any(~np.isfinite(old) & np.isfinite(np.asarray(new)))]


def _kind(leaf: Any) -> np.dtype[Any]:
  # That of a random key is none of numpy's; it is only compared.
  kind: Any = jnp.result_type(leaf)
  return kind


def _viewed(array: Any, kind: np.dtype[Any]) -> Any:
  """The same bits as another of `KINDS`; a boolean from and to 0 and 1."""
  if array.dtype == kind:
    return array
  if np.dtype(np.bool_) in (array.dtype, kind):
    return array != np.uint32(0) if kind == np.bool_ else array.astype(kind)
  return (array.view(kind) if isinstance(array, np.ndarray)
          else jax.lax.bitcast_convert_type(array, kind))
