"""What an instrumented step's events say beside its timestamps: its number, its delay, and what its
pacer decided; and of a program that was compiled with such a step in it, the same."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from jaxpace.core import durations
from jaxpace.core import ring_layout as layout
from jaxpace.record.columns import Columns, null
from jaxpace.record.ring.executions import Executions

_TAGS = (layout.STEP_VALUE, layout.DELAY_VALUE, *range(
    layout.DECISION_VALUE, layout.DECISION_VALUE + layout.MAX_DECISIONS), layout.DELAY_TAG)
_LONGEST = 1e9
"""Seconds, thirty years: what is asked beyond is recorded as this, since its nanoseconds would not
fit."""


class Decisions(NamedTuple):
  """What the step before each of n executions decided for it."""

  # [n] int64, number of the step; -1 where not known
  step: np.ndarray
  # [n] float32 s, asked for and applied; NaN where not known
  delay: np.ndarray
  applied: np.ndarray
  # [n, columns] float32
  decisions: np.ndarray


def decisions_of(executions: Executions) -> Decisions:
  """Reads the numbers that executions of an instrumented step's program carry."""
  table, known = by_tag(executions, _TAGS)
  numbers = np.where(known[:, 1:-1], floats(table[:, 1:-1]), np.float32(np.nan))
  # The delay's timestamp is left out where there was none.
  late = np.where(known[:, -1], table[:, -1], executions.start_ns)
  applied = np.where(known[:, -1] | np.isfinite(numbers[:, 0]),
                     durations.elapsed_seconds(late - executions.start_ns), np.float32(np.nan))
  return Decisions(np.where(known[:, 0], table[:, 0], -1), numbers[:, 0], applied, numbers[:, 1:])


def within(executions: Executions, others: Executions) -> Executions:
  """Executions with the events of another program's that ran within them, on the same device; each
  begins where that one does, and without events where there is none."""
  row = np.searchsorted(executions.start_ns, others.start_ns, side="right") - 1
  inside = (row >= 0) & (others.end_ns <= executions.end_ns[row])
  others, row = others.picked(inside), row[inside]
  start = executions.start_ns.copy()
  start[row] = others.start_ns
  return executions._replace(start_ns=start, of=row[others.of], tag=others.tag, ns=others.ns)


def columns_of(own: Decisions, names: Sequence[str]) -> Columns:
  """Columns of the table `steps`; `names` are of the pacer's columns, in the order of the
  events."""
  columns = {"delay_ns": nanoseconds(own.delay), "delay_applied_ns": nanoseconds(own.applied)}
  for i, name in enumerate(names[:layout.MAX_DECISIONS]):
    columns[f"decision_{name}"] = null(own.decisions[:, i], np.isnan(own.decisions[:, i]))
  return columns


def by_tag(executions: Executions, tags: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
  """[n, tags] int64 of the events with these tags, and which were there."""
  order = np.argsort(tags)
  wanted = np.array(tags, np.int64)[order]
  at = np.minimum(np.searchsorted(wanted, executions.tag), len(wanted) - 1)
  found = wanted[at] == executions.tag
  place, of = order[at[found]], executions.of[found]
  table = np.zeros((len(executions.number), len(tags)), np.int64)
  known = np.zeros(table.shape, bool)
  table[of, place], known[of, place] = executions.ns[found], True
  return table, known


def floats(numbers: np.ndarray) -> np.ndarray:
  """Numbers of events as the float32 whose bits they are."""
  return np.ascontiguousarray(numbers.astype(np.uint32)).view(np.float32)


def nanoseconds(seconds: np.ndarray) -> np.ndarray:
  """Whole nanoseconds, null where they are not known."""
  unknown = ~np.isfinite(seconds)
  fitting = np.clip(np.where(unknown, 0, seconds).astype(np.float64), -_LONGEST, _LONGEST)
  return null(np.rint(fitting * 1e9).astype(np.int64), unknown)
