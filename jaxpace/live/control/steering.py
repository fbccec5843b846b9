"""Puts a request into the pace state, in arrays of the shape, type and layout of those it
replaces."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

from jaxpace.coordination.steer import Steering
from jaxpace.core import own_context
from jaxpace.core.pace import PaceState, change_pacer_state
from jaxpace.core.packing import Packed
from jaxpace.live.control.request import MAX_STEP, ControlRequest


def check(pace: Any) -> None:
  """Checks that this is a pace state whose pacer can be steered.

  Raises:
    TypeError: it is something else.
    ValueError: nothing in it can be steered, or it was donated.
  """
  if not isinstance(pace, PaceState):
    raise TypeError("Control takes the pace state and returns it: pace = control(pace), before the "
                    f"step. This is a {type(pace).__name__}.")
  if not isinstance(pace.pacer, Packed) or not _steered(pace.pacer):
    raise ValueError("The pacer of this pace state can't be steered. Make it so where it is given "
                     "to jaxpace.instrument: pacer=jaxpace.steerable(jaxpace.pace_early_ranks()).")
  if pace.step.is_deleted():
    raise ValueError("Control was given a pace state that was donated to a step. Give it the one "
                     "the step returned: pace = control(pace), then pace, out = step(pace, "
                     "state, batch).")


def next_step(pace: PaceState) -> int:
  """Reads the number of the step that comes next; waits for those under way."""
  return int(own_context.fetch(pace.step.addressable_shards[0].data).reshape(-1)[0])


def apply(pace: PaceState, request: ControlRequest) -> PaceState:
  """Returns the state with the request in it. Every process does this at the same step; no data is
  exchanged.

  What a request changes is a few numbers among others in the pacer's vector, so its devices' own
  values are read: this waits for the steps under way. It happens once a request.
  """
  ranks = pace.arrivals.shape[-1]
  unknown = np.float32(np.nan)
  mask = np.ones(ranks, bool)
  if request.ranks is not None:
    mask = np.isin(np.arange(ranks), request.ranks)
  values: dict[str, Any] = {
      "enabled": request.enabled,
      "max_delay": unknown if request.max_delay is None else request.max_delay,
      "threshold": unknown if request.threshold is None else request.threshold, "ranks": mask,
      "from_step": request.from_step,
      "until_step": MAX_STEP if request.until_step is None else request.until_step}

  def put(node: Any) -> Any:
    if not isinstance(node, Steering):
      return node
    return Steering(**{name: _like(getattr(node, name), value) for name, value in values.items()})

  def change(state: Any) -> Any:
    return jax.tree.map(put, state, is_leaf=lambda node: isinstance(node, Steering))

  assert isinstance(pace.pacer, Packed)
  return pace._replace(pacer=change_pacer_state(pace.pacer, change))


def _steered(packed: Packed) -> bool:
  state = jax.tree.unflatten(packed.layout.structure, packed.layout.shapes)
  return any(isinstance(node, Steering)
             for node in jax.tree.leaves(state, is_leaf=lambda node: isinstance(node, Steering)))


def _like(leaf: Any, value: Any) -> Any:
  """Makes an array like `leaf` with `value` on every rank."""
  return np.broadcast_to(np.asarray(value, leaf.dtype), leaf.shape)
