"""Turns ring rows into the columns of the recorded tables. Pure numpy: no device, no clock, no I/O.

The layout of a row is `jaxpace.core.ring`'s; what a stamp means is `jaxpace.core.plan`'s: the time
between two successive marks belongs to the later mark's segment.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from jaxpace.core import ring, stamped
from jaxpace.core.plan import BACKWARD, COMPUTE, DELAY, FORWARD, GAP, SYNC, UPDATE, Plan

Columns = dict[str, np.ndarray]
"""Columns of one table, all of one length. A masked entry of a masked array, or an absent column,
is null."""

_PHASES = (FORWARD, BACKWARD, COMPUTE, SYNC, UPDATE)


class Previous(NamedTuple):
  """The last step decoded before this batch; the first gap is measured from its end."""

  step: int
  end_ns: int


class RingRows(NamedTuple):
  """Rows of a ring that were not seen before, oldest first."""

  rows: np.ndarray  # [n, width] uint32
  missing: int  # steps overwritten, or never recorded, between the last one seen and the newest


def new_rows(copy: np.ndarray, after: int) -> RingRows:
  """Picks the rows of one rank's ring written after step `after`, ordered by step.

  Args:
    copy: [rows, width] uint32, one rank's ring as copied from its device.
    after: last step already seen; -1 for none.

  Returns:
    The new rows, and the number of steps between `after` and the newest that the ring no longer
    holds.
  """
  steps = copy[:, ring.STEP].astype(np.int64)
  found = np.flatnonzero((copy[:, ring.FLAGS] & ring.VALID != 0) & (steps > after))
  if not found.size:
    return RingRows(copy[:0], 0)
  _, first = np.unique(steps[found], return_index=True)
  rows = copy[found[first]]
  return RingRows(rows, int(rows[-1, ring.STEP]) - after - len(rows))


def newest_step(copy: np.ndarray) -> int:
  """Returns the newest completed step of a [rows, width] ring, -1 if there is none."""
  valid = copy[:, ring.FLAGS] & ring.VALID != 0
  return int(copy[valid, ring.STEP].max()) if valid.any() else -1


def end_ns(copy: np.ndarray, plan: Plan) -> int:
  """Returns the last stamp of the newest completed step of a [rows, width] ring; ns of the clock it
  is of."""
  newest = copy[(copy[:, ring.FLAGS] & ring.VALID != 0) & (copy[:, ring.STEP] == newest_step(copy))]
  return int(_times(newest, len(plan.marks)).max())


def decode(rows: np.ndarray, plan: Plan, rank: int, process: int, attempt: int,
           previous: Previous | None = None, shift: int = 0) -> tuple[Columns, Columns]:
  """Decodes one rank's ring rows.

  A phase the plan has no mark for is absent (null), never 0: forward and backward that can't be
  told apart are `compute_ns`. Phases that occur several times add up. A stamp that is 0 was not
  taken: what it bounds is null.

  Args:
    rows: [n, width] uint32 rows in any order; those without the `VALID` flag are ignored.
    plan: what each stamp means.
    rank: this rank's index along the data axis.
    process: index of the process that owns it.
    attempt: 0, then 1, 2, ... after restarts.
    previous: last step decoded before this batch, for the first row's `gap_ns`; None if there is
      none.
    shift: ns to add to every stamp, from the clock they are of to the host's.

  Returns:
    Columns of the `steps` table [n] and of the `collectives` table [n * stamped collectives], both
    ordered by step.

  Raises:
    ValueError: the rows are too narrow for the plan's marks.
  """
  marks = plan.marks
  if rows.ndim != 2 or rows.shape[1] < ring.STAMPS + 2 * len(marks):
    raise ValueError(
        f"Ring rows of shape {rows.shape} have no room for the plan's {len(marks)} timestamps: the "
        "plan belongs to another pace state. Make the state with `init` of the same instrumented "
        "function that is recorded.")
  rows, times, taken = stamps(rows, plan, shift)
  steps = rows[:, ring.STEP].astype(np.int64)
  identity: Columns = {"step": steps, "rank": np.full(len(steps), rank, np.int32),
                       "process": np.full(len(steps), process, np.int32),
                       "attempt": np.full(len(steps), attempt, np.int32)}
  columns: Columns = dict(identity)
  kinds = [mark.kind for mark in marks]
  start = kinds.index("start") if "start" in kinds else 0
  end = len(marks) - 1 - kinds[::-1].index("end") if "end" in kinds else len(marks) - 1
  columns["start_ns"] = _null(times[:, start], ~taken[:, start])
  columns["end_ns"] = _null(times[:, end], ~taken[:, end])
  for segment, (total, unknown) in _segments(times, taken, plan).items():
    name = f"{segment}_ns" if segment in _PHASES else f"phase_{segment}_ns"
    columns[name] = _null(total, unknown)
  columns["gap_ns"] = _gap(steps, times[:, start], times[:, end], taken[:, start] & taken[:, end],
                           previous)
  columns["delay_ns"] = _nanoseconds(_floats(rows, ring.DELAY_ASKED))
  columns["delay_applied_ns"] = _nanoseconds(_floats(rows, ring.DELAY_APPLIED))
  for i, name in enumerate(plan.decisions[:ring.MAX_DECISIONS]):
    values = _floats(rows, ring.DECISIONS + i)
    columns[f"decision_{name}"] = _null(values, np.isnan(values))
  by_collective = _collectives(identity, times, taken, plan)
  if plan.holds:
    columns["held_ns"] = _held(rows, by_collective, plan)
  return columns, by_collective


def stamps(rows: np.ndarray, plan: Plan,
           shift: int = 0) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
  """Rows of a ring by step, the [n, marks] int64 ns of their stamps, and which were taken; see
  `decode`."""
  rows = _by_step(rows)
  times = _times(rows, len(plan.marks))
  taken = times != 0
  return rows, np.where(taken, times + shift, 0), taken


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


def _by_step(rows: np.ndarray) -> np.ndarray:
  """Rows of completed steps, in their order."""
  rows = rows[rows[:, ring.FLAGS] & ring.VALID != 0]
  return rows[np.argsort(rows[:, ring.STEP], kind="stable")]


def _times(rows: np.ndarray, marks: int) -> np.ndarray:
  """[n, marks] int64 nanoseconds."""
  return _whole(rows[:, ring.STAMPS:ring.STAMPS + 2 * marks])


def _whole(words: np.ndarray) -> np.ndarray:
  """[n, 2 m] (high, low) words as [n, m] int64."""
  words = words.astype(np.int64)
  return (words[:, 0::2] << 32) | words[:, 1::2]


def _segments(times: np.ndarray, taken: np.ndarray,
              plan: Plan) -> dict[str, tuple[np.ndarray, np.ndarray]]:
  """Total duration of every segment, and where it is unknown; the delay and the gap have columns of
  their own."""
  totals: dict[str, tuple[np.ndarray, np.ndarray]] = {}
  for i, mark in enumerate(plan.marks):
    if i == 0 or mark.segment in (DELAY, GAP):
      continue
    duration, unknown = times[:, i] - times[:, i - 1], ~(taken[:, i] & taken[:, i - 1])
    if mark.segment in totals:
      total, missing = totals[mark.segment]
      duration, unknown = total + duration, missing | unknown
    totals[mark.segment] = duration, unknown
  return totals


def _gap(steps: np.ndarray, starts: np.ndarray, ends: np.ndarray, known: np.ndarray,
         previous: Previous | None) -> np.ndarray:
  """Time since the preceding step's end; null after a hole."""
  if previous is None:
    previous = Previous(-2, 0)
  before = np.concatenate([[previous.step], steps[:-1]])[:len(steps)]
  before_end = np.concatenate([[previous.end_ns], ends[:-1]])[:len(steps)]
  before_known = np.concatenate([[previous.end_ns != 0], known[:-1]])[:len(steps)]
  return _null(starts - before_end, (before != steps - 1) | ~before_known | ~known)


def _collectives(identity: Columns, times: np.ndarray, taken: np.ndarray, plan: Plan) -> Columns:
  """One row a step and stamped collective, step-major."""
  enter = {mark.collective: i for i, mark in enumerate(plan.marks) if mark.kind == "enter"}
  leave = {mark.collective: i for i, mark in enumerate(plan.marks) if mark.kind == "exit"}
  stamped = [c for c in plan.collectives if c.slot in enter and c.slot in leave]
  n, slots = len(identity["step"]), len(stamped)
  columns: Columns = {name: np.repeat(values, slots) for name, values in identity.items()}

  def tiled(values: list, dtype) -> np.ndarray:
    return np.tile(np.array(values, dtype), n)

  columns["collective"] = tiled([c.slot for c in stamped], np.int32)
  columns["name"] = tiled([c.name for c in stamped], np.str_)
  columns["axis"] = tiled([c.axis for c in stamped], np.str_)
  columns["bytes"] = _null(tiled([c.bytes or 0 for c in stamped], np.int64),
                           tiled([c.bytes is None for c in stamped], np.bool_))
  for name, at in (("enter_ns", enter), ("exit_ns", leave)):
    index = [at[c.slot] for c in stamped]
    columns[name] = _null(times[:, index].reshape(-1), ~taken[:, index].reshape(-1))
  return columns


def _held(rows: np.ndarray, columns: Columns, plan: Plan) -> np.ndarray:
  """Adds what holding took to the `collectives` columns, and moves entries behind it: ns in a step,
  all together."""
  block = _held_block(rows, plan)
  places = {c.slot: i for i, c in enumerate(plan.collectives)}
  slots = columns["collective"][:len(columns["collective"]) // max(len(rows), 1)]
  every = block[:, :ring.HELD * len(plan.collectives)].reshape(len(rows), -1, ring.HELD)
  held = every[:, [places[slot] for slot in slots.tolist()]].reshape(-1, ring.HELD)
  untouched = (held[:, 0] == ring.NOT_HELD) & (held[:, 1] == ring.NOT_HELD)
  lost = np.where(untouched, 0, _whole(held[:, :2])[:, 0])
  asked, heard = (np.ascontiguousarray(held[:, i]).view(np.float32) for i in (2, 3))
  columns["held_ns"], columns["heard_ns"] = _null(lost, untouched), _measured(heard)
  columns["asked_ns"] = _nanoseconds(asked)
  columns["listened"] = _null(held[:, 4].astype(np.int64), ~np.isfinite(asked))
  columns["enter_ns"] = columns["enter_ns"] + lost
  return lost.reshape(len(rows), -1).sum(axis=1)


def listening(rows: np.ndarray, plan: Plan, rank: int, process: int, attempt: int) -> Columns:
  """Decodes what a job heard before its collectives: the same on all of its ranks.

  Args:
    rows: as in `decode`.
    plan: what each column means.
    rank: whose rows they are.
    process: index of the process that owns it.
    attempt: as in `decode`.

  Returns:
    Columns of the `listening` table, by step, collective and turn; none where nothing can be held.

  Raises:
    ValueError: the rows are too narrow for the plan.
  """
  if not plan.holds:
    return {}
  rows = _by_step(rows)
  block = _held_block(rows, plan)
  wide = ring.HELD * len(plan.collectives)
  times = block[:, :wide].reshape(len(rows), -1, ring.HELD)[..., 4].astype(np.int64)
  # Kept are the first readings of a step, in the order of its collectives.
  ends = np.cumsum(times, axis=1)
  place = np.arange(ring.READINGS)
  kept = place < np.minimum(block[:, wide].astype(np.int64), ends[:, -1])[:, None]
  at, turn = np.nonzero(kept)
  which = (turn[:, None] >= ends[at]).sum(axis=1)
  readings = np.ascontiguousarray(block[:, wide + 1:]).view(np.float32).reshape(
      len(rows), ring.READINGS, 2)[at, turn]
  slots = np.array([c.slot for c in plan.collectives], np.int32)
  return {"step": rows[at, ring.STEP].astype(np.int64),
          **{name: np.full(len(at), value, np.int32) for name, value in
             (("rank", rank), ("process", process), ("attempt", attempt))},
          "collective": slots[which],
          "turn": (turn - (ends - times)[at, which]).astype(np.int32),
          "heard_ns": _measured(readings[:, 0]), "told_ns": _measured(readings[:, 1])}


def _held_block(rows: np.ndarray, plan: Plan) -> np.ndarray:
  """The columns of what was held and heard: [n, ring.held_width(collectives)] uint32."""
  begin = ring.STAMPS + 2 * len(plan.marks)
  end = begin + ring.held_width(len(plan.collectives))
  if rows.shape[1] < end:
    raise ValueError(
        f"Ring rows of shape {rows.shape} have no room for what the plan's pacer held: the plan "
        "belongs to another pace state. Make the state with `init` of the same instrumented "
        "function that is recorded.")
  return np.ascontiguousarray(rows[:, begin:end])


def _floats(rows: np.ndarray, column: int) -> np.ndarray:
  return np.ascontiguousarray(rows[:, column]).view(np.float32)


_LONGEST = 1e9
"""Seconds, thirty years: what is asked beyond is recorded as this, since its nanoseconds would not
fit."""


def _nanoseconds(seconds: np.ndarray) -> np.ndarray:
  unknown = ~np.isfinite(seconds)
  fitting = np.clip(np.where(unknown, 0, seconds).astype(np.float64), -_LONGEST, _LONGEST)
  return _null(np.rint(fitting * 1e9).astype(np.int64), unknown)


def _measured(seconds: np.ndarray) -> np.ndarray:
  """Nanoseconds of what `jaxpace.core.stamped.measured` makes float32 seconds of again, to the
  last bit, where the seconds are a difference of stamps below four seconds."""
  nearest = _nanoseconds(seconds)
  whole = np.ma.getdata(nearest)
  found = whole.copy()
  rounded = whole.astype(np.float32)
  spacing = np.maximum(np.spacing(rounded).astype(np.int64), 1)
  for offset in (2, -2, 1, -1, 0):  # the nearest last: it wins
    made = rounded.astype(np.int64) + offset * spacing
    found = np.where(stamped.measured(np.maximum(made, 0)) == seconds, made, found)
  return _null(found, np.ma.getmaskarray(nearest))


def _null(values: np.ndarray, unknown: np.ndarray) -> np.ndarray:
  """Masks `values` where `unknown`; leaves them a plain array where nothing is."""
  return (np.ma.masked_array(np.ma.getdata(values), unknown) if unknown.any()
          else np.ma.getdata(values))
