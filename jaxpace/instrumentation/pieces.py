"""The explicit pieces underneath `instrument`, for those who want them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxpace.observation.clocks import gate, resolve_clock, words
from jaxpace.observation.phases import collective_scope


def psum(value: Any, axis_name: str | Sequence[str], *, name: str) -> Any:
  """Sums over an axis like `jax.lax.psum`, under a name that the plan and the report show.

  Args:
    value: any pytree of arrays.
    axis_name: the axis, or several.
    name: letters, digits and underscores, at most 32.

  Returns:
    The sum, of the same structure and shapes.

  Raises:
    ValueError: the name is not of that form.
  """
  with collective_scope(name):
    return jax.lax.psum(value, axis_name)


def pmean(value: Any, axis_name: str | Sequence[str], *, name: str) -> Any:
  """Averages over an axis like `jax.lax.pmean`, under a name; see `psum`."""
  with collective_scope(name):
    return jax.lax.pmean(value, axis_name)


def delay(value: Any, seconds: jax.typing.ArrayLike, *, limit: float = 1.0, clock: str = "auto"
          ) -> Any:
  """Holds a value back: returns it, the same bit for bit, `seconds` after it is ready.

  For fault injection and for pacers of one's own; inside a compiled function, on any rank by
  itself.

  >>> import jax, jaxpace
  >>> float(jax.jit(lambda x: jaxpace.delay(x, 1e-3))(2.0))
  2.0

  Args:
    value: a pytree of arrays; all of them are held back, for the delay begins when all are ready.
    seconds: [] float, may be traced; negative and NaN count as 0.
    limit: seconds; a longer delay is cut to this.
    clock: as in `jaxpace.instrument`.

  Raises:
    ValueError: `limit` is not a number from 0 to 60.
  """
  leaves, tree = jax.tree.flatten(value)
  leaves = [jnp.asarray(leaf) for leaf in leaves]
  chosen = resolve_clock(clock, jax.default_backend())
  _, late = chosen.delay(jnp.asarray(seconds, jnp.float32), limit, words.zero(), *leaves)
  return jax.tree.unflatten(tree, gate(chosen, late, leaves))
