"""How late each rank was over time: a map of ranks by columns of steps."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from jaxpace.diagnose.diagnosis import Diagnosis
from jaxpace.diagnose.groups import joined_ranks_of
from jaxpace.diagnose.selected_steps import SelectedSteps, ratio
from jaxpace.diagnose.step_times import StepTimes, busy, chunks
from jaxpace.diagnose.totals import lower_median, undelayed
from jaxpace.runs.run import Run

MOST_ROWS = 1024
MOST_COLUMNS = 512
"""Columns of the charts over time, at most: a wide screen has twice as many pixels to spare."""
MOST_CELLS = 1 << 18
_UNITS = 500.0
"""The cells that are late by most, but for a thousandth of them, are so many units late."""


def skew_map(diagnosis: Diagnosis,
             progress: Callable[[int, int], None] | None = None) -> dict[str, Any] | None:
  """Maps each rank's undelayed arrival, all collectives of a step together, less that step's median
  rank's.

  Of an even number of ranks the lower one of the two in the middle counts as the median, so that
  half of the ranks may be late. Where there are more than 1,024 ranks, neighbours share a row,
  which shows the latest of them.

  Args:
    diagnosis: the diagnosed run.
    progress: called with the steps done and their number.

  Returns:
    `rows` (first and last rank of each), `columns`, `unit` in seconds, and by row and column whole
    numbers of units, null where nothing is known: `mean` over the steps of a column, and `most`,
    the rank's latest step in it, null as a whole where each column is one step. None where ranks
    can't be compared.
  """
  run, selected = diagnosis.run, diagnosis.selected
  if not run.collectives or run.ranks < 2 or not selected.size:
    return None
  together = -(-run.ranks // MOST_ROWS)
  rows = np.arange(0, run.ranks, together)
  columns = Columns.over(run, selected, min(MOST_COLUMNS, max(MOST_CELLS // len(rows), 1)))
  total = np.zeros((run.ranks, columns.size))
  number = np.zeros((run.ranks, columns.size), np.int64)
  most = np.full((run.ranks, columns.size), -np.inf)
  joined = joined_ranks_of(run)
  joined = np.zeros(run.ranks) if joined is None else joined
  for part in chunks(run):
    column = columns.column[part]
    at = np.flatnonzero(column >= 0)
    if at.size:
      late = _late(busy(run, part), joined)[:, at]
      begin = np.flatnonzero(np.diff(column[at], prepend=-1))
      into = column[at][begin]
      known = np.isfinite(late)
      total[:, into] += np.add.reduceat(np.where(known, late, 0.0), begin, axis=1)
      number[:, into] += np.add.reduceat(known, begin, axis=1, dtype=np.int64)
      most[:, into] = np.maximum(most[:, into],
                                 np.maximum.reduceat(np.where(known, late, -np.inf), begin, axis=1))
    if progress:
      progress(part.stop, len(run.steps))
  mean = ratio(total, number, -np.inf)
  mean, most = (np.maximum.reduceat(values, rows, axis=0) for values in (mean, most))
  unit = _unit(most)
  single = int(columns.number.max()) == 1
  return {"rows": {"first": rows.tolist(),
                   "last": (np.minimum(rows + together, run.ranks) - 1).tolist()},
          "columns": columns.to_json(), "unit": unit, "mean": _whole(mean, unit),
          "most": None if single else _whole(most, unit)}


def _late(work: StepTimes, joined: np.ndarray) -> np.ndarray:
  """[R, k] arrival after that of the median of the ranks that are joined, seconds; NaN where the
  rank's step is not known."""
  late = undelayed(work).sum(axis=0)
  for number in np.unique(joined):
    late[joined == number] -= lower_median(late[joined == number])
  return np.asarray(late)


def _unit(values: np.ndarray) -> float:
  """1, 2 or 5 times a power of ten, seconds: fine enough to show, coarse enough for short
  numbers."""
  size = np.abs(values[np.isfinite(values)])
  large = float(np.quantile(size, 0.999)) if size.size else 0.0
  least = max(large / _UNITS, 1e-7)
  power = 10.0 ** math.floor(math.log10(least))
  step = next(m for m in (1, 2, 5, 10) if m * power >= least * (1 - 1e-9))
  return float(f"{step * power:.0e}")


def _whole(values: np.ndarray, unit: float) -> list[list[int | None]]:
  known = np.isfinite(values)
  whole = np.rint(np.where(known, values, 0.0) / unit).astype(np.int64)
  if known.all():
    return whole.tolist()
  return [[value if there else None for value, there in zip(row, own, strict=True)]
          for row, own in zip(whole.tolist(), known.tolist(), strict=True)]


# Stretches of neighbouring steps that one column of a chart stands for.

class Columns(NamedTuple):
  """Stretches with as many counted steps each as the others, by one at most. K steps, B columns."""

  column: np.ndarray  # [K] int64, column of each step, -1 for a step that doesn't count
  first: np.ndarray  # [B] step numbers
  last: np.ndarray  # [B] step numbers
  number: np.ndarray  # [B] counted steps

  @staticmethod
  def over(run: Run, selected: SelectedSteps, most: int) -> Columns:
    """Divides the counted steps; each has a column of its own where there are no more than
    `most`."""
    size = selected.size
    columns = min(size, most)
    column = np.full(len(run.steps), -1, np.int64)
    at = np.flatnonzero(selected.mask)
    column[at] = np.arange(size) * columns // max(size, 1)
    number = np.bincount(column[at], minlength=columns)
    end = np.cumsum(number)
    return Columns(column, run.steps[at[end - number]], run.steps[at[end - 1]], number)

  @property
  def size(self) -> int:
    """Number of columns."""
    return len(self.number)

  def mean(self, values: np.ndarray) -> np.ndarray:
    """[B] means of [K] values; NaN where nothing is known."""
    use = np.isfinite(values) & (self.column >= 0)
    number = np.bincount(self.column[use], minlength=self.size)
    return ratio(np.bincount(self.column[use], values[use], self.size), number)

  def extremes(self, values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """[B] lowest and highest of [K] values that are all known in counted steps."""
    selected = values[self.column >= 0]
    begin = np.cumsum(self.number) - self.number
    return np.minimum.reduceat(selected, begin), np.maximum.reduceat(selected, begin)

  def to_json(self) -> dict[str, Any]:
    """Returns plain lists."""
    return {"first": self.first.tolist(), "last": self.last.tolist(),
            "number": self.number.tolist()}
