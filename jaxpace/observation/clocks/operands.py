"""What a timer is given: the operands it waits for, and where its timestamp goes beside."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxpace.core import fields
from jaxpace.core.varying import vary, varying


class Event(NamedTuple):
  """Where a timestamp goes beside its value: an event in the ring of timestamps of the process."""

  program: int
  """Number of the program, among those of the process that write to the ring; 0 for none."""
  place: jax.Array | None
  """What a clock must be given to know its device, see `jaxpace.observation.clocks.Clock.place`."""
  tag: int = 0
  """The program's own, see `jaxpace.core.ring_layout`."""

  def at(self, tag: int) -> Event:
    """The program's event with a tag."""
    return self._replace(tag=tag) if self.program else self


NOWHERE = Event(0, None)
"""Of a timestamp that is its value alone."""

LONGEST_S = 60.0
"""No delay may be longer, whatever the limit: a step that sleeps for a minute looks like a hang."""


def nanoseconds(limit_s: float) -> int:
  """Checks the limit of a delay and converts it to nanoseconds.

  Raises:
    ValueError: it is not a finite number of seconds from 0 to `LONGEST_S`.
  """
  return round(fields.number("limit", limit_s, 0, LONGEST_S, "seconds, 20 ms is 20e-3") * 1e9)


def prepare(arrays: Sequence[jax.Array]) -> list[jax.Array]:
  """Makes arrays fit to be operands of one custom call or callback.

  PRNG keys become their key data. Gradients are cut, since timers have no derivative. Under
  `jax.shard_map(check_vma=True)` all operands of a primitive must vary over the same mesh axes, so
  each is cast to the union.

  Returns:
    The arrays.
  """
  given = [jax.lax.stop_gradient(plain(array)) for array in arrays]
  axes = frozenset[str]().union(*map(varying, given))
  return [vary(array, axes) for array in given]


def first_element(value: jax.Array) -> jax.Array:
  """What shows that an array is there without a layout of its own: [], of an array of any kind.

  A timer's operands are in default layout, which must not be forced upon matrices.
  """
  if not value.ndim or jax.dtypes.issubdtype(value.dtype, jax.dtypes.extended):
    return value
  return jax.lax.slice(value, (0,) * value.ndim, (1,) * value.ndim).reshape(())


def plain(array: jax.Array) -> jax.Array:
  """An array; of a PRNG key its data."""
  array = jnp.asarray(array)
  return jax.random.key_data(array) if jnp.issubdtype(array.dtype, jax.dtypes.prng_key) else array
