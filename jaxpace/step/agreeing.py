"""One decision for all processes that run a program: marks on all of them, or on none."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec


def all_say(yes: bool, devices: Sequence[Any]) -> bool:
  """Whether the processes of all these devices say yes.

  A program with marks and the same one without would meet, since they have the same collectives;
  but not in the same order for certain, so processes must not differ. The processes of a job call
  this at the same place: where they compile the same step for the first time.

  Args:
    yes: what this process says.
    devices: the program's devices. Where they are all this process' own nothing is exchanged.
  """
  if len({device.process_index for device in devices}) < 2:
    return yes
  mesh = Mesh(np.array(devices), ("all",))
  mine = jax.make_array_from_callback(
      (len(devices),), NamedSharding(mesh, PartitionSpec("all")),
      lambda index: np.full(1, yes, np.int32))
  least = jax.jit(jnp.min, out_shardings=NamedSharding(mesh, PartitionSpec()))(mine)
  return bool(np.asarray(least.addressable_shards[0].data))
