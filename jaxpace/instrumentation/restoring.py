"""A pace state out of a checkpoint: what lasts is kept, the old process's own is left behind."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxpace.core import own_context, packing
from jaxpace.core.pace import PaceState, laid_out_like
from jaxpace.core.packing import Packed
from jaxpace.instrumentation.instrument import Instrumented

_LOG = logging.getLogger("jaxpace")


def pace_target(stored: Any, mesh: Mesh) -> Any:
  """Says how a stored pace state is to be restored: whole, on every device, on any number of ranks.

      stored = checkpointer.metadata(path).item_metadata.tree["pace"]
      target = {"state": state, "pace": jaxpace.pace_target(stored, mesh)}
      saved = checkpointer.restore(path, target)
      pace = jaxpace.restore_pace(saved["pace"], paced, mesh)

  Args:
    stored: the checkpoint's metadata of the pace state: a tree whose leaves have a `shape` and a
      `dtype`.
    mesh: the mesh of the step.

  Returns:
    The same tree of `jax.ShapeDtypeStruct`.

  Raises:
    ValueError: a leaf has no shape or dtype.
  """
  replicated = NamedSharding(mesh, PartitionSpec())

  def target(leaf: Any) -> jax.ShapeDtypeStruct:
    if not hasattr(leaf, "shape") or not hasattr(leaf, "dtype"):
      raise ValueError("jaxpace.pace_target takes the metadata of the pace state alone, whose "
                       f"leaves have shapes; this one is a {type(leaf).__name__}. With orbax: "
                       "checkpointer.metadata(path).item_metadata.tree[\"pace\"].")
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=replicated)

  return jax.tree.map(target, stored)


def restore_pace(saved: Any, paced: Instrumented, mesh: Mesh | None = None, *,
                 devices: Sequence[jax.Device] | None = None, axes: Sequence[str] | None = None
                 ) -> PaceState:
  """Makes the pace state with which training goes on after a restart. Every process calls it.

  Kept are the number of steps and what the pacer has learnt. Left behind is what belonged to the
  process that is gone: its timestamps (no clock of another process means anything here), the delay
  it was about to apply, and the last step's arrivals. On another number of ranks, with another
  pacer, or where its numbers are damaged, the pacer starts anew, with a notice.

  Args:
    saved: the pace state from a checkpoint, its arrays on devices or in numpy; trees that lost
      their types on the way (dicts for named tuples, lists for tuples) are recognised. None: there
      is none, all starts anew.
    paced: the instrumented step it is for.
    mesh: as in `paced.init`.
    devices: as in `paced.init`, for `jax.pmap`.
    axes: as in `paced.init`.

  Returns:
    The state for the next step, laid out as `paced.init` would.

  Raises:
    TypeError: `paced` is no instrumented step, or `saved` no pace state.
  """
  if not isinstance(paced, Instrumented):
    raise TypeError("jaxpace.restore_pace takes what jaxpace.instrument returned: "
                    f"restore_pace(saved, paced, mesh). This is a {type(paced).__name__}.")
  fresh = paced.init(mesh, devices=devices, axes=axes)
  if saved is None:
    _LOG.warning("The checkpoint holds no pace state: the pacer starts anew, at step 0 of its own "
                 "count.")
    return fresh
  steps, pacer, ranks = (_field(saved, name) for name in ("step", "pacer", "arrivals"))
  fresh = fresh._replace(step=_like(fresh.step, np.broadcast_to(_one(steps), fresh.step.shape)))
  here, there = fresh.arrivals.shape, np.shape(ranks)
  if len(there) != len(here) or 0 in there:
    raise TypeError(f"The saved pace state's 'arrivals' have the shape {list(there)}, which no "
                    "pace state has: it is damaged, or is something else. restore_pace(None, "
                    "paced, mesh) starts anew.")
  if here != there:
    # Along the data axis if that differs; else in all, where other axes of the mesh do.
    what, place = ("ranks", -1) if there[-1] != here[-1] else ("devices", 0)
    was, now = there[place], here[place]
    _LOG.warning("The checkpoint's pace state is of %d %s, this job has %d: the pacer starts anew. "
                 "Its estimates and what it could spend are lost, no training state is.",
                 was, what, now)
    return fresh
  try:
    typed = _packed(fresh.pacer, pacer)
  except ValueError as error:
    _LOG.warning("The checkpoint's pace state is of another pacer, or of another version of "
                 "jaxpace (%s): the pacer starts anew. Its estimates and what it could spend are "
                 "lost, no training state is.", error)
    return fresh
  if damaged := _damaged(fresh.pacer, typed):
    _LOG.warning("The checkpoint's pace state holds NaN or infinity as the pacer's %s: the pacer "
                 "starts anew. Its estimates and what it could spend are lost, no training state "
                 "is.", ", ".join(damaged[:4]))
    return fresh
  return fresh._replace(pacer=jax.tree.map(_like, fresh.pacer, typed))


def _damaged(fresh: Any, saved: Any) -> list[str]:
  """Names the leaves that are NaN or infinite on some rank, where new ones are not: the same on all
  processes."""
  if not isinstance(fresh, Packed):
    return []
  begun = jax.tree.map(lambda leaf: np.asarray(leaf.addressable_shards[0].data), fresh)
  return packing.not_finite(packing.unpack(begun),
                            packing.unpack(jax.tree.map(_of_all_ranks, saved)))


def _of_all_ranks(leaf: Any) -> np.ndarray:
  """A copy on the host of an array that may lie on several processes: each calls it."""
  if isinstance(leaf, jax.Array) and not leaf.is_fully_addressable:
    with own_context.on(leaf):
      if not leaf.is_fully_replicated:
        everywhere = NamedSharding(leaf.sharding.mesh, PartitionSpec())  # type: ignore[attr-defined]
        leaf = jax.jit(jnp.copy, out_shardings=everywhere)(leaf)
      return np.asarray(leaf.addressable_data(0))
  return np.asarray(leaf)


def _field(saved: Any, name: str) -> Any:
  if isinstance(saved, dict) and name in saved:
    return saved[name]
  if isinstance(saved, PaceState):
    return getattr(saved, name)
  found = ""
  if isinstance(saved, dict):
    found = f" without {name!r}: with {', '.join(map(repr, list(saved)[:8]))}"
  raise TypeError("jaxpace.restore_pace takes the saved pace state, the one that was "
                  f"threaded through the step. This is a {type(saved).__name__}{found}.")


def _packed(like: Packed | tuple[()], saved: Any) -> Any:
  """Gives a saved pacer's state the structure of `like`; ValueError, in words, where it is of
  another layout."""
  if isinstance(saved, Packed):
    saved = {"words": saved.words, "others": saved.others}
  if not isinstance(like, Packed):
    if jax.tree.leaves(saved):
      raise ValueError("this step has none")
    return like
  if not isinstance(saved, dict) or not {"words"} <= set(saved) <= {"words", "others"}:
    raise ValueError("not packed")
  # Empty tuples may come back as None.
  words, *others = given = [saved["words"], *(saved.get("others") or ())]
  expected = [like.words, *like.others]
  if len(given) != len(expected):
    raise ValueError(f"not {len(expected)} parts")
  for leaf, other in zip(expected, given, strict=True):
    if np.shape(other) != leaf.shape or getattr(other, "dtype", None) != leaf.dtype:
      raise ValueError(f"{getattr(other, 'dtype', type(other).__name__)}{list(np.shape(other))} "
                       f"instead of {leaf.dtype}{list(leaf.shape)}")
  # As many words may be another pacer's: the first says whose they are.
  mark = words.addressable_shards[0].data if isinstance(words, jax.Array) else words
  if np.asarray(mark).reshape(-1)[0] != np.uint32(like.layout.mark):
    raise ValueError("other names")
  return Packed(words, tuple(others), like.layout)


def _like(leaf: jax.Array, value: Any) -> jax.Array:
  """Lays `value` out as `leaf` is."""
  if isinstance(value, jax.Array):
    if value.sharding.is_equivalent_to(leaf.sharding, leaf.ndim):
      return value
    if not (value.is_fully_addressable or value.is_fully_replicated):
      with own_context.on(leaf):
        return jax.device_put(value, leaf.sharding)
  return laid_out_like(leaf, np.asarray(value))


def _one(steps: Any) -> np.ndarray:
  """The number of steps, the same on all ranks: int32 []."""
  shards = steps.addressable_shards if isinstance(steps, jax.Array) else ()
  local = np.asarray(shards[0].data if shards else steps).reshape(-1)
  whole = local.size > 0 and (np.issubdtype(local.dtype, np.integer) or (
      np.issubdtype(local.dtype, np.floating) and bool(np.isfinite(local[0]))
      and local[0] == np.rint(local[0])))
  if not whole or not 0 <= local[0] <= np.iinfo(np.int32).max:
    holds = f"{local.dtype}{list(np.shape(steps))}" + (f" {local[0]}" if local.size else "")
    raise TypeError(f"The saved pace state's 'step' is no number of steps but {holds}: the "
                    "checkpoint's pace state is damaged, or is something else. restore_pace(None, "
                    "paced, mesh) starts anew.")
  return local[0].astype(np.int32)
