"""What each rank's pacer saw in a recorded run, rebuilt from its times to the last bit where they
were recorded; and what its `hold` hears of it, and what its answers come to."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxpace.core import pacing
from jaxpace.core.durations import PER_LOW, elapsed_seconds
from jaxpace.core.types import Pacer
from jaxpace.runs.run import MISSING, CollectiveTimes, Run

_NAN = np.float32(np.nan)


class ObservedSteps(NamedTuple):
  """What was observed, step by step. K steps, R ranks, S slots; float32 seconds, NaN where not
  known."""

  steps: np.ndarray  # [K] int32
  present: np.ndarray  # [K, R] bool: the rank's row of this step is there
  arrivals: np.ndarray  # [K, R] undelayed
  delays: np.ndarray  # [K, R] applied
  asked: np.ndarray  # [K, R] asked for
  waits: np.ndarray  # [K, R, S]
  step_time: np.ndarray  # [K, R] own last exit to own last exit
  record: Any = ()  # OnRecord of these steps; () where nobody asks for it


def timestamped_alone(run: Run) -> Run:
  """The run without the collectives in loops of an instrumented step, which timestamps have timed:
  no pacer sees those."""
  slots = {mark.get("collective") for mark in run.plan.get("marks") or ()}
  others = {entry.get("slot") for entry in run.plan.get("collectives") or ()
            if entry.get("of") is not None} - slots
  if not slots - {None} or not others:
    return run
  return dataclasses.replace(run,
                             collectives=tuple(one for one in run.collectives
                                               if one.slot not in others))


def observe(run: Run, ranks: Sequence[int] | np.ndarray, slots: int, part: slice) -> ObservedSteps:
  """Rebuilds the observations of the steps in `part`.

  As in the live step, a rank's arrival is known from its second step on (the first of an attempt
  has no exit to start from). Here it is unknown after a hole in the record too, where the live rank
  did know it.

  Args:
    ranks: recorded ranks along the data axis, by their index along it.
    slots: slots of the waits; a collective whose slot is beyond is left out.
    part: slice of the step axis.
  """
  ranks = np.asarray(ranks)
  before = slice(max(part.start - 1, 0), part.stop)
  lead = part.start - before.start  # 0 for the run's first step: it has no step before
  newest = run.attempt[:, before].max(axis=0)

  times = [(enter, leave, (enter != MISSING) & (leave != MISSING)) for enter, leave in (
      _times(collective, ranks, before, newest) for collective in run.collectives)]
  first_enter, _, first_known = times[0]
  if (held := run.collectives[0].held) is not None:
    # Entries are after what was held; a rank has arrived before it.
    lost = held.held_ns[ranks, before]
    first_enter = np.where(first_known & (lost != MISSING), first_enter - lost, first_enter)
  _, last_exit, last_known = times[-1]
  follows = np.zeros(first_enter.shape, bool)
  adjacent = (np.diff(run.steps[before]) == 1) & (newest[1:] == newest[:-1])
  follows[:, 1:] = last_known[:, :-1] & adjacent
  previous = np.concatenate([last_exit[:, :1], last_exit[:, :-1]], axis=1)

  applied = _applied(_duration(run, "delay_applied", ranks, before))
  busy = _seconds(previous, first_enter, follows & first_known)
  waits = np.full((*first_enter.shape, slots), np.nan, np.float32)
  for collective, (enter, leave, known) in zip(run.collectives, times, strict=True):
    if collective.slot < slots:
      waits[..., collective.slot] = _seconds(enter, leave, known)
  step_time = _seconds(previous, last_exit, follows & last_known)
  present = (run.attempt[ranks, before] == newest) & (newest >= 0)
  asked = _duration(run, "delay", ranks, before)

  def turned(values: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(np.moveaxis(values[:, lead:], 1, 0))

  return ObservedSteps(run.steps[part].astype(np.int32), turned(present),
                       turned(busy - np.nan_to_num(applied)),
                       turned(np.where(present, applied, np.float32(np.nan))), turned(asked),
                       turned(waits), turned(step_time))


def _times(collective: CollectiveTimes, ranks: np.ndarray, part: slice, newest: np.ndarray
           ) -> tuple[np.ndarray, np.ndarray]:
  """[R, K] entries and exits of one collective in the newest attempt, `MISSING` where not known."""
  there = (collective.attempt[ranks, part] == newest) & (newest >= 0)
  return (np.where(there, collective.enter_ns[ranks, part], MISSING),
          np.where(there, collective.exit_ns[ranks, part], MISSING))


def _seconds(begin: np.ndarray, end: np.ndarray, known: np.ndarray) -> np.ndarray:
  """float32 seconds as `jaxpace.observation.clocks.words.seconds_between` makes them in the step,
  from int64 nanoseconds."""
  return np.where(known, elapsed_seconds(np.where(known, end - begin, 0)), np.float32(np.nan))


def _duration(run: Run, name: str, ranks: np.ndarray, part: slice) -> np.ndarray:
  if name not in run.durations:
    return np.zeros((len(ranks), part.stop - part.start), np.float32)
  return run.durations[name][ranks, part]


def _applied(seconds: np.ndarray) -> np.ndarray:
  """The delay as the step measured it: a whole number of nanoseconds times float32 1e-9.

  The table holds it rounded to nanoseconds, so two units in the last place may be lost (one above 8
  ms); of the numbers that would be recorded as `seconds`, this is one.
  """
  nearest = np.rint(np.nan_to_num(seconds).astype(np.float64) * 1e9).astype(np.int64)
  result = seconds.copy()
  for offset in (2, -2, 1, -1, 0):  # the nearest last: it wins
    made = (nearest + offset).clip(0).astype(np.float32) * PER_LOW
    recorded = (np.rint(made.astype(np.float64) * 1e9) * 1e-9).astype(np.float32)
    result = np.where(recorded == seconds, made, result)
  return result


# What is held.
#
# A pacer's `hold` is asked as in the live step, by the very `jaxpace.core.pacing.until_sent`; where
# it listens it hears what is on record, in order, as long as there is any, and NaN beyond.
#
# By how much a hold lengthens a step, in the model in which all ranks wait for the last one: before
# a collective that the last rank reaches B after the one before, a hold of H in all, of which the
# first S lie before the first time of listening, costs H - min(S, B), for S is counted from the end
# of the collective before and passes while the job computes.

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


def on_record(run: Run, ranks: np.ndarray, slots: int, part: slice, places: int) -> OnRecord:
  """Rebuilds what was held and heard in the steps of `part`, a slice of the step axis; `places` is
  P.

  Of a run that does not say where its pacer was asked, every timestamped collective that can be
  held back counts, from an attempt's second step on.
  """
  before = slice(max(part.start - 1, 0), part.stop)
  lead = part.start - before.start
  shape = part.stop - part.start, slots
  made = OnRecord(np.zeros(shape, bool), np.full(shape, MISSING), np.full(shape, MISSING),
                  np.zeros(shape, np.int32), np.zeros(shape, np.int32),
                  np.full((shape[0], max(places, 1), 2), _NAN), np.full(shape, _NAN),
                  np.zeros(shape[0], np.float32))
  said = was_asked(run)
  newest = run.attempt[:, before].max(axis=0)
  follows = np.zeros(len(newest), bool)
  follows[1:] = (np.diff(run.steps[before]) == 1) & (newest[1:] == newest[:-1]) & (newest[1:] >= 0)
  last = run.collectives[-1]
  previous = np.full((len(ranks), len(newest)), MISSING)
  previous[:, 1:] = np.where(follows[1:], _times(last, ranks, before, newest)[1][:, :-1], MISSING)
  for collective in run.collectives:
    enter, leave = _times(collective, ranks, before, newest)
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


def asker(pacer: Pacer, may: Sequence[int], slots: int, max_hold: float
          ) -> Callable[[Any, OnRecord, Any, Any], tuple[Any, Answers]]:
  """Makes what asks one rank's pacer before the collectives of one step.

  Args:
    pacer: one that has a `hold`.
    may: slots of the collectives before which it may be asked, rising.
    slots: S.
    max_hold: s, as in `jaxpace.instrument`.

  Returns:
    A function (step, that step's record, [S] s when the last rank reaches each collective, the
    pacer's state) -> the state after, and the answers [S].
  """
  order = np.asarray(may, np.int32)
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
    return after, jax.tree.map(lambda all_, found: all_.at[order].set(found),
                               nothing_asked(slots), answers)

  return ask


def nothing_asked(slots: int) -> Answers:
  """The answers of a step, [S], before whose collectives no pacer is asked."""
  return Answers(jnp.full(slots, _NAN), jnp.zeros(slots, jnp.int32), jnp.zeros(slots, jnp.int32),
                 jnp.zeros(slots, jnp.float32))


def agree(answers: Answers, recorded: OnRecord) -> np.ndarray:
  """[K, S] bool: what was asked for, and how often it was listened, is what the record has."""
  held = np.asarray(answers.held)
  asked = np.rint(np.nan_to_num(held).astype(np.float64) * 1e9).astype(np.int64)
  return ((asked == recorded.asked_ns) & (np.asarray(answers.listened) == recorded.listened)
          & np.isfinite(held))
