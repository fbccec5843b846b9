"""How a pacer is asked: the one builder of observations, and the one reader of decisions.

Live, simulated and replayed steps differ in where their numbers come from. What is made of these
numbers before a pacer sees them, and what becomes of its answer, is here, and nowhere else.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxpace.core import arrivals as said
from jaxpace.core import ring
from jaxpace.core.types import Decision, Observation, Pacer

_NAN = np.float32(np.nan)


class Shared(NamedTuple):
  """What went along in a step's message and is the same on all ranks; NaN where not known.

  S slots, float32 seconds.
  """

  step_time: jax.Array  # [] rank 0's, of the step before
  transfers: jax.Array  # [S] mean over ranks of their own estimates, of the step before
  # [S] mean over ranks, of this step's collectives that were over when the message left
  waits: jax.Array


def nothing_shared(slots: int) -> Shared:
  """Returns what is shared where no message carries it: nothing is known."""
  return Shared(jnp.float32(_NAN), jnp.full((slots,), _NAN), jnp.full((slots,), _NAN))


def over_before(carrier: int | None, slots: int) -> np.ndarray:
  """Says which of a step's collectives are over when the message that shares them leaves.

  Collectives run in the order of their slots, so these are the ones before the carrier.

  Args:
    carrier: slot of the collective in which the message rides; None where nothing is shared.
    slots: S.

  Returns:
    [S] bool.
  """
  return np.arange(slots) < (0 if carrier is None else carrier)


def observe(step: jax.Array, rank: jax.Array, arrivals: jax.Array, delays: jax.Array,
            waits: jax.Array, step_time: jax.Array, shared: Shared
            ) -> tuple[Observation, jax.Array]:
  """Makes what a rank's pacer sees of a step.

  R ranks, S slots, float32 seconds, NaN where not known.

  Args:
    step: [] int32, the step that is done.
    rank: [] int32, own index along the axis.
    arrivals: [R] undelayed; others' are NaN unless shared.
    delays: [R] applied; others' are NaN unless shared.
    waits: [S] own exit - enter of each collective.
    step_time: [] own last exit to own last exit.
    shared: what all ranks know alike.

  Returns:
    The observation, and [S] own estimates of each collective's own time, which the next step's
    message will carry.
  """
  transfers = said.transfers(waits, arrivals, delays, rank)
  observation = Observation(
      step=step, rank=rank, arrivals=arrivals, delays=delays, waits=waits, step_time=step_time,
      job_step_time=shared.step_time, job_transfers=shared.transfers,
      job_transfers_now=said.transfers_now(shared.waits, arrivals, delays))
  return observation, transfers


def decide(pacer: Pacer, observation: Observation, state: Any) -> tuple[Decision, Any]:
  """Asks a pacer, and makes plain float32 scalars of its answer.

  Args:
    pacer: whose `update` is called.
    observation: of the step that is done.
    state: the pacer's, as `init` or the last `update` made it.

  Returns:
    The decision, its columns sorted by name, and the state after.

  Raises:
    ValueError: the pacer didn't return what a pacer must.
  """
  decision, after = pacer.update(observation, state)
  names = _checked(decision, after, state)
  delay = _scalar(decision.delay)
  info = {name: _scalar(decision.info[name]) for name in names}
  return Decision(delay, info), after


def _scalar(value: Any) -> jax.Array:
  return jnp.asarray(value).astype(jnp.float32).reshape(())


def _checked(made: Any, after: Any, before: Any) -> tuple[str, ...]:
  """Checks what a pacer's update returned. Returns the names of its columns, sorted."""
  if not isinstance(made, Decision):
    raise ValueError("pacer.update must return (Decision, state); the first is a "
                     f"{type(made).__name__}.")
  if len(made.info) > ring.MAX_DECISIONS:
    raise ValueError(f"A pacer may record {ring.MAX_DECISIONS} columns a step; this one has "
                     f"{len(made.info)}: {', '.join(sorted(made.info))}.")

  def describe(tree: Any) -> Any:
    return jax.tree.map(lambda leaf: (jnp.shape(leaf), jnp.result_type(leaf).name), tree)

  given: Any = jax.tree.structure(before)
  if jax.tree.structure(after) != given or describe(after) != describe(before):
    raise ValueError("pacer.update must return a state of the same structure, shapes and dtypes as "
                     "it was given: it is carried from step to step.\nGiven:    "
                     f"{describe(before)}\nReturned: {describe(after)}")
  return tuple(sorted(made.info))
