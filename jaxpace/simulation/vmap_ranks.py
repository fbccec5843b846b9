"""Runs one pacer on all ranks of a job, without computing R times over what is the same on all of
them.

Ranks that see the same arrivals keep the same estimates of them. What of a pacer's state can differ
between ranks is found in its traced program: whatever depends on the rank's own number or waits.
The rest is carried once: with 4,096 ranks that is the difference between 4,096 and 16 million
numbers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.extend.core
import jax.numpy as jnp

from jaxpace.core import pacing
from jaxpace.core.types import Decision, Observation, Pacer

OWN = Observation._make(name in ("rank", "waits") for name in Observation._fields)._replace(
    counts=(), holds=())
"""What of an observation differs between the ranks of a job whose collectives all ranks leave
together."""


class PacerOfRanks(NamedTuple):
  """A pacer of R ranks. Own leaves of its state have a leading axis [R], the others are of all
  ranks."""

  init: Callable[[], Any]
  update: Callable[[Observation, Any], tuple[Decision, Any]]
  """Observation whose `OWN` fields are [R, ...] -> decision with a delay [R] and columns [R],
  state."""
  own: Any  # the state's tree, True where a leaf differs between ranks


def vmap_ranks(pacer: Pacer, ranks: int, slots: int) -> PacerOfRanks:
  """Makes a pacer of R ranks out of a rank's.

  Args:
    pacer: of one rank.
    ranks: R.
    slots: collectives of a step, the length of the observation's waits.

  Raises:
    ValueError: the pacer doesn't return what a pacer must.
  """
  state = jax.tree.map(jnp.asarray, pacer.init(ranks))
  seen = Observation(step=jnp.int32(0), rank=jnp.int32(0),
                     arrivals=jnp.zeros((ranks,), jnp.float32),
                     delays=jnp.zeros((ranks,), jnp.float32),
                     waits=jnp.zeros((slots,), jnp.float32), step_time=jnp.float32(0),
                     job_step_time=jnp.float32(0), job_transfers=jnp.zeros((slots,), jnp.float32),
                     job_transfers_now=jnp.zeros((slots,), jnp.float32))

  def update(observation: Observation, state: Any) -> tuple[Decision, Any]:
    return pacing.decide(pacer, observation, state)

  own = _own_leaves(update, seen, state)
  axes = jax.tree.map(lambda differs: 0 if differs else None, (OWN, own))
  update_all = jax.vmap(update, in_axes=axes, out_axes=(0, axes[1]))

  def spread(leaf: jax.Array, differs: bool) -> jax.Array:
    return jnp.broadcast_to(leaf, (ranks, *leaf.shape)) if differs else leaf

  def init() -> Any:
    return jax.tree.map(spread, state, own)

  return PacerOfRanks(init, update_all, own)


def _own_leaves(update: Callable[..., Any], seen: Observation, state: Any) -> Any:
  """Which leaves of the state come to depend on what differs between ranks: the state's tree of
  bools."""
  program = jax.make_jaxpr(update)(seen, state).jaxpr
  leaves, tree = jax.tree.flatten(state)
  before = jax.tree.leaves(OWN)
  own = [False] * len(leaves)
  while True:
    # An equation that reads what differs makes all it returns differ: coarse, and never wrong on
    # that side.
    differs = {v for v, d in zip(program.invars, [*before, *own], strict=True) if d}
    for equation in program.eqns:
      if any(isinstance(v, jax.extend.core.Var) and v in differs for v in equation.invars):
        differs.update(equation.outvars)
    results = program.outvars[len(program.outvars) - len(leaves):]
    after = [o or (isinstance(v, jax.extend.core.Var) and v in differs)
             for o, v in zip(own, results, strict=True)]
    if after == own:
      return jax.tree.unflatten(tree, own)
    own = after
