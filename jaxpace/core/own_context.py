"""The context in which the package's own small programs run, whatever the training loop has set.

`jax.set_mesh` makes `jit` refuse arrays on other devices than the mesh's,
`jax.sharding.use_abstract_mesh` all arrays; a transfer guard refuses to copy what nobody asked to
copy; `debug_nans` stops at a NaN that stands for a time not known yet. What the package computes
beside a step must neither fail on these nor change with them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding

_SETTINGS: tuple[tuple[str, Any], ...] = (
    ("transfer_guard", "allow"), ("default_device", None), ("default_matmul_precision", None),
    # Every array of the package has a type of its own: none may be cut to 32 bits.
    ("enable_x64", True),
    ("debug_nans", False), ("debug_infs", False), ("check_tracer_leaks", False),
    ("debug_key_reuse", False), ("disable_jit", False), ("no_tracing", False),
    ("numpy_rank_promotion", "allow"), ("numpy_dtype_promotion", "standard"))
"""Context managers of `jax` and what each is set to; one that this JAX lacks is left out."""

_WAYS = ("host_to_device", "device_to_device", "device_to_host")


@contextlib.contextmanager
def on(place: jax.Array | Mesh | None) -> Iterator[None]:
  """Enters the context: JAX's defaults, and as its mesh `place`, or the mesh of an array's devices.

  None leaves the mesh as it is, for what is to stay on no device in particular.

  Some 60 us: once for all that a step needs.
  """
  with contextlib.ExitStack() as entered:
    for name, value in _SETTINGS:
      if hasattr(jax, name):
        entered.enter_context(getattr(jax, name)(value))
    if place is not None:
      entered.enter_context(jax.set_mesh(place if isinstance(place, Mesh) else _mesh_of(place)))
    yield


def fetch(array: jax.Array) -> np.ndarray[Any, Any]:
  """Copies an array of this process to the host, whatever guards transfers."""
  with unguarded():
    return np.asarray(array)


def unguarded() -> AbstractContextManager[None]:
  """Lifts what guards transfers, where anything does: to lift it costs as much as a small copy."""
  guards = (getattr(jax.config, f"jax_transfer_guard_{way}") for way in _WAYS)
  guarded = any(guard not in (None, "allow") for guard in guards)
  return jax.transfer_guard("allow") if guarded else contextlib.nullcontext()


def _mesh_of(array: jax.Array) -> Mesh:
  if isinstance(array.sharding, NamedSharding) and isinstance(array.sharding.mesh, Mesh):
    return array.sharding.mesh
  devices = [shard.device for shard in array.addressable_shards]
  return Mesh(np.array(devices), ("local",), axis_types=(AxisType.Auto,))
