"""The state that an instrumented step threads: where the stamps collect, and what the pacer carries."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxpace.core import ring
from jaxpace.core.types import Pacer, PacerState


class PaceState(NamedTuple):
  """One rank's part; under `shard_map` every leaf has a leading axis of ranks, under `pmap` of local devices.

  A pytree of arrays like any other: it may be donated, and checkpointed beside the train state. `R` is the
  number of ranks along the data axis.
  """

  ring: jax.Array  # [rows, width] uint32, stamps of the last steps; layout in jaxpace.core.ring
  step: jax.Array  # [] int32, steps completed
  rank: jax.Array  # [] int32, number of this rank's device in the whole job
  last_exit: jax.Array  # [2] uint32, the previous step's last exit; zero before the first step
  delay: jax.Array  # [] float32 s, asked for the next step
  info: jax.Array  # [MAX_DECISIONS] float32, the pacer's columns that came with that delay
  arrivals: jax.Array  # [R] float32 s, of the last step; NaN where unknown
  delays: jax.Array  # [R] float32 s, applied in the last step; NaN where unknown
  step_time: jax.Array  # [] float32 s, own, of the last step; NaN where unknown
  transfers: jax.Array  # [slots] float32 s, own estimate of every collective's own time in the last step; NaN unknown
  pacer: PacerState


def fresh(rank: int, ranks: int, rows: int, slots: int, pacer: Pacer | None) -> PaceState:
  """Makes one rank's state before its first step, as numpy arrays.

  Args:
    rank: number of the rank's device in the job.
    ranks: ranks along the data axis.
    rows: steps the ring holds.
    slots: collectives a row has room for.
    pacer: whose state it will carry, or None.
  """
  unknown = np.full((ranks,), np.nan, np.float32)
  # Not jax.Arrays yet, as the fields are in a step: `Instrumented.init` makes those, over its devices.
  leaves: dict[str, Any] = {
      "ring": np.zeros((rows, ring.row_width(slots)), np.uint32),
      "step": np.zeros((), np.int32),
      "rank": np.asarray(rank, np.int32),
      "last_exit": np.zeros((2,), np.uint32),
      "delay": np.zeros((), np.float32),
      "info": np.zeros((ring.MAX_DECISIONS,), np.float32),
      "arrivals": unknown,
      "delays": unknown.copy(),
      "step_time": np.full((), np.nan, np.float32),
      "transfers": np.full((slots,), np.nan, np.float32),
      "pacer": () if pacer is None else jax.tree.map(np.asarray, pacer.init(ranks)),
  }
  return PaceState(**leaves)


def laid_out_like(leaf: jax.Array, value: np.ndarray) -> jax.Array:
  """Makes an array of `value` that takes the place of `leaf`: a compiled step takes it as it took that.

  Args:
    leaf: an array of the pace state.
    value: of its shape and dtype, whole and the same in every process.
  """
  if not leaf.committed:  # as `init` makes them for pmap: on no device in particular
    return jnp.asarray(value)
  return jax.make_array_from_callback(leaf.shape, leaf.sharding, lambda index: value[index])
