"""Reads when steps began and ended: what the report does not need and a timeline does."""

from __future__ import annotations

import dataclasses

import numpy as np

from jaxpace.trace import dense, part_files
from jaxpace.trace.run import MISSING, Run
from jaxpace.trace.table_reader import open_table

_BOUNDS = ("start_ns", "end_ns")


@dataclasses.dataclass(frozen=True)
class Bounds:
  """R ranks, K steps; int64 ns of each rank's own clock, `MISSING` where not known."""

  start: np.ndarray  # [R, K]
  end: np.ndarray  # [R, K]


def read_bounds(run: Run) -> Bounds:
  """Reads start and end of the steps of a run that was read. What can't be read is `MISSING`."""
  table = open_table("steps", part_files.list_parts(run.path / "steps", run.id).parts)
  contiguous = bool((np.diff(run.steps) == 1).all())
  axis = dense.StepAxis(run.steps, contiguous)
  if run.numbers is not None:
    table.renumber(run.numbers)
  rows = dense.read_steps(table, run.ranks, axis, (), _BOUNDS, dense.Counter(None, 0))
  # A row written since the run was read may belong to a newer attempt, on another clock.
  same = rows.attempt == run.attempt
  nothing = np.full(run.attempt.shape, MISSING, np.int64)
  return Bounds(*(np.where(same, rows.times.get(name, nothing), MISSING) for name in _BOUNDS))
