"""A mesh for the package's small programs, whatever mesh the training loop has in context.

`jax.set_mesh` makes `jit` refuse arrays on other devices than the mesh's, and
`jax.sharding.use_abstract_mesh` all arrays. A copy of this process's part of the pace state is on
this process's devices alone.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding


def of_array(array: jax.Array) -> AbstractContextManager[Any]:
  """A context in which programs take this array: its own mesh, or one of its device alone."""
  if isinstance(array.sharding, NamedSharding) and isinstance(array.sharding.mesh, Mesh):
    return jax.set_mesh(array.sharding.mesh)
  devices = [shard.device for shard in array.addressable_shards]
  return jax.set_mesh(Mesh(np.array(devices), ("local",), axis_types=(AxisType.Auto,)))


def of_mesh(mesh: Mesh) -> AbstractContextManager[Any]:
  """A context in which programs take arrays on this mesh."""
  return jax.set_mesh(mesh)
