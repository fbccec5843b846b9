"""Pacers made of pacers."""

from __future__ import annotations

import operator
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from jaxpace.coordination import knobs
from jaxpace.core.durations import bounded
from jaxpace.core.types import Decision, Hold, Moment, Observation, Pacer, PacerState

_ZERO = np.float32(0)


def chain(*pacers: Pacer) -> Pacer:
  """Runs several pacers side by side and applies the longest delay that any of them asks for.

  Delays don't add up. So no rank is held longer than the pacer that asked most would have held it
  by itself: what each guarantees (a longest delay, a cost) holds for the chain with the largest of
  their bounds. All see the same observation, whose delays are those applied, whoever asked for
  them.

  Of pacers that hold collectives back, the longest hold is done, and it is listened while any of
  them wants to.

  Of token buckets (`pace_early_ranks`) each pays for all that is held back. A step is held back by
  at most the longest delay, which was in its owner's bucket, so that bucket is never overdrawn, and
  the sum of L stays within the largest `cost`.

  >>> def always(seconds):
  ...   decision = Decision(jnp.float32(seconds), {})
  ...   return Pacer(lambda ranks: (), lambda seen, state: (decision, state))
  >>> pacer = chain(always(1e-3), limit(always(9e-3), 4e-3))
  >>> decision, state = pacer.update(None, pacer.init(2))
  >>> print(f"{decision.delay:.3f}")
  0.004

  Args:
    *pacers: at least one.

  Returns:
    A pacer whose state is the tuple of theirs. Columns of one name get the pacer's place appended
    from the second on: `slack`, `slack_2`.

  Raises:
    ValueError: there are none, or one is not a pacer.
  """
  if not pacers:
    raise ValueError(
        "jaxpace.chain needs at least one pacer: jaxpace.chain(jaxpace.pace_early_ranks(), mine).")
  knobs.pacers(*pacers)

  def init(ranks: int) -> tuple[PacerState, ...]:
    return tuple(pacer.init(ranks) for pacer in pacers)

  def update(observation: Observation,
             state: tuple[PacerState, ...]) -> tuple[Decision, tuple[PacerState, ...]]:
    longest, after = jnp.float32(0), []
    info: dict[str, jax.Array] = {}
    for place, (pacer, own) in enumerate(zip(pacers, state, strict=True), start=1):
      decision, own = pacer.update(observation, own)
      after.append(own)
      # NaN and negative delays lose.
      longest = jnp.where(decision.delay > longest, decision.delay, longest)
      info |= {(name if name not in info else f"{name}_{place}"): value
               for name, value in decision.info.items()}
    return Decision(longest, info), tuple(after)

  def hold(moment: Moment, state: tuple[PacerState, ...]) -> tuple[Hold, tuple[PacerState, ...]]:
    longest, listen, after = jnp.float32(0), jnp.zeros((), jnp.bool_), []
    for pacer, own in zip(pacers, state, strict=True):
      if pacer.hold is not None:
        asked, own = pacer.hold(moment, own)
        longest = jnp.where(asked.seconds > longest, asked.seconds, longest)
        listen = listen | asked.listen
      after.append(own)
    return Hold(longest, listen), tuple(after)

  return Pacer(init, update, hold if any(pacer.hold is not None for pacer in pacers) else None)


def limit(pacer: Pacer, max_delay: float) -> Pacer:
  """Cuts a pacer's delays, and each hold before a collective, to [0, max_delay]; NaN and negative
  ones to 0.

  Args:
    pacer: whose delays to cut.
    max_delay: s, 0 to 10.

  Returns:
    A pacer with the same state and columns.

  Raises:
    ValueError: an argument is out of range.
  """
  knobs.pacers(pacer)
  most = knobs.delay("max_delay", max_delay)

  def update(observation: Observation, state: PacerState) -> tuple[Decision, PacerState]:
    decision, state = pacer.update(observation, state)
    return decision._replace(delay=bounded(decision.delay, most)), state

  inner_hold = pacer.hold
  if inner_hold is None:
    return Pacer(pacer.init, update)

  def hold(moment: Moment, state: PacerState) -> tuple[Hold, PacerState]:
    asked, state = inner_hold(moment, state)
    return asked._replace(seconds=bounded(asked.seconds, most)), state

  return Pacer(pacer.init, update, hold)


def only_ranks(pacer: Pacer, ranks: Sequence[int]) -> Pacer:
  """Lets a pacer delay some ranks only. On the others it goes on observing, and its columns go on
  in the trace.

  Args:
    pacer: whose delays to keep to these ranks.
    ranks: indices along the data axis, at least one.

  Returns:
    A pacer with the same state and columns.

  Raises:
    ValueError: an index is not a whole number from 0, or, when it is initialised or traced, there
      is no such rank; or the pacer holds collectives back, which all ranks must do alike.
  """
  knobs.pacers(pacer)
  if pacer.hold is not None:
    raise ValueError("jaxpace.only_ranks was given a pacer that holds collectives back, such as "
                     "jaxpace.take_turns(): all ranks must hold for the same time. Leave "
                     "only_ranks out.")
  try:
    chosen = sorted({operator.index(rank) for rank in ranks})
  except TypeError:
    chosen = []
  if not chosen or chosen[0] < 0 or chosen[-1] >= 2**31:
    raise ValueError(
        f"ranks={ranks!r} must be a sequence of rank numbers from 0, such as range(8) or [0, 3].")

  def check(count: int) -> None:
    if chosen[-1] >= count:
      raise ValueError(f"jaxpace.only_ranks was given rank {chosen[-1]}, but there are {count} "
                       f"along the data axis, numbered from 0 to {count - 1}.")

  def init(ranks: int) -> PacerState:
    check(ranks)
    return pacer.init(ranks)

  def update(observation: Observation, state: PacerState) -> tuple[Decision, PacerState]:
    check(observation.arrivals.shape[0])
    decision, state = pacer.update(observation, state)
    here: jax.Array = jnp.any(observation.rank == np.asarray(chosen, np.int32))
    return decision._replace(delay=jnp.where(here, decision.delay, _ZERO)), state

  return Pacer(init, update)
