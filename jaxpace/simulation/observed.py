"""What each rank's pacer saw in a recorded run, rebuilt from its times to the last bit where they
were recorded."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from jaxpace.core.durations import elapsed_seconds
from jaxpace.runs.run import MISSING, CollectiveTimes, Run

_PER_LOW = np.float32(1e-9)  # as in jaxpace.observation.clocks.words


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
  record: Any = ()  # OnRecord of these steps; () where nothing was held and nobody is asked


def timestamped_alone(run: Run) -> Run:
  """The run without the collectives in loops of an instrumented step, which timestamps have timed:
  no pacer sees those."""
  marks = run.plan.get("marks")
  slots = {mark.get("collective") for mark in (marks if isinstance(marks, list) else [])
           if isinstance(mark, dict)}
  entries = run.plan.get("collectives")
  others = {entry.get("slot") for entry in (entries if isinstance(entries, list) else [])
            if isinstance(entry, dict) and entry.get("of") is not None} - slots
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
    run: the recorded run, with at least one timestamped collective.
    ranks: recorded ranks along the data axis, by their index along it.
    slots: slots of the waits; a collective whose slot is beyond is left out.
    part: slice of the step axis.
  """
  ranks = np.asarray(ranks)
  before = slice(max(part.start - 1, 0), part.stop)
  lead = part.start - before.start  # 0 for the run's first step: it has no step before
  newest = run.attempt[:, before].max(axis=0)

  def cut(collective: CollectiveTimes) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    enter, leave = collective.enter_ns[ranks, before], collective.exit_ns[ranks, before]
    known = ((collective.attempt[ranks, before] == newest) & (newest >= 0) & (enter != MISSING)
             & (leave != MISSING))
    return enter, leave, known

  times = [cut(collective) for collective in run.collectives]
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
    made = (nearest + offset).clip(0).astype(np.float32) * _PER_LOW
    recorded = (np.rint(made.astype(np.float64) * 1e9) * 1e-9).astype(np.float32)
    result = np.where(recorded == seconds, made, result)
  return result
