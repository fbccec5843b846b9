"""What a replayed pacer's `hold` is shown of a recorded run, and what its answers come to.

It is asked as in the live step, by the very `jaxpace.core.pacing.until_sent`; where it listens it
hears what is on record, in order, as long as there is any, and NaN beyond.

By how much a hold lengthens a step, in the model in which all ranks wait for the last one: before a
collective that the last rank reaches B after the one before, a hold of H in all, of which the first
S lie before the first time of listening, costs H - min(S, B), for S is counted from the end of the
collective before and passes while the job computes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxpace.core import pacing
from jaxpace.core.durations import elapsed_seconds
from jaxpace.core.types import Pacer
from jaxpace.runs.run import MISSING, Run

_NAN = np.float32(np.nan)
MOST_READINGS = 4096
"""Readings of a step that a pacer is shown."""


class OnRecord(NamedTuple):
  """What was held and heard in recorded steps. K steps, S slots, P readings per step at most."""

  allowed: np.ndarray  # [K, S] bool: the pacer was asked, and its answer followed
  asked_ns: np.ndarray  # [K, S] int64, asked for and listened; `MISSING` where it wasn't asked
  listened: np.ndarray  # [K, S] int64, how often; likewise
  begins: np.ndarray  # [K, S] int32, place of the first reading before that collective
  there: np.ndarray  # [K, S] int32, readings on record before that collective
  readings: np.ndarray  # [K, P, 2] float32 s, heard and reported
  # [K, S] float32 s, from the collective before to the last rank's entry; NaN where not known
  reached: np.ndarray
  longer: np.ndarray  # [K] float32 s, by how much what was held then lengthened the step


class Answers(NamedTuple):
  """What a pacer asked for: [K, S]; NaN or 0 where it wasn't asked."""

  held: Any  # float32 s, asked for and listened
  listened: Any  # int32, how often it wanted to listen
  unanswered: Any  # int32, how many of these times have no reading on record
  longer: Any  # float32 s, by how much that lengthens the step


def was_asked(run: Run) -> bool:
  """Whether the record says before which collectives the pacer that ran was asked."""
  return any(c.held is not None and bool((c.held.asked_ns != MISSING).any())
             for c in run.collectives)


def most_readings(run: Run) -> int:
  """P: the readings on record in any one step of a run, up to `MOST_READINGS`."""
  if run.listening is None:
    return 0
  return min(int(np.unique(run.listening.step, return_counts=True)[1].max()), MOST_READINGS)


def nothing_on_record(count: int, slots: int, places: int = 1) -> OnRecord:
  """What there is on record of so many steps in which nobody was asked."""
  shape = count, slots
  return OnRecord(np.zeros(shape, bool), np.full(shape, MISSING), np.full(shape, MISSING),
                  np.zeros(shape, np.int32), np.zeros(shape, np.int32),
                  np.full((count, max(places, 1), 2), _NAN), np.full(shape, _NAN),
                  np.zeros(count, np.float32))


def on_record(run: Run, ranks: np.ndarray, slots: int, part: slice, places: int) -> OnRecord:
  """Rebuilds what was held and heard in the steps of `part`.

  Of a run that does not say where its pacer was asked, every timestamped collective that can be
  held back counts, from an attempt's second step on.

  Args:
    run: the recorded run.
    ranks: recorded ranks along the data axis, by their index along it.
    slots: S.
    part: slice of the step axis.
    places: P, at least 1.
  """
  before = slice(max(part.start - 1, 0), part.stop)
  lead = part.start - before.start
  count = part.stop - part.start
  made = nothing_on_record(count, slots, places)
  said = was_asked(run)
  newest = run.attempt[:, before].max(axis=0)
  follows = np.zeros(len(newest), bool)
  follows[1:] = (np.diff(run.steps[before]) == 1) & (newest[1:] == newest[:-1]) & (newest[1:] >= 0)
  last = run.collectives[-1]
  previous = np.full((len(ranks), len(newest)), MISSING)
  previous[:, 1:] = np.where(follows[1:], _of(last, ranks, before, newest, "exit_ns")[:, :-1],
                             MISSING)
  for collective in run.collectives:
    enter = _of(collective, ranks, before, newest, "enter_ns")
    leave = _of(collective, ranks, before, newest, "exit_ns")
    lost = np.zeros_like(enter)
    if collective.held is not None:
      lost = np.where((enter != MISSING) & (collective.held.held_ns[ranks, before] != MISSING),
                      collective.held.held_ns[ranks, before], 0)
    known = (enter != MISSING) & (previous != MISSING)
    reached = np.where(known, enter - lost - previous, MISSING).max(axis=0)[lead:]
    begun = np.where(known, enter - previous, MISSING).max(axis=0)[lead:]
    made.longer[:] += np.where(reached != MISSING, begun - reached, 0) * 1e-9
    slot = collective.slot
    if slot < slots:
      made.reached[:, slot] = np.where(reached != MISSING, reached * 1e-9, np.nan)
      made.allowed[:, slot] = follows[lead:] & (not said) & (not collective.may_begin_early)
      if said and collective.held is not None:
        for name in ("asked_ns", "listened"):
          values = getattr(collective.held, name)[ranks, before][:, lead:]
          getattr(made, name)[:, slot] = values.max(axis=0)
        made.allowed[:, slot] = made.asked_ns[:, slot] != MISSING
    previous = leave
  _put_readings(run, made, part)
  return made


def _of(collective: Any, ranks: np.ndarray, part: slice, newest: np.ndarray, name: str
        ) -> np.ndarray:
  """[R, K] times of one collective in the newest attempt, `MISSING` where not known."""
  times = getattr(collective, name)[ranks, part]
  return np.where((collective.attempt[ranks, part] == newest) & (newest >= 0), times, MISSING)


def _put_readings(run: Run, made: OnRecord, part: slice) -> None:
  """Lays the readings of the steps in `part` out, those before one collective in a row."""
  heard = run.listening
  if heard is None:
    return
  steps, slots = run.steps[part], made.there.shape[1]
  at = np.minimum(np.searchsorted(steps, heard.step), len(steps) - 1)
  keep = (steps[at] == heard.step) & (heard.collective >= 0) & (heard.collective < slots)
  at, slot, turn = at[keep], heard.collective[keep], heard.turn[keep]
  # In the order of step, collective and turn: the place within a step, and within a collective.
  place = np.arange(len(at)) - np.searchsorted(at, at)
  cell = at * slots + slot
  first = np.searchsorted(cell, cell)
  # After a turn that is missing nobody knows what was heard when.
  sound = (turn == np.arange(len(at)) - first) & (place < made.readings.shape[1])
  flat = made.there.reshape(-1)
  made.begins.reshape(-1)[cell] = place[first]
  np.add.at(flat, cell[sound], 1)
  for i, values in enumerate((heard.heard_ns[keep], heard.told_ns[keep])):
    seconds = np.where(values == MISSING, _NAN,
                       elapsed_seconds(np.where(values == MISSING, 0, values)))
    made.readings[at[sound], place[sound], i] = seconds[sound]


def asker(pacer: Pacer, slots: np.ndarray, max_hold: float
          ) -> Callable[[Any, OnRecord, Any, Any], tuple[Any, Answers]]:
  """Makes what asks one rank's pacer before the collectives of one step.

  Args:
    pacer: one that has a `hold`.
    slots: [S] bool, those before which it may be asked.
    max_hold: s, as in `jaxpace.instrument`.

  Returns:
    A function (step, that step's record, [S] s when the last rank reaches each collective, the
    pacer's state) -> the state after, and the answers [S].
  """
  order = np.flatnonzero(slots).astype(np.int32)
  zero, none = jnp.float32(0), jnp.int32(0)

  def ask(step: Any, row: OnRecord, reached: Any, state: Any) -> tuple[Any, Answers]:
    allowed, begins, there, readings = map(
        jnp.asarray, (row.allowed, row.begins, row.there, row.readings))

    def before(carry: Any, slot: Any) -> tuple[Any, Any]:
      state, spent = carry

      def listen(hold: Any, moment: Any, carried: Any) -> Any:
        first, missing = carried
        known = moment.listened < there[slot]
        at = jnp.clip(begins[slot] + moment.listened, 0, readings.shape[0] - 1)
        heard, reported = jnp.where(known, readings[at], _NAN)
        first = jnp.where(moment.listened == 0, hold.seconds, first)
        return heard, reported, (first, missing + (~known).astype(jnp.int32))

      asked = pacing.until_sent(pacer, pacing.before_collective(step, slot, spent), state, max_hold,
                                allowed[slot], listen, (zero, none))
      moment, seconds = asked.moment, asked.hold.seconds
      first, missing = asked.carried
      held = moment.held + seconds
      hidden = jnp.minimum(jnp.where(moment.listened == 0, seconds, first),
                           jnp.nan_to_num(jnp.maximum(reached[slot], zero)))
      held_back = jnp.where(allowed[slot], held, _NAN)
      answers = Answers(held_back, moment.listened, missing, jnp.maximum(held - hidden, zero))
      return (asked.state, moment.step_held + seconds), answers

    (after, _), answers = jax.lax.scan(before, (state, zero), order)
    blank = Answers(jnp.full(len(slots), _NAN), *(jnp.zeros(len(slots), kind) for kind in
                                                  (jnp.int32, jnp.int32, jnp.float32)))
    return after, jax.tree.map(lambda all_, found: all_.at[order].set(found), blank, answers)

  return ask


def nothing_asked(steps: int, slots: int) -> Answers:
  """The answers where no pacer is asked."""
  none = np.zeros((steps, slots), np.int32)
  return Answers(np.full((steps, slots), _NAN), none, none, np.zeros((steps, slots), np.float32))


def agree(answers: Answers, recorded: OnRecord) -> np.ndarray:
  """[K, S] bool: what was asked for, and how often it was listened, is what the record has."""
  held = np.asarray(answers.held)
  asked = np.rint(np.nan_to_num(held).astype(np.float64) * 1e9).astype(np.int64)
  return ((asked == recorded.asked_ns) & (np.asarray(answers.listened) == recorded.listened)
          & np.isfinite(held))
