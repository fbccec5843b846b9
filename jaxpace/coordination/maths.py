"""The few operations that `trial` is written in, on arrays and on plain numbers alike.

The state machine that judges a pacer runs inside the compiled step; the one that judges housekeeping runs on the host,
once a step, where a hundred operations on arrays would cost more than they decide. Both are the same lines of code.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

Number = Any
"""A [] array of float32, int32 or bool in `ARRAYS`; a Python float, int or bool in `PLAIN`."""


class Maths(NamedTuple):
  """Operations on numbers of one kind. Arithmetic, comparisons, & and | of booleans are Python's own."""

  where: Callable[[Number, Number, Number], Number]  # both branches are evaluated
  least: Callable[[Number, Number], Number]
  most: Callable[[Number, Number], Number]
  no: Callable[[Number], Number]  # of a boolean
  log: Callable[[Number], Number]
  sqrt: Callable[[Number], Number]
  real: Callable[[Number], Number]  # float32 of anything
  whole: Callable[[Number], Number]  # int32 of a float, cut
  word: Callable[[Number], Number]  # uint32 of an int32 or a Python int; in `PLAIN` a Python int in [0, 2^32)
  flag: Callable[[Number], Number]  # bool of a Python bool
  either: Callable[[Number, Callable[[], Any], Callable[[], Any]], Any]
  # Tuples of numbers of the same types by one function or the other.


def _word(x: Number) -> Number:
  return np.uint32(x & 0xFFFFFFFF) if isinstance(x, int) else jax.lax.bitcast_convert_type(x, np.uint32)


def _either(chosen: Number, one: Callable[[], Any], other: Callable[[], Any]) -> Any:
  """Runs the chosen one on a CPU, which saves a microsecond or three; elsewhere both, and keeps what is chosen.

  An accelerator must not branch: the host would have to read what is chosen in the middle of the step.
  """
  def both(chosen: Number) -> Any:
    return jax.tree.map(lambda a, b: jnp.where(chosen, a, b), one(), other())

  return jax.lax.platform_dependent(chosen, cpu=lambda chosen: jax.lax.cond(chosen, one, other), default=both)


ARRAYS = Maths(
    where=jnp.where, least=jnp.minimum, most=jnp.maximum, no=jnp.logical_not, log=jnp.log, sqrt=jnp.sqrt,
    real=lambda x: jnp.asarray(x).astype(np.float32), whole=lambda x: jnp.asarray(x).astype(np.int32),
    word=_word, flag=lambda x: jnp.asarray(x, np.bool_), either=_either)

PLAIN = Maths(
    where=lambda chosen, a, b: a if chosen else b, least=min, most=max, no=lambda x: not x,
    log=lambda x: math.log(x) if x > 0 else -math.inf, sqrt=lambda x: math.sqrt(x) if x >= 0 else math.nan,
    real=float, whole=int, word=lambda x: int(x) & 0xFFFFFFFF, flag=bool,
    either=lambda chosen, one, other: one() if chosen else other())
