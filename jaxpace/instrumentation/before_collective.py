"""Listening, and holding back, before a collective: `Pacer.hold` in the compiled step.

Before a timestamped bucket the pacer is asked. As long as it wants to listen:

    wait       until `seconds` after the job's last collective, or listening, was over
    listen     a sum of one zero over the data axis, between two timestamps
    tell       the least of all ranks' times, by another tiny collective
    ask again

What was heard is thus a collective's result, the same on all ranks, and so is the answer to it:
all ranks take the same turns of the loop. The answer to the first question comes of the pacer's
state alone, which must be the same on all ranks too. A job in which it isn't (a state that was
restored on some ranks only, hosts whose processors round differently) would wait for ever, so what
the pacer answers by is compared in each step, by a number that every rank shares beside its
arrival, and nobody holds in a step after one in which the numbers were not all alike.

What is asked for and heard goes to the ring of timestamps where the step has one, each reading as
it is
heard: the record of them is what a pacer's `hold` can be replayed from.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxpace.core import pacing, packing, ring_layout
from jaxpace.core.pace import PaceState
from jaxpace.core.packing import Packed
from jaxpace.core.types import Hold, Moment, Pacer
from jaxpace.core.varying import vary, varying
from jaxpace.instrumentation import checks
from jaxpace.observation.clocks import Clock, gate, words
from jaxpace.observation.clocks.operands import Event

_ZERO = np.float32(0)
_FACTOR = 2654435761
"""Odd, and near the golden ratio of 2**32: spreads what it multiplies over all bits."""


class Held(NamedTuple):
  """What was done before one collective."""

  seconds: jax.Array  # float32 [] s, asked for and listened, the same on all ranks
  # uint32 [2] ns, by how much later for it this rank began, but for what it waited for later ranks
  # meanwhile: own entry + lost is when it would have begun to wait for them
  lost: jax.Array


class _Turn(NamedTuple):
  """What is carried from one time of listening to the next."""

  over: jax.Array  # uint32 [2], when the last collective or listening was over
  now: jax.Array  # uint32 [2], the last timestamp
  lost: jax.Array  # float32 [] s
  reported: jax.Array  # float32 [] s, own, reporting the last time


class Holding:
  """Asks the pacer before the collectives of one step, in order.

  Attributes:
    state: the pacer's.
    digest: float32 [], by which ranks are compared.
    held: what was done so far, by slot.
  """

  def __init__(self, clock: Clock, pacer: Pacer, max_hold: float, one: PaceState,
               axis: tuple[str, ...], events: Event):
    """Begins."""
    packed = checks.packed_pacer(one)
    assert packed is not None and not isinstance(one.alike, tuple), "made for such a pacer"
    self._clock, self._pacer, self._max_hold, self._step = clock, pacer, max_hold, one.step
    # Whether all ranks were alike in the step before: bool [].
    self._allowed, self._axis, self._events = one.alike, axis, events
    state = packing.unpack(packed)
    self.digest = digest(packed, pacer)
    self._axes = frozenset(axis).union(*map(varying, jax.tree.leaves(state)))
    self.state = self._own(state)
    self._spent = self._own(jnp.float32(0))
    self.held: dict[int, Held] = {}

  def before(self, slot: int, over: jax.Array, ready: jax.Array) -> jax.Array:
    """Holds the job back before a collective.

    Args:
      slot: the collective's.
      over: uint32 [2], when the job's last collective was over; zero before the first step.
      ready: uint32 [2], when this rank could begin.

    Returns:
      uint32 [2], the timestamp after which this rank may begin.
    """
    moment = pacing.before_collective(self._step, slot, self._spent)
    zero = jnp.float32(0)
    turn = _Turn(over, ready, zero, zero)
    asked = pacing.until_sent(self._pacer, moment, self.state, self._max_hold, self._allowed,
                              functools.partial(self._listen, slot), turn, self._own)
    turn, moment, self.state = asked.carried, asked.moment, asked.state
    begin = self._wait(asked.hold.seconds, turn.over, turn.now)
    self._spent = moment.step_held + asked.hold.seconds
    lost = turn.lost + turn.reported + words.seconds_between(turn.now, begin)
    held = self.held[slot] = Held(moment.held + asked.hold.seconds, words.of_seconds(lost))
    seconds = jnp.where(self._allowed, held.seconds, jnp.float32(np.nan))
    return self._note(begin, slot, ring_layout.LOST, [
        held.lost, words.of_bits(seconds), words.of_bits(moment.heard),
        words.of_bits(moment.listened)])

  def _note(self, chain: jax.Array, slot: int, which: int, numbers: list[jax.Array]) -> jax.Array:
    """Writes numbers to the ring, if the step has one; what follows comes after."""
    if not self._events.program:
      return chain
    event = self._events.at(ring_layout.held_value(slot, which))
    return self._clock.note(chain, jnp.stack(numbers), event)

  def _wait(self, seconds: jax.Array, over: jax.Array, now: jax.Array) -> jax.Array:
    """Waits until `seconds` after `over`, of which some has gone by `now`; not in a first step."""
    left = jnp.where(words.is_zero(over), _ZERO, seconds - words.seconds_between(over, now))
    return self._clock.delay(left, self._max_hold, now)[1]

  def _listen(self, slot: int, asked: Hold, _moment: Moment, turn: _Turn
              ) -> tuple[jax.Array, jax.Array, _Turn]:
    """One turn: waits, listens, and reports."""
    begin = self._wait(asked.seconds, turn.over, turn.now)
    (token,) = gate(self._clock, begin, [self._own(jnp.zeros((1,)))])
    end = self._clock.timestamp(begin, jax.lax.psum(token, self._axis))
    # Of the rank that came last: others waited for it. Telling takes its time, too, which all know
    # only when it is reported the next time.
    took = [words.seconds_between(turn.now, begin), words.seconds_between(begin, end),
            turn.reported]
    least = jax.lax.pmin(self._own(jnp.stack(took)), self._axis)
    now = self._clock.timestamp(end, least)
    lost = turn.lost + least[0] + least[1] + least[2]
    reported = words.seconds_between(end, now)
    now = self._note(now, slot, ring_layout.READING,
                     [words.of_bits(least[1]), words.of_bits(least[2])])
    return least[1], least[2], _Turn(now, now, lost, reported)

  def _own(self, tree: Any) -> Any:
    """Typed as differing from rank to rank, as the pace state is; see `jaxpace.core.varying`."""
    return jax.tree.map(lambda leaf: vary(jnp.asarray(leaf), self._axes), tree)


# Whether all ranks answer alike.


def digest(packed: Packed, pacer: Pacer) -> jax.Array:
  """Sums up what a pacer's `hold` answers by: float32 [], a whole number below 2**24.

  Of the state's numbers only those that the answers depend on, now or later: other pacers of a
  chain may know what no other rank knows.
  """
  tree = jax.eval_shape(packing.unpack, packed)
  matter = _matters(pacer, tree)
  weights = np.zeros(packed.words.shape, np.uint32)
  total, others = jnp.uint32(0), iter(packed.others)
  for place, counts in zip(packed.layout.places(), matter, strict=True):
    if place is None:
      leaf = next(others)
      if counts:
        bits = _bits(leaf).reshape(-1)
        total += jnp.sum(bits * _weights(0, bits.shape[0]))
    elif counts:
      weights[slice(*place)] = _weights(*place)
  total += jnp.sum(packed.words * weights)
  return (total >> np.uint32(8)).astype(jnp.float32)


def _bits(leaf: jax.Array) -> jax.Array:
  """Of an array that is carried by itself: uint32, of any shape."""
  if jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key):
    return jax.random.key_data(leaf).astype(jnp.uint32)
  if jnp.issubdtype(leaf.dtype, jnp.floating):
    return jax.lax.bitcast_convert_type(leaf.astype(jnp.float32), jnp.uint32)
  return leaf.astype(jnp.uint32)


def _weights(begin: int, end: int) -> np.ndarray:
  """Odd numbers, one for each place."""
  return ((np.arange(begin, end, dtype=np.uint64) * 2 + 1) * _FACTOR % 2**32).astype(np.uint32) | 1


def _matters(pacer: Pacer, tree: Any) -> list[bool]:
  """Which leaves of a pacer's state `hold` answers by, now or in what it makes of the state."""
  zero = jnp.float32(0)
  moment = jax.eval_shape(lambda: pacing.before_collective(jnp.int32(0), 0, zero))
  # As it is asked in a step, which says so where it answers wrongly.
  asked = functools.partial(pacing.hold_back, pacer, max_hold=1.0)
  traced = jax.make_jaxpr(asked)(moment, tree).jaxpr
  given = traced.invars[len(jax.tree.leaves(moment)):]
  after = traced.outvars[2:]
  wanted = set(_reached(traced, traced.outvars[:2]))
  while True:
    more = wanted.union(_reached(traced, [out for leaf, out in zip(given, after, strict=True)
                                          if leaf in wanted]))
    if more == wanted:
      return [leaf in wanted for leaf in given]
    wanted = more


def _reached(jaxpr: Any, outputs: Sequence[Any]) -> set[Any]:
  """Variables that some outputs of a jaxpr are made of; a nested call's outputs of all it reads."""
  found = {out for out in outputs if not hasattr(out, "val")}
  for equation in reversed(jaxpr.eqns):
    if found.intersection(equation.outvars):
      found.update(read for read in equation.invars if not hasattr(read, "val"))
  return found


def agree(digests: jax.Array) -> jax.Array:
  """Whether all ranks' digests are there and the same: bool [], of [ranks] float32."""
  # Of NaN no comparison holds.
  return jnp.min(digests) == jnp.max(digests)


def notices(wanted: bool, slots: int, holding: Holding | None) -> tuple[str, ...]:
  """Says of which collectives a pacer that holds back is not asked."""
  if not wanted:
    return ()
  if holding is None or not holding.held:
    return ("Nothing is held back: no all-reduce of the step can carry what the ranks must know of "
            "each other (see share), or none of its collectives can be held back without a risk to "
            "the last bits of the results.",)
  left = [slot for slot in range(slots) if slot not in holding.held]
  if not left:
    return ()
  several = len(left) > 1
  return (f"Collective{'s' if several else ''} {', '.join(map(str, left))} can't be held back "
          f"without a risk to the last bits of the results: before {'them' if several else 'it'} "
          "the pacer is not asked.",)
