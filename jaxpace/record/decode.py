"""Turns timestamps into the columns of the recorded tables. Pure numpy: no device, no clock, no
I/O.

What a timestamp means is `jaxpace.core.plan`'s: the time between two successive timestamps belongs
to the later mark's segment.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from jaxpace.core import durations
from jaxpace.core.plan import BACKWARD, COMPUTE, DELAY, FORWARD, GAP, SYNC, UPDATE, Plan
from jaxpace.core.ring_layout import MAX_DECISIONS
from jaxpace.record.ring.executions import Executions, join

Columns = dict[str, np.ndarray]
"""Columns of one table, all of one length. A masked entry of a masked array, or an absent column,
is null."""

_PHASES = (FORWARD, BACKWARD, COMPUTE, SYNC, UPDATE)


class Previous(NamedTuple):
  """The last step decoded before this batch; the first gap is measured from its end."""

  step: int
  end_ns: int


class Held(NamedTuple):
  """What was done before each of C collectives in n steps; m times it was listened."""

  # [n, C] int64 ns, lost by holding; -1 where nothing could be held
  lost: np.ndarray
  # [n, C] float32 s, asked for and listened; NaN where the pacer's answer was not followed
  asked: np.ndarray
  # [n, C] float32 s, the last time it was listened; NaN where it was not
  heard: np.ndarray
  # [n, C] int64, how often
  listened: np.ndarray
  # [m] int64 each: place of the step, of the collective, and how often before it was listened there
  row: np.ndarray
  place: np.ndarray
  turn: np.ndarray
  # [m] float32 s each
  reading: np.ndarray
  telling: np.ndarray


class TimestampedSteps(NamedTuple):
  """What one rank's timestamps and numbers say of n steps, in the order in which they ran."""

  # [n] int64
  step: np.ndarray
  # [n, timestamps] int64 ns, in the order of the plan's timestamps; 0 where not taken
  times: np.ndarray
  # [n] float32 s, asked for and applied; NaN where not known
  delay: np.ndarray
  applied: np.ndarray
  # [n, columns] float32
  decisions: np.ndarray
  held: Held | None = None
  # of these steps' program, one each; None where nothing within loops is marked
  executions: Executions | None = None

  def picked(self, chosen: np.ndarray) -> TimestampedSteps:
    """Some of the steps: [n] bool."""
    if chosen.all():
      return self
    held, place = self.held, np.cumsum(chosen) - 1
    if held is not None:
      kept = chosen[held.row]
      held = Held._make([*(each[chosen] for each in held[:4]), place[held.row[kept]],
                         *(each[kept] for each in held[5:])])
    runs = None if self.executions is None else self.executions.picked(chosen)
    return TimestampedSteps._make([*(each[chosen] for each in self[:5]), held, runs])


def joined(parts: Sequence[TimestampedSteps]) -> TimestampedSteps:
  """Joins steps of one rank and plan end to end."""
  if len(parts) == 1:
    return parts[0]
  helds = [part.held for part in parts if part.held is not None]
  held = None
  if len(helds) == len(parts):
    before = np.cumsum([0, *(len(part.step) for part in parts[:-1])])
    row = np.concatenate([each.row + offset for each, offset in zip(helds, before, strict=True)])
    all_of = [np.concatenate(columns) for columns in zip(*helds, strict=True)]
    held = Held(*all_of)._replace(row=row)
  runs = [part.executions for part in parts if part.executions is not None]
  plain = [np.concatenate(columns) for columns in zip(*(part[:5] for part in parts), strict=True)]
  return TimestampedSteps._make([*plain, held, join(runs) if len(runs) == len(parts) else None])


def decode(own: TimestampedSteps, plan: Plan, rank: int, process: int, attempt: int,
           previous: Previous | None = None) -> tuple[Columns, Columns]:
  """Makes columns of one rank's steps.

  A phase the plan has no timestamp for is absent (null), never 0: forward and backward that can't
  be told apart are `compute_ns`. Phases that occur several times add up. A timestamp that is 0 was
  not
  taken: what it bounds is null.

  Args:
    own: n steps, by number.
    plan: what each timestamp means.
    rank: this rank's index along the data axis.
    process: index of the process that owns it.
    attempt: 0, then 1, 2, ... after restarts.
    previous: last step decoded before this batch, for the first row's `gap_ns`; None if there is
      none.

  Returns:
    Columns of the `steps` table [n] and of the `collectives` table [n * timestamped collectives],
    both ordered by step.
  """
  marks, steps, times = plan.marks, own.step, own.times
  taken = times != 0
  identity = whose(steps, rank, process, attempt)
  columns: Columns = dict(identity)
  kinds = [timestamp.kind for timestamp in marks]
  start = kinds.index("start") if "start" in kinds else 0
  end = len(marks) - 1 - kinds[::-1].index("end") if "end" in kinds else len(marks) - 1
  columns["start_ns"] = _null(times[:, start], ~taken[:, start])
  columns["end_ns"] = _null(times[:, end], ~taken[:, end])
  for segment, (total, unknown) in _segments(times, taken, plan).items():
    name = f"{segment}_ns" if segment in _PHASES else f"phase_{segment}_ns"
    columns[name] = _null(total, unknown)
  columns["gap_ns"] = gaps(steps, times[:, start], times[:, end], taken[:, start] & taken[:, end],
                           previous)
  columns["delay_ns"] = _nanoseconds(own.delay)
  columns["delay_applied_ns"] = _nanoseconds(own.applied)
  for i, name in enumerate(plan.decisions[:MAX_DECISIONS]):
    values = own.decisions[:, i]
    columns[f"decision_{name}"] = _null(values, np.isnan(values))
  by_collective = _collectives(identity, times, taken, plan)
  if own.held is not None:
    columns["held_ns"] = _held(own.held, by_collective, plan)
  return columns, by_collective


def concatenate(parts: list[Columns]) -> Columns:
  """Joins batches of the same table end to end; a column one of them lacks is null there."""
  names = list(dict.fromkeys(name for part in parts for name in part))
  lengths = [len(part["step"]) for part in parts]
  joined: Columns = {}
  for name in names:
    dtype: Any = next(part[name].dtype for part in parts if name in part)
    pieces = [part[name] if name in part else np.ma.masked_all(length, dtype)
              for part, length in zip(parts, lengths, strict=True)]
    masked = any(isinstance(piece, np.ma.MaskedArray) for piece in pieces)
    joined[name] = np.ma.concatenate(pieces) if masked else np.concatenate(pieces)
  return joined


def join_host(columns: Columns, host: Mapping[str, np.ndarray]) -> Columns:
  """Adds one process's host columns to its `steps` columns, by step.

  Args:
    columns: `steps` columns.
    host: "step" [m] int64, and named [m] columns. Later entries of a step win.

  Returns:
    New columns; null where the host has nothing for a step.
  """
  names = [name for name in host if name != "step"]
  if not names or not len(host["step"]):
    return dict(columns)
  order = np.argsort(host["step"], kind="stable")
  known = host["step"][order]
  at = np.searchsorted(known, columns["step"], side="right") - 1
  missing = (at < 0) | (known[np.maximum(at, 0)] != columns["step"])
  joined = dict(columns)
  for name in names:
    values = host[name][order][np.maximum(at, 0)]
    joined[name] = _null(values, missing | np.ma.getmaskarray(values))
  return joined


def _segments(times: np.ndarray, taken: np.ndarray,
              plan: Plan) -> dict[str, tuple[np.ndarray, np.ndarray]]:
  """Total duration of every segment, and where it is unknown; the delay and the gap have columns of
  their own."""
  totals: dict[str, tuple[np.ndarray, np.ndarray]] = {}
  for i, timestamp in enumerate(plan.marks):
    if i == 0 or timestamp.segment in (DELAY, GAP):
      continue
    duration, unknown = times[:, i] - times[:, i - 1], ~(taken[:, i] & taken[:, i - 1])
    if timestamp.segment in totals:
      total, missing = totals[timestamp.segment]
      duration, unknown = total + duration, missing | unknown
    totals[timestamp.segment] = duration, unknown
  return totals


def whose(steps: np.ndarray, rank: int, process: int, attempt: int) -> Columns:
  """Makes the columns that say of whom rows are, [n], from their steps."""
  return {"step": steps, **{name: np.full(len(steps), value, np.int32) for name, value in
                            (("rank", rank), ("process", process), ("attempt", attempt))}}


def gaps(steps: np.ndarray, starts: np.ndarray, ends: np.ndarray, known: np.ndarray,
         previous: Previous | None) -> np.ndarray:
  """Time since the preceding step's end; null after a hole.

  Args:
    steps: [n] numbers, rising.
    starts: [n] ns.
    ends: [n] ns.
    known: [n] whether both are known.
    previous: the step before these; None if there is none.
  """
  if previous is None:
    previous = Previous(-2, 0)
  before = np.concatenate([[previous.step], steps[:-1]])[:len(steps)]
  before_end = np.concatenate([[previous.end_ns], ends[:-1]])[:len(steps)]
  before_known = np.concatenate([[previous.end_ns != 0], known[:-1]])[:len(steps)]
  return _null(starts - before_end, (before != steps - 1) | ~before_known | ~known)


def _collectives(identity: Columns, times: np.ndarray, taken: np.ndarray, plan: Plan) -> Columns:
  """One row per step and timestamped collective, step-major."""
  enter = {timestamp.collective: i for i,
           timestamp in enumerate(plan.marks) if timestamp.kind == "enter"}
  leave = {timestamp.collective: i for i,
           timestamp in enumerate(plan.marks) if timestamp.kind == "exit"}
  timestamped = [c for c in plan.collectives if c.slot in enter and c.slot in leave]
  n, slots = len(identity["step"]), len(timestamped)
  columns: Columns = {name: np.repeat(values, slots) for name, values in identity.items()}

  def tiled(values: list, dtype) -> np.ndarray:
    return np.tile(np.array(values, dtype), n)

  columns["collective"] = tiled([c.slot for c in timestamped], np.int32)
  columns["name"] = tiled([c.name for c in timestamped], np.str_)
  columns["axis"] = tiled([c.axis for c in timestamped], np.str_)
  columns["bytes"] = _null(tiled([c.bytes or 0 for c in timestamped], np.int64),
                           tiled([c.bytes is None for c in timestamped], np.bool_))
  for name, at in (("enter_ns", enter), ("exit_ns", leave)):
    index = [at[c.slot] for c in timestamped]
    columns[name] = _null(times[:, index].reshape(-1), ~taken[:, index].reshape(-1))
  return columns


def _held(held: Held, columns: Columns, plan: Plan) -> np.ndarray:
  """Adds what holding took to the `collectives` columns, and moves entries behind it: ns in a step,
  all together."""
  places = {c.slot: i for i, c in enumerate(plan.collectives)}
  slots = columns["collective"][:len(columns["collective"]) // max(len(held.lost), 1)]
  own = [places[slot] for slot in slots.tolist()]
  lost, asked, heard, listened = (each[:, own].reshape(-1) for each in held[:4])
  untouched = lost < 0
  lost = np.where(untouched, 0, lost)
  columns["held_ns"], columns["heard_ns"] = _null(lost, untouched), _measured(heard)
  columns["asked_ns"] = _nanoseconds(asked)
  columns["listened"] = _null(listened, ~np.isfinite(asked))
  columns["enter_ns"] = columns["enter_ns"] + lost
  return lost.reshape(len(held.lost), -1).sum(axis=1)


def listening(steps: TimestampedSteps, plan: Plan, rank: int, process: int,
              attempt: int) -> Columns:
  """Makes columns of what a job heard before its collectives: the same on all of its ranks.

  Args:
    steps: as in `decode`.
    plan: what each column means.
    rank: whose they are.
    process: index of the process that owns it.
    attempt: as in `decode`.

  Returns:
    Columns of the `listening` table, by step, collective and turn; none where nothing can be held.
  """
  held = steps.held
  if held is None:
    return {}
  slots = np.array([c.slot for c in getattr(plan, "timestamped", plan).collectives], np.int32)
  return {**whose(steps.step[held.row], rank, process, attempt),
          "collective": slots[held.place], "turn": held.turn.astype(np.int32),
          "heard_ns": _measured(held.reading), "told_ns": _measured(held.telling)}


_LONGEST = 1e9
"""Seconds, thirty years: what is asked beyond is recorded as this, since its nanoseconds would not
fit."""


def _nanoseconds(seconds: np.ndarray) -> np.ndarray:
  unknown = ~np.isfinite(seconds)
  fitting = np.clip(np.where(unknown, 0, seconds).astype(np.float64), -_LONGEST, _LONGEST)
  return _null(np.rint(fitting * 1e9).astype(np.int64), unknown)


def _measured(seconds: np.ndarray) -> np.ndarray:
  """Nanoseconds of what `jaxpace.core.durations.elapsed_seconds` makes float32 seconds of again, to
  the last bit, where the seconds are a difference of timestamps below four seconds."""
  nearest = _nanoseconds(seconds)
  whole = np.ma.getdata(nearest)
  found = whole.copy()
  rounded = whole.astype(np.float32)
  spacing = np.maximum(np.spacing(rounded).astype(np.int64), 1)
  for offset in (2, -2, 1, -1, 0):  # the nearest last: it wins
    made = rounded.astype(np.int64) + offset * spacing
    found = np.where(durations.elapsed_seconds(np.maximum(made, 0)) == seconds, made, found)
  return _null(found, np.ma.getmaskarray(nearest))


def _null(values: np.ndarray, unknown: np.ndarray) -> np.ndarray:
  """Masks `values` where `unknown`; leaves them a plain array where nothing is."""
  return (np.ma.masked_array(np.ma.getdata(values), unknown) if unknown.any()
          else np.ma.getdata(values))
