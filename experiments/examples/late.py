"""Makes one rank of a job late on purpose, inside its compiled step, by a known amount.

This is a fault for demonstrations and tests. The library itself never makes a rank late.
"""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import io_callback

from experiments.examples.start import UserError

_ASLEEP = np.uint32(0xFFFFFFFF)
"""A value the callback never returns; the compiler does not know that, so it has to wait for it."""


def make_late(train_step: Callable[..., Any], axis_name: str, rank: int,
              seconds: float) -> Callable[..., Any]:
  """Delays the batch of one rank by a sleep between the start of its step and its forward pass.

  The first image, token or other leaf of the batch depends on the sleep's result by real dataflow:
  an optimization barrier would order nothing on the CPU. No value changes.

  Args:
    train_step: `(state, batch) -> out`, run by every device under `jax.shard_map` or `jax.pmap`.
    axis_name: axis along which the ranks are counted.
    rank: index along that axis of the one to make late.
    seconds: how long it sleeps in each step; 0 returns `train_step` as it is.

  Returns:
    `train_step` with the lateness put in.

  Raises:
    UserError: `seconds` is negative or not finite, or, when the step is traced, there is no such
      rank.
  """
  if not (math.isfinite(seconds) and seconds >= 0):
    raise UserError(f"A rank cannot be made late by {seconds} s: give a number of zero or more.")
  if seconds == 0:
    return train_step

  # no argument: moving one to the host can hang where devices share few threads
  def sleep() -> np.uint32:
    time.sleep(seconds)
    return np.uint32(0)

  @functools.wraps(train_step)
  def late_step(state: Any, batch: Any) -> Any:
    ranks = jax.lax.axis_size(axis_name)
    if rank >= ranks:
      raise UserError(f"Rank {rank} cannot be made late: there are {ranks}, numbered from 0. "
                      f"Choose --late_rank below {ranks}, or start more processes.")
    leaves, tree = jax.tree.flatten(batch)
    first = leaves[0]
    # always true, and known only when the batch is there
    here = first.ravel()[0] != _never(first.dtype)
    awake = jax.lax.cond(
        here & (jax.lax.axis_index(axis_name) == rank),
        lambda: io_callback(sleep, jax.ShapeDtypeStruct((), jnp.uint32)),
        lambda: jnp.uint32(0))
    leaves[0] = jnp.where(awake == _ASLEEP, jnp.zeros_like(first), first)
    return train_step(state, jax.tree.unflatten(tree, leaves))

  return late_step


def _never(dtype: Any) -> Any:
  """Returns a value that no pixel and no token has."""
  return jnp.array(-jnp.inf if jnp.issubdtype(dtype, jnp.floating) else jnp.iinfo(dtype).max, dtype)
