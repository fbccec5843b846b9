"""Lays rows of the tables out as dense arrays of slots, ranks and steps: of one cell's rows, the
newest attempt's counts, and of one attempt the row that was read last."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Self

import numpy as np

from jaxpace.runs.columns import Columns
from jaxpace.runs.run import MISSING

_SPARSE = 4
"""Step numbers are laid out as they are unless that takes this many times as many cells as there
are rows."""


@dataclasses.dataclass(frozen=True)
class StepAxis:
  """Step numbers from a first to a last one, or any that rise."""

  steps: np.ndarray  # [K] int64, rising

  @property
  def contiguous(self) -> bool:
    """Whether no number between the first and the last one is absent."""
    return not self.size or bool(self.steps[-1] - self.steps[0] == self.size - 1)

  @property
  def size(self) -> int:
    """K."""
    return len(self.steps)

  @property
  def span(self) -> tuple[int, int]:
    """First and last step."""
    return int(self.steps[0]), int(self.steps[-1])

  @staticmethod
  def over(ranges: Sequence[tuple[int, int]], window: tuple[int | None, int | None],
           distinct: Callable[[], np.ndarray], rows: int) -> StepAxis:
    """Makes the axis over the tables' step ranges, cut to the window and the step before it.

    Args:
      ranges: lowest and highest step of each table.
      window: first step and one past the last, None where open.
      distinct: reads all distinct step numbers; called only if the numbers are far apart.
      rows: rows of the largest table.
    """
    low, high = min(r[0] for r in ranges), max(r[1] for r in ranges)
    first, stop = window
    if first is not None:
      low = max(low, first - 1)
    if stop is not None:
      high = min(high, stop - 1)
    if high < low or (first is not None and high < first):
      return StepAxis(np.empty(0, np.int64))
    if high - low < _SPARSE * rows + 1000:
      return StepAxis(np.arange(low, high + 1, dtype=np.int64))
    steps = np.unique(distinct())
    return StepAxis(steps[(steps >= low) & (steps <= high)].astype(np.int64))

  def index(self, steps: np.ndarray) -> tuple[np.ndarray, np.ndarray | None]:
    """Positions of step numbers, and which of them lie on the axis; None if all do."""
    if self.contiguous:
      at = steps - self.steps[0]
      if at.size and at.min() >= 0 and at.max() < self.size:
        return at, None
      return at, (at >= 0) & (at < self.size)
    at = np.minimum(np.searchsorted(self.steps, steps), self.size - 1)
    return at, self.steps[at] == steps


class Cells:
  """The rows of one table, laid out; S slots, R ranks, K steps.

  Attributes:
    slots: place of each slot along the first axis.
    attempt: [S, R, K] int16, -1 where there is no row.
    columns: [S, R, K] by name: int64 ns, `MISSING` where null, or float32 seconds or numbers, NaN
      where null.
    process_of_rank: [R] int32, -1 where not known.
    duplicates: rows of cells that had one.
  """

  def __init__(self, ranks: int | np.ndarray, steps: int, slots: Sequence[int] = (0,)):
    """Makes empty cells.

    Args:
      ranks: R; or the R ranks that are laid out, rising: rows of others are left out.
      steps: K.
      slots: those that are laid out, rising; rows of others are left out. A table without slots
        has one, 0.
    """
    self.slots = {int(slot): place for place, slot in enumerate(slots)}
    self._place_of = np.full(max(self.slots, default=-1) + 2, -1)
    self._place_of[[*self.slots]] = range(len(self.slots))
    self._numbers = None if isinstance(ranks, int) else ranks
    size = ranks if isinstance(ranks, int) else len(ranks)
    self.attempt = np.full((len(self.slots), size, steps), -1, np.int16)
    self.columns: dict[str, np.ndarray] = {}
    self.process_of_rank = np.full(size, -1, np.int32)
    self.duplicates = 0

  def expect(self, *, times: Iterable[str] = (), values: Iterable[str] = ()) -> Self:
    """Makes room for columns, and returns itself: times are kept in ns; values become seconds, or
    numbers as they are."""
    for name in times:
      self.columns.setdefault(name, np.full(self.attempt.shape, MISSING, np.int64))
    for name in values:
      self.columns.setdefault(name, np.full(self.attempt.shape, np.nan, np.float32))
    return self

  def add(self, data: Columns, axis: StepAxis) -> None:
    """Takes rows in: "step", "rank", "attempt", "collective" where there are several slots, and
    those of the expected columns that there are."""
    slot = data.get("collective")
    if slot is not None:
      slot = self._place_of[np.minimum(slot, len(self._place_of) - 1)]
    ranks, known = self._rows_of(data["rank"])
    rows, at = self._place(data, axis, slot, ranks, known)
    if "process" in data and len(at):
      self.process_of_rank[ranks[rows]] = data["process"][rows]
    for name, values in self.columns.items():
      if name in data:
        found = data[name] if values.dtype == np.int64 else seconds_of(name, data[name])
        values.reshape(-1)[at] = found[rows]

  def _rows_of(self, ranks: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Row of each rank, and which have one."""
    size = self.attempt.shape[1]
    if self._numbers is None:
      return ranks, (ranks >= 0) & (ranks < size)
    at = np.minimum(np.searchsorted(self._numbers, ranks), size - 1)
    return at, self._numbers[at] == ranks

  def _place(self, data: Columns, axis: StepAxis, slot: np.ndarray | None, ranks: np.ndarray,
             sound: np.ndarray) -> tuple[np.ndarray | slice, np.ndarray]:
    """Finds the rows that count and the flat positions of their cells, and enters their attempts.

    Args:
      data: the rows.
      axis: the steps.
      slot: [n] place of each row along the first axis, -1 for rows to leave out; None if all are 0.
      ranks: [n] place of each along the second.
      sound: [n] bool, which have one.
    """
    attempts = data["attempt"].astype(np.int16, copy=False)
    at, inside = axis.index(data["step"])
    sound = sound if inside is None else sound & inside
    sound = sound if slot is None else sound & (slot >= 0)
    keep: np.ndarray | slice = slice(None) if sound.all() else np.flatnonzero(sound)
    row = ranks[keep].astype(np.int64)
    if slot is not None:
      row = slot[keep] * self.attempt.shape[1] + row
    at, attempts = row * axis.size + at[keep], attempts[keep]
    flat = self.attempt.reshape(-1)
    known = flat[at]
    if (known >= 0).any() or (attempts.size and attempts.min() != attempts.max()):
      # Writes to one cell happen in order.
      order = np.argsort(attempts, kind="stable")
      order = order[attempts[order] >= known[order]]
      keep = np.arange(len(ranks))[keep][order]
      self.duplicates += len(at) - len(np.unique(at[known < 0]))
      at, attempts = at[order], attempts[order]
    flat[at] = attempts
    return keep, at

  def drop_empty(self) -> None:
    """Forgets slots without a row."""
    kept, slots = np.flatnonzero((self.attempt >= 0).any(axis=(1, 2))), list(self.slots)
    if len(kept) < len(slots):
      self.slots = {slots[at]: place for place, at in enumerate(kept.tolist())}
      self.attempt = self.attempt[kept]
      self.columns = {name: values[kept] for name, values in self.columns.items()}


def seconds_of(name: str, values: np.ndarray) -> np.ndarray:
  """Seconds of ns, other numbers as they are; NaN for null."""
  if values.dtype != np.int64:
    return values
  scaled = values * 1e-9 if name.endswith("_ns") else values.astype(np.float64)
  scaled[values == MISSING] = np.nan
  return scaled.astype(np.float32)
