"""Compares what two runs of a step gave, bit for bit, on this process' own part of every array."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxpace.core import own_context


def copied(tree: Any) -> Any:
  """Copies a tree's arrays on their devices: a donated one can be used again.

  A step takes the copies as it takes the tree: laid out alike, by the same program.

  Raises:
    TypeError: it has a leaf that is no array, number or text.
  """
  with own_context.on(None):
    return jax.tree.map(_copied, tree)


def _copied(leaf: Any) -> Any:
  if isinstance(leaf, jax.Ref):
    return jax.new_ref(_copied(leaf[...]))
  if isinstance(leaf, jax.Array):
    if leaf.is_fully_addressable:
      return jax.device_put(leaf, may_alias=False)
    return jax.make_array_from_single_device_arrays(leaf.shape, leaf.sharding, [
        jax.device_put(shard.data, may_alias=False) for shard in leaf.addressable_shards])
  if isinstance(leaf, np.ndarray):
    return leaf.copy()
  if isinstance(leaf, (int, float, complex, str, bytes, np.generic)):
    return leaf
  raise TypeError(f"an argument holds {type(leaf).__name__}, which can't be copied.")


def differences(bare: Any, marked: Any) -> str:
  """In what two trees differ, in a sentence; empty where they are equal bit for bit.

  Arrays that were donated on either side are left out. NaNs are compared by their bits, too.
  """
  with own_context.on(None):
    before = jax.tree_util.tree_flatten_with_path(bare)[0]
    return _differences(before, jax.tree.leaves(marked))


def _differences(before: Sequence[tuple[Any, Any]], after: Sequence[Any]) -> str:
  if len(before) != len(after):
    return f"With timestamps the step gives {len(after)} arrays, and {len(before)} without."
  different: list[str] = []
  largest = 0.0
  for (path, one), two in zip(before, after, strict=True):
    for left, right in zip(_parts(one), _parts(two), strict=False):
      if left.dtype != right.dtype or left.shape != right.shape:
        return f"With timestamps {jax.tree_util.keystr(path)} has another shape or type."
      if left.tobytes() != right.tobytes():
        different.append(jax.tree_util.keystr(path))
        largest = max(largest, _relative(left, right))
  if not different:
    return ""
  names = sorted(set(different))
  return (f"With timestamps {len(names)} of {len(before)} results of the first step differ, by "
          f"{largest:.1e} relative at most ({', '.join(names[:3])}).")


def devices(tree: Any) -> list[Any]:
  """Devices that a tree's arrays lie on, in the order of their ids."""
  found = {device for leaf in jax.tree.leaves(tree) if isinstance(leaf, (jax.Array, jax.Ref))
           for device in leaf.sharding.device_set}
  return sorted(found, key=lambda device: device.id)


def _parts(leaf: Any) -> Iterable[np.ndarray[Any, Any]]:
  if isinstance(leaf, jax.Ref):
    leaf = leaf[...]
  if not isinstance(leaf, jax.Array):
    return [np.asarray(leaf)]
  if leaf.is_deleted():
    return []
  if jnp.issubdtype(leaf.dtype, jax.dtypes.extended):
    leaf = jax.random.key_data(leaf)
  return [np.asarray(shard.data) for shard in leaf.addressable_shards]


def _relative(left: np.ndarray[Any, Any], right: np.ndarray[Any, Any]) -> float:
  try:
    one, two = left.astype(np.float64), right.astype(np.float64)
  except (TypeError, ValueError):
    return float("nan")
  scale = float(np.max(np.abs(one), initial=0.0)) or 1.0
  return float(np.max(np.abs(one - two), initial=0.0)) / scale
