"""How a pacer is asked: the one builder of observations, and the one reader of decisions.

Live, simulated and replayed steps differ in where their numbers come from. What is made of these
numbers before a pacer sees them, and what becomes of its answer, is here, and nowhere else.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxpace.core.durations import bounded, transfer, transfers_now, valid
from jaxpace.core.ring_layout import MAX_DECISIONS
from jaxpace.core.types import Balancer, Decision, Hold, Moment, Observation, Pacer, pick

_NAN = np.float32(np.nan)
MOST_LISTENED = 128
"""Times a job listens before one collective, at most, whatever a pacer asks."""


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


def by_slot(times: jax.Array, slots: int) -> jax.Array:
  """Cuts or fills with NaN: [n] float32 s -> [slots]."""
  times = times[:slots]
  return jnp.pad(times, (0, slots - times.shape[0]), constant_values=_NAN)


def over_before(carrier: int | None, slots: int) -> np.ndarray:
  """Says which of a step's collectives, [S] bool, are over when the message that shares them leaves
  with the collective of slot `carrier`, None for none: those before it, as they run in order."""
  return np.arange(slots) < (0 if carrier is None else carrier)


def observe(step: jax.Array, rank: jax.Array, arrivals: jax.Array, delays: jax.Array,
            waits: jax.Array, step_time: jax.Array, shared: Shared,
            holds: jax.Array | tuple[()] = ()) -> tuple[Observation, jax.Array]:
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
    holds: [S] asked for and listened before each collective; () where nothing can be held.

  Returns:
    The observation, and [S] own estimates of each collective's own time, which the next step's
    message will carry.
  """
  # Arrivals are those at the first collective, so they say nothing of the later ones: there it is
  # the wait.
  transfers = waits.at[0].set(transfer(waits[0], arrivals, delays, rank))
  observation = Observation(
      step=step, rank=rank, arrivals=arrivals, delays=delays, waits=waits, step_time=step_time,
      job_step_time=shared.step_time, job_transfers=shared.transfers,
      job_transfers_now=transfers_now(shared.waits, arrivals, delays), holds=holds)
  return observation, transfers


def decide(pacer: Pacer, observation: Observation, state: Any) -> tuple[Decision, Any]:
  """Asks a pacer, and makes plain float32 scalars of its answer: the decision, its columns sorted
  by name, and the state after. Raises ValueError where that isn't what a pacer must return."""
  decision, after = _answer("pacer.update", pacer.update(observation, state), Decision)
  if not isinstance(decision.info, dict):
    raise ValueError("A pacer's info must be a dict of single numbers, {} for none; this one is a "
                     f"{type(decision.info).__name__}.")
  names = sorted(decision.info)
  if len(names) > MAX_DECISIONS:
    raise ValueError(f"A pacer may record {MAX_DECISIONS} columns a step; this one has "
                     f"{len(names)}: {', '.join(names)}.")
  _same_state("pacer.update", after, state)
  delay = _scalar("delay", decision.delay)
  info = {name: _scalar(f"info[{name!r}]", decision.info[name]) for name in names}
  return Decision(delay, info), after


def decide_counts(balancer: Balancer, observation: Observation, state: Any
                  ) -> tuple[jax.Array, Any]:
  """Asks a balancer, and checks the form of its answer: [R] int32 counts, whatever they are, -1 for
  what is no whole number, and the state after. Raises ValueError where that isn't what a balancer
  must return."""
  answer = balancer.update(observation, state)
  if not isinstance(answer, tuple) or len(answer) != 2:
    raise ValueError("A balancer's update must return (counts, state); it returned a "
                     f"{type(answer).__name__}.")
  counts, after = jnp.asarray(answer[0]), answer[1]
  ranks = np.shape(observation.counts)
  if counts.shape != ranks:
    raise ValueError(f"A balancer must return the counts of all ranks, {list(ranks)} int32; it "
                     f"returned {list(counts.shape)}.")
  if not jnp.issubdtype(counts.dtype, jnp.integer):
    # NaN would become a number, 0 say, that may well add up.
    counts = jnp.where(jnp.isfinite(counts) & (counts == jnp.rint(counts)), counts, -1)
  return counts.astype(jnp.int32), after


def before_collective(step: jax.Array, slot: int | jax.Array, step_held: jax.Array) -> Moment:
  """Makes the moment at which a pacer is first asked before a collective.

  Args:
    step: [] int32, the step under way.
    slot: place of the collective in the step.
    step_held: [] float32 s, asked for and listened before this step's earlier collectives.
  """
  zero = jnp.float32(0)
  return Moment(step, jnp.asarray(slot, jnp.int32), jnp.float32(_NAN), jnp.int32(0), zero,
                step_held)


def listened(moment: Moment, asked: Hold, heard: jax.Array, reported: jax.Array | None = None
             ) -> Moment:
  """Makes the moment after a pacer's `hold` was followed as `hold_back` returned it, and it was
  listened: what that took, [] float32 s, NaN where that isn't known, and what else took time, which
  counts too but means nothing."""
  took = asked.seconds + jnp.where(valid(heard), heard, np.float32(0))
  if reported is not None:
    took += jnp.where(valid(reported), reported, np.float32(0))
  return moment._replace(heard=heard, listened=moment.listened + np.int32(1),
                         held=moment.held + took, step_held=moment.step_held + took)


def hold_back(pacer: Pacer, moment: Moment, state: Any, max_hold: float) -> tuple[Hold, Any]:
  """Asks a pacer how long to hold a collective back: what is to be done, and the state after. All
  that is asked for and listened in one step is at most `max_hold` s, but for what the last time of
  listening takes. Raises ValueError where the answer isn't what a pacer must return."""
  assert pacer.hold is not None
  asked, after = _answer("pacer.hold", pacer.hold(moment, state), Hold)
  _same_state("pacer.hold", after, state)
  left = jnp.maximum(np.float32(max_hold) - moment.step_held, np.float32(0))
  seconds = bounded(_scalar("seconds", asked.seconds), left)
  again = _scalar("listen", asked.listen, jnp.bool_)
  again &= (seconds < left) & (moment.listened < np.int32(MOST_LISTENED))
  return Hold(seconds, again), after


class Asked(NamedTuple):
  """What a pacer asked for before one collective, once that begins."""

  hold: Hold  # its last answer, which doesn't listen
  moment: Moment  # at which it gave it
  state: Any  # the pacer's, after it
  carried: Any  # as `listen` returned it


Listen = Callable[[Hold, Moment, Any], tuple[jax.Array, jax.Array, Any]]
"""Waits as was asked, and listens: of the answer, its moment and what is carried along, what was
heard and reported (see `listened`), and what is carried on."""


def until_sent(pacer: Pacer, moment: Moment, state: Any, max_hold: float, allowed: jax.Array,
               listen: Listen, carried: Any = (), typed: Callable[[Any], Any] = lambda tree: tree
               ) -> Asked:
  """Asks a pacer before a collective, and listens as long as it wants to: live and in replay.

  Args:
    pacer: one that has a `hold`.
    moment: as `before_collective` makes it.
    max_hold: as in `hold_back`.
    allowed: [] bool, whether its answers are followed; where they aren't it was not asked, and its
      state stays.
    listen: what listening is.
    carried: of `listen`, before the first time.
    typed: gives trees the type in which they are carried from turn to turn.

  Returns:
    What it came to.
  """
  def ask(moment: Moment, state: Any) -> tuple[Hold, Moment, Any]:
    hold, after = hold_back(pacer, moment, state, max_hold)
    after = pick(allowed, after, state)
    seconds = jnp.where(allowed, hold.seconds, np.float32(0))
    return Hold(seconds, hold.listen & allowed), moment, after

  def turn(asked: Asked) -> Asked:
    heard, reported, carried = listen(asked.hold, asked.moment, asked.carried)
    moment = typed(listened(asked.moment, asked.hold, heard, reported))
    return typed(Asked(*ask(moment, asked.state), carried))

  begin = typed(Asked(*ask(typed(moment), state), carried))
  return jax.lax.while_loop(lambda asked: asked.hold.listen, turn, begin)


def _answer(who: str, answer: Any, kind: type) -> tuple[Any, Any]:
  """Takes apart what a pacer's function returned, a pair of such a kind and the state."""
  # Both kinds are themselves tuples of two.
  pair = isinstance(answer, (tuple, list)) and len(answer) == 2 and not isinstance(answer, kind)
  if not pair or not isinstance(answer[0], kind):
    found = f"the first is a {type(answer[0]).__name__}" if pair else (
        f"it returned a {type(answer).__name__}")
    raise ValueError(f"{who} must return ({kind.__name__}, state); {found}.")
  return answer[0], answer[1]


def _scalar(name: str, value: Any, dtype: Any = jnp.float32) -> jax.Array:
  try:
    array = jnp.asarray(value)
  except (TypeError, ValueError):
    array = None
  if array is None or array.size != 1:
    found = f"a {type(value).__name__}" if array is None else f"of shape {list(array.shape)}"
    raise ValueError(f"A pacer's {name} must be one number; this one is {found}.")
  return array.astype(dtype).reshape(())


def _same_state(who: str, after: Any, before: Any) -> None:
  """Raises ValueError unless the state after is as the one before, but for its values."""
  def describe(tree: Any) -> Any:
    return jax.tree.map(lambda leaf: (jnp.shape(leaf), jnp.result_type(leaf).name), tree)

  given: Any = jax.tree.structure(before)
  if jax.tree.structure(after) != given or describe(after) != describe(before):
    raise ValueError(f"{who} must return a state of the same structure, shapes and dtypes as the "
                     f"given one: it is carried from step to step.\nGiven:    {describe(before)}\n"
                     f"Returned: {describe(after)}")
