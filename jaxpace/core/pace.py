"""The state that an instrumented step threads: what the last step showed, and what the pacer
carries."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxpace.core import own_context, packing
from jaxpace.core.packing import Packed
from jaxpace.core.ring_layout import MAX_DECISIONS
from jaxpace.core.types import Pacer, PacerState


class PaceState(NamedTuple):
  """One rank's part; under `shard_map` every leaf has a leading axis of ranks, under `pmap` of
  local devices.

  A pytree of arrays like any other: it may be donated, and checkpointed beside the train state. `R`
  is the number of ranks along the data axis.
  """

  # [2] uint32, the last step's last timestamp, which all others come before. First, since XLA
  # combines all-reduces as it meets them from the results on (see ORDER in
  # jaxpace.observation.clocks.native).
  end: jax.Array
  step: jax.Array  # [] int32, steps completed
  rank: jax.Array  # [] int32, number of this rank's device in the whole job
  last_exit: jax.Array  # [2] uint32, the previous step's last exit; zero before the first step
  delay: jax.Array  # [] float32 s, asked for the next step
  info: jax.Array  # [MAX_DECISIONS] float32, the pacer's columns that came with that delay
  arrivals: jax.Array  # [R] float32 s, of the last step; NaN where unknown
  delays: jax.Array  # [R] float32 s, applied in the last step; NaN where unknown
  step_time: jax.Array  # [] float32 s, own, of the last step; NaN where unknown
  # [slots] float32 s, own estimate of every collective's own time in the last step; NaN unknown
  transfers: jax.Array
  # the pacer's state in a vector; `paced.pacer_state` unpacks it; () without a pacer
  pacer: Packed | tuple[()]
  # [] bool, whether in the last step all ranks' pacers would have held alike; () where none holds
  alike: jax.Array | tuple[()] = ()


def fresh(ranks: int, slots: int, pacer: Pacer | None) -> PaceState:
  """Makes the first device's state before its first step, as numpy arrays."""
  unknown = np.full((ranks,), np.nan, np.float32)
  holds = pacer is not None and pacer.hold is not None
  state: Packed | tuple[()] = ()
  if pacer is not None:
    # A guard of the user's is for the user's own arrays.
    with own_context.unguarded():
      state = packing.pack(jax.tree.map(_on_host, pacer.init(ranks)), xp=np)
  # Not jax.Arrays yet, as the fields are in a step: `Instrumented.init` makes those, over its
  # devices.
  leaves: dict[str, Any] = {
      "end": np.zeros((2,), np.uint32),
      "step": np.zeros((), np.int32),
      "rank": np.zeros((), np.int32),
      "last_exit": np.zeros((2,), np.uint32),
      "delay": np.zeros((), np.float32),
      "info": np.zeros((MAX_DECISIONS,), np.float32),
      "arrivals": unknown,
      "delays": unknown.copy(),
      "step_time": np.full((), np.nan, np.float32),
      "transfers": np.full((slots,), np.nan, np.float32),
      "pacer": state,
      "alike": np.zeros((), np.bool_) if holds else (),
  }
  return PaceState(**leaves)


def _on_host(leaf: Any) -> np.ndarray:
  if jnp.issubdtype(jnp.result_type(leaf), jax.dtypes.prng_key):
    raise ValueError("A pacer's state holds a key of jax.random.key, which can't be carried there. "
                     "Carry its numbers, jax.random.key_data(key), and make a key of them in "
                     "update: jax.random.wrap_key_data(numbers).")
  return np.asarray(leaf, jnp.result_type(leaf))


def laid_out_like(leaf: jax.Array, value: np.ndarray) -> jax.Array:
  """Makes an array of `value`, of its shape and dtype, whole and the same in every process, that
  takes the place of `leaf`: a compiled step takes it as it took that."""
  if not leaf.committed:  # as `init` makes them for pmap: on no device in particular
    return jnp.asarray(value)
  with own_context.on(leaf):
    return jax.make_array_from_callback(leaf.shape, leaf.sharding, lambda index: value[index])


def change_pacer_state(packed: Packed, change: Callable[[PacerState], PacerState]) -> Packed:
  """Changes a pacer's state from outside of the step, on this process's devices; no data is
  exchanged.

  On the host, so it waits for the steps under way.

  Args:
    packed: the pacer's, in a pace state.
    change: makes the state that each device is to have of the one that it has, both in numpy, with
      an axis in front.

  Returns:
    Arrays of the same shapes, types and layout: a compiled step takes them as it took those.
  """
  leaves, tree = jax.tree.flatten(packed)

  def changed(parts: list[Any]) -> list[np.ndarray]:
    one = jax.tree.unflatten(tree, [own_context.fetch(part) for part in parts])
    after = packing.pack(change(packing.unpack(one)), packed.layout, one.words.shape[:-1], np)
    return [np.asarray(leaf) for leaf in jax.tree.leaves(after)]

  if not packed.words.committed:
    return jax.tree.unflatten(tree, [jnp.asarray(leaf) for leaf in changed(leaves)])
  # All are laid out alike, over the pace state's axis in front, so their shards are in the same
  # order.
  shards = [leaf.addressable_shards for leaf in leaves]
  devices = [shard.device for shard in shards[0]]
  parts = [changed([shard.data for shard in each]) for each in zip(*shards, strict=True)]
  with own_context.on(packed.words):
    return jax.tree.unflatten(tree, [
        jax.make_array_from_single_device_arrays(
            leaf.shape, leaf.sharding,
            [jax.device_put(part, at) for part, at in zip(its, devices, strict=True)])
        for leaf, its in zip(leaves, zip(*parts, strict=True), strict=True)])
