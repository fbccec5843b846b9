"""Columns of the recorded tables, and what devices did in steps as rows of them. Pure numpy: no
device, no clock, no I/O."""

from __future__ import annotations

import types
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from jaxpace.core.observed import Decisions
from jaxpace.record.ring.plan import StepPlan
from jaxpace.runs.run import HOST_CAUSES

Columns = dict[str, np.ndarray]
"""Columns of one table, all of one length. A masked entry of a masked array, or an absent column,
is null."""

Sample = tuple[int | None, ...]
"""One value for each of `HOST_CAUSES`, None where it isn't known: data and checkpoint where neither
was measured, other programs and time between steps where the loop says what it does."""


def length(columns: Columns) -> int:
  """Rows of a table."""
  return len(next(iter(columns.values()))) if columns else 0


def concatenate(parts: Sequence[Columns]) -> Columns:
  """Joins batches of the same table end to end; a column one of them lacks is null there."""
  names = list(dict.fromkeys(name for part in parts for name in part))
  joined: Columns = {}
  for name in names:
    dtype: Any = next(part[name].dtype for part in parts if name in part)
    pieces = [part[name] if name in part else np.ma.masked_all(length(part), dtype)
              for part in parts]
    masked = any(isinstance(piece, np.ma.MaskedArray) for piece in pieces)
    joined[name] = np.ma.concatenate(pieces) if masked else np.concatenate(pieces)
  return joined


def picked(columns: Mapping[str, np.ndarray], chosen: np.ndarray) -> Columns:
  """Some of the rows: [n] bool, or places."""
  return {name: values[chosen] for name, values in columns.items()}


def null(values: np.ndarray, unknown: np.ndarray) -> np.ndarray:
  """Masks `values` where `unknown`; leaves them a plain array where nothing is."""
  return (np.ma.masked_array(np.ma.getdata(values), unknown) if unknown.any()
          else np.ma.getdata(values))


def whose(steps: np.ndarray, rank: np.ndarray | int, process: int,
          attempt: np.ndarray | int) -> Columns:
  """Makes the columns that say of whom rows are, [n], from their steps."""
  return {"step": steps, **{name: np.full(len(steps), value, np.int32) for name, value in
                            (("rank", rank), ("process", process), ("attempt", attempt))}}


def ends_before(steps: np.ndarray, ends: np.ndarray, previous: tuple[int, int] | None
                ) -> np.ndarray:
  """When the step before each ended, ns; null after a hole.

  Args:
    steps: [n] numbers.
    ends: [n] ns.
    previous: number and end of the step before these; None if there is none.
  """
  step, end = previous or (-2, 0)
  before = np.concatenate([[step], steps[:-1]])[:len(steps)]
  return null(np.concatenate([[end], ends[:-1]])[:len(steps)], before != steps - 1)


def of_samples(samples: Sequence[Sample]) -> np.ma.MaskedArray:
  """[n, causes] int64: samples of n steps, masked where not known."""
  values = np.array(samples, object).reshape(len(samples), len(HOST_CAUSES))
  known = np.not_equal(values, np.array(None)).astype(bool)
  return np.ma.masked_array(np.where(known, values, 0).astype(np.int64), ~known)


def of_host(samples: np.ma.MaskedArray, extra: Sequence[Mapping[str, float]]) -> Columns:
  """Lays out what the host did in n steps, [n, causes], and the user's own columns of each."""
  columns = {cause.column: null(samples[:, i], np.ma.getmaskarray(samples)[:, i])
             for i, cause in enumerate(HOST_CAUSES)}
  for name in sorted({name for row in extra for name in row}):
    columns[f"host_{name}"] = null(np.array([row.get(name, 0.0) for row in extra], np.float64),
                                   np.array([name not in row for row in extra], bool))
  return columns


class Range(NamedTuple):
  """Executions of a program that belong to a step: the numbers from `begin` to before `end`."""

  program: int
  begin: int
  end: int


UNKNOWN: Sample = (None,) * len(HOST_CAUSES)


class StepCalls(NamedTuple):
  """A step: what was executed, and what the host did."""

  step: int
  ranges: tuple[Range, ...]
  sample: Sample
  extra: dict[str, float]
  decisions: Decisions = types.MappingProxyType({})
  """What was decided for it beside it."""


class DeviceSteps(NamedTuple):
  """What one device did in K steps."""

  # [K] bool, whether all executions of the step are there, and there were any
  whole: np.ndarray
  # [K] bool, whether some are not
  missing: np.ndarray
  # [K] int64 each
  start_ns: np.ndarray
  end_ns: np.ndarray
  # [K] each, what else the table `steps` has of them
  columns: Columns
  # [m] each: `row`, place of the step; `slot`; and what else the table `collectives` has
  collectives: Columns
  # [K] int64 between executions of the same step
  idle_ns: np.ndarray | int = 0
  # [K] int64 by which the program itself counts its steps, -1 where not known; None where it does
  # not count them
  number: np.ndarray | None = None
  # [j] each: `row`, and what the table `listening` has; none where nothing is listened to
  listening: Columns = {}  # noqa: RUF012


def rows(own: DeviceSteps, of: Columns, before: np.ndarray, host: Columns, chosen: np.ndarray,
         plan: StepPlan) -> dict[str, Columns]:
  """Rows of the tables `steps`, `collectives` and `listening` of one device, for its whole steps.

  Args:
    own: what the device did in K steps.
    of: [K] columns of whose they are, see `whose`.
    before: [whole steps] when the step before each ended, see `ends_before`.
    host: [K] columns of what the process did.
    chosen: [K] bool, which steps' collectives are written one by one.
    plan: what is in each slot.
  """
  kept = own.whole
  idle = own.idle_ns if isinstance(own.idle_ns, int) else own.idle_ns[kept]
  steps = {**picked(of, kept), "start_ns": own.start_ns[kept], "end_ns": own.end_ns[kept],
           "gap_ns": own.start_ns[kept] - before + idle, **picked(own.columns, kept),
           **picked(host, kept)}
  waits = picked(own.collectives, (chosen & kept)[own.collectives["row"]])
  row, slot = waits.pop("row"), waits.pop("slot")
  waits = {**picked(of, row), **picked(plan.columns, slot), **waits}
  tables = {"steps": steps, "collectives": waits}
  if length(own.listening):
    heard = picked(own.listening, kept[own.listening["row"]])
    tables["listening"] = {**picked(of, heard.pop("row")), **heard}
  return tables
