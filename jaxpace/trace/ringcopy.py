"""Copies the ring of stamps off the devices without waiting for them.

The copy is a program of its own, queued behind the step that writes the ring, so the user may
donate the pace state to the next step. (`copy_to_host_async` on the user's array, then donation:
"Array has been deleted".) Each process copies the shards it can address, nothing else.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxpace.core import own_context
from jaxpace.core import ring as layout

_EXAMPLE = "`pace, out = step(pace, state, batch)`, then `recorder.record(pace)`"


def check(pace: Any) -> None:
  """Checks that `pace` is what a step returned.

  Raises:
    TypeError: it is something else; the message names the likely mistake.
  """
  ring = getattr(pace, "ring", None)
  if ring is None or not hasattr(pace, "rank"):
    if isinstance(pace, tuple | list) and pace and hasattr(pace[0], "ring"):
      raise TypeError(
          f"record() got everything the step returned; pass the pace state alone: {_EXAMPLE}.")
    raise TypeError(f"record() takes the pace state, the first thing the step returns: {_EXAMPLE}. "
                    f"Got {type(pace).__name__}; is it the train state?")
  if isinstance(ring, jax.Array) and not hasattr(ring, "is_ready"):  # A tracer has no buffers.
    raise TypeError("record() was called inside a function that JAX is tracing (jit, scan, "
                    "shard_map, ...). Call it in the Python loop, after the step has returned.")
  if not isinstance(ring, jax.Array) or ring.ndim < 2 or ring.dtype != jnp.uint32:
    raise TypeError(f"record() got a pace state whose ring is {type(ring).__name__}"
                    f"{getattr(ring, 'shape', '')}, not a device array of uint32: pass the one the "
                    "step returned, unconverted.")


def deleted(pace: Any) -> bool:
  """Whether the pace state's buffers are gone, by donation or deletion."""
  return pace.ring.is_deleted()


def check_alive(pace: Any) -> None:
  """Raises ValueError if the pace state was donated before it was recorded."""
  if deleted(pace):
    raise ValueError("record() got a pace state that was donated to a step: "
                     f"record the one the step returned: {_EXAMPLE}.")


def check_split(pace: Any, places: int | None) -> None:
  """Checks that the state holds every device's part, as many as `init` laid out; None if that isn't
  known.

  Raises:
    ValueError: it holds fewer: the step's out_specs dropped the others.
  """
  held = pace.ring.shape[0] if pace.ring.ndim > 2 else 1
  if places is not None and held < places:
    raise ValueError(
        f"The pace state that the step returned holds the part of {held} "
        f"device{'s' if held > 1 else ''} of {places}: its partition spec in out_specs of "
        "jax.shard_map leaves out a mesh axis, so the others' timestamps are lost, and the next "
        "step will not take it. Use spec = jaxpace.spec(mesh) in both in_specs and out_specs: "
        "out_specs=(spec, P()). With jax.pmap: in_axes=(0, *old), out_axes=(0, old).")


def local_bytes(pace: Any) -> int:
  """Returns the size of this process's rings."""
  return sum(shard.data.nbytes for shard in pace.ring.addressable_shards)


def local_ranks(pace: Any) -> int:
  """Returns the number of ranks whose rings this process holds."""
  return sum(shard.data.shape[0] for shard in pace.ring.addressable_shards if shard.replica_id == 0)


def local_devices(pace: Any) -> list[int]:
  """Returns the id of the device of each ring that this process holds, in the order in which they
  are copied."""
  return [shard.device.id for shard in _local_shards(pace)]


def local_places(pace: Any) -> list[int]:
  """Returns the place of each of them among all ranks' rings: its rank, as `init` numbers them."""
  return [int(shard.index[0].start or 0) for shard in _local_shards(pace)]


def _local_shards(pace: Any) -> list[Any]:
  shards = [shard for shard in pace.ring.addressable_shards if shard.replica_id == 0]
  if pace.ring.is_fully_addressable:
    shards.sort(key=lambda shard: shard.index[0].start or 0)
  return shards


def newest(rings: np.ndarray) -> int:
  """Returns the newest completed step of [local, rows, width] rings' first rank, -1 for none."""
  ring = rings[0]
  return int(np.max(np.where(ring[:, layout.FLAGS] & layout.VALID != 0,
                             ring[:, layout.STEP].astype(np.int64), -1)))


class RingCopy:
  """A copy under way."""

  def __init__(self, ring: jax.Array, rank: jax.Array | None, rows: int, width: int):
    self._ring: Any = ring  # `is_ready` is not in jax.Array's type.
    self._rank: Any = rank
    self._rows, self._width = rows, width

  def ready(self) -> bool:
    """Whether `read` would return at once."""
    return self._ring.is_ready() and (self._rank is None or self._rank.is_ready())

  def read(self) -> tuple[np.ndarray, list[int] | None]:
    """Returns [local ranks, rows, width] uint32 in host memory of its own, and the ranks if they
    were asked for."""
    rings = np.array(own_context.fetch(self._ring), copy=True)
    return (rings.reshape(-1, self._rows, self._width), None if self._rank is None
            else [int(r) for r in own_context.fetch(self._rank).reshape(-1)])


def start(pace: Any, with_ranks: bool) -> RingCopy:
  """Queues a copy of this process's shards of the ring, in the order of the devices.

  Args:
    pace: pace state with `ring`: uint32, [ranks, rows, width] over all devices; and `rank`: int32,
      [ranks].
    with_ranks: whether to copy `rank` as well.

  Returns:
    The copy under way.
  """
  ring = _duplicate(_local(pace.ring))
  rank = _duplicate(_local(pace.rank)) if with_ranks else None
  return RingCopy(ring, rank, *pace.ring.shape[-2:])


@functools.cache
def _copier() -> Any:
  return jax.jit(jnp.copy)


def _duplicate(array: jax.Array) -> jax.Array:
  with own_context.on(array):
    copy: jax.Array = _copier()(array)
  return copy


def _local(array: jax.Array) -> jax.Array:
  """This process's part of an array as an array of its own, sharing its buffers."""
  if array.is_fully_addressable:
    return array
  shards = [shard for shard in array.addressable_shards if shard.replica_id == 0]
  pieces = [shard.data for shard in shards]
  if len(pieces) == 1:
    return pieces[0]
  mesh = jax.sharding.Mesh(np.array([shard.device for shard in shards]), ("local",))
  sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("local"))
  shape = (sum(piece.shape[0] for piece in pieces), *array.shape[1:])
  return jax.make_array_from_single_device_arrays(shape, sharding, pieces)
