"""Stretches of neighbouring steps that one column of a chart stands for."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from jaxpace.diagnosis.selected_steps import SelectedSteps
from jaxpace.trace.run import Run


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
    total = np.bincount(self.column[use], values[use], self.size)
    return np.divide(total, number, out=np.full(self.size, np.nan), where=number > 0)

  def extremes(self, values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """[B] lowest and highest of [K] values that are all known in counted steps."""
    selected = values[self.column >= 0]
    begin = np.cumsum(self.number) - self.number
    return np.minimum.reduceat(selected, begin), np.maximum.reduceat(selected, begin)

  def to_json(self) -> dict[str, Any]:
    """Returns plain lists."""
    return {"first": self.first.tolist(), "last": self.last.tolist(),
            "number": self.number.tolist()}
