"""Along which manual mesh axes a value varies.

Under `jax.shard_map(check_vma=True)` a value's type says over which axes the devices' copies
differ; operations want their operands to agree. Under `check_vma=False`, `pmap` and plain `jit`
nothing is tracked and all of this does nothing.
"""

from __future__ import annotations

from typing import Any

import jax


def varying(value: Any) -> frozenset[str]:
  """Manual axes over which a value's type says it varies; empty where jax doesn't track it."""
  return varying_of_aval(jax.typeof(value))


def varying_of_aval(aval: Any) -> frozenset[str]:
  """The same, of an abstract value."""
  kind = getattr(aval, "manual_axis_type", None)  # None of what is no array
  return frozenset() if kind is None else frozenset(kind.varying)


def manual_axes() -> tuple[str, ...]:
  """Names of the mesh axes that are manual here, by `shard_map` or `pmap`, else ()."""
  return tuple(getattr(jax.sharding.get_abstract_mesh(), "manual_axes", ()))


def automatic_axes() -> tuple[str, ...]:
  """Names of the mesh axes that a `shard_map` with `axis_names` leaves to the compiler, else ()."""
  mesh = jax.sharding.get_abstract_mesh()
  manual = manual_axes()
  if not manual:
    return ()
  return tuple(name for name, size in mesh.shape.items() if name not in manual and size > 1)


def vary(value: jax.Array, axes: frozenset[str] | tuple[str, ...]) -> jax.Array:
  """Returns `value`, its type varying over `axes` too. No data moves."""
  missing = tuple(sorted(set(axes) - varying(value)))
  return jax.lax.pcast(value, missing, to="varying") if missing else value
