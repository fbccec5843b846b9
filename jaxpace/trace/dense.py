"""Lays the rows of the tables out as dense arrays of [ranks, steps]."""

from __future__ import annotations

import dataclasses
import pathlib
import threading
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import pyarrow as pa

from jaxpace.trace.run import MISSING, HeldTimes, RunError
from jaxpace.trace.table_reader import TableFiles
from jaxpace.trace.whole_numbers import filled

_ROOM, _ROOM_ANYWAY = 20, 1_000_000
"""Cells of a dense array for each row that there is, and cells in any case."""
_ROOM_OF_SLOTS = 64
_SPARSE = 4
"""Step numbers are laid out as they are unless that takes this many times as many cells as there
are rows."""


@dataclasses.dataclass(frozen=True)
class StepAxis:
  """The step numbers of the dense arrays' second axis."""

  steps: np.ndarray  # [K] int64, rising
  contiguous: bool

  @property
  def size(self) -> int:
    """K."""
    return len(self.steps)

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
      return StepAxis(np.empty(0, np.int64), True)
    if high - low < _SPARSE * rows + 1000:
      return StepAxis(np.arange(low, high + 1, dtype=np.int64), True)
    steps = np.unique(distinct())
    return StepAxis(steps[(steps >= low) & (steps <= high)].astype(np.int64), False)

  def index(self, steps: np.ndarray) -> tuple[np.ndarray, np.ndarray | None]:
    """Positions of step numbers, and which of them lie on the axis; None if all do."""
    if self.contiguous:
      at = steps - self.steps[0]
      if at.size and at.min() >= 0 and at.max() < self.size:
        return at, None
      return at, (at >= 0) & (at < self.size)
    at = np.minimum(np.searchsorted(self.steps, steps), self.size - 1)
    return at, self.steps[at] == steps


class Counter:
  """Counts rows for the progress display; used by several threads."""

  def __init__(self, report: Callable[[int, int], None] | None, total: int):
    self._report, self._total, self._done = report, total, 0
    self._lock = threading.Lock()

  def add(self, rows: int) -> None:
    """Counts rows that were read, and reports. From any thread."""
    with self._lock:
      self._done += rows
      if self._report:
        self._report(self._done, self._total)


@dataclasses.dataclass
class StepRows:
  """The `steps` table."""

  attempt: np.ndarray  # [R, K] int16, -1 where there is no row
  process_of_rank: np.ndarray  # [R] int32, -1 where unknown
  durations: dict[str, np.ndarray]  # [R, K] float32 seconds, NaN where null
  times: dict[str, np.ndarray]  # [R, K] int64 ns, `MISSING` where null
  duplicates: int = 0
  found: int = 0


@dataclasses.dataclass
class SlotTimes:
  """One slot of the `collectives` table."""

  enter_ns: np.ndarray  # [R, K] int64
  exit_ns: np.ndarray  # [R, K] int64
  attempt: np.ndarray  # [R, K] int16
  held: HeldTimes | None = None  # where a pacer holds collectives back


@dataclasses.dataclass
class CollectiveRows:
  """The `collectives` table."""

  slots: dict[int, SlotTimes]
  names: dict[int, tuple[str, int | None]]  # name and bytes by slot
  process_of_rank: np.ndarray
  duplicates: int = 0
  found: int = 0


def rank_axis(path: pathlib.Path, tables: Sequence[TableFiles], declared: int, axis: StepAxis,
              rows: int, problems: list[str]) -> tuple[int, np.ndarray | None]:
  """Finds how many rows the dense arrays have: one a rank number, unless the numbers lie far apart.

  Args:
    path: run directory, for the error.
    tables: what holds rows.
    declared: ranks that the run says it has.
    axis: the steps.
    rows: rows of the largest table.
    problems: sentences are added to it.

  Returns:
    R; and the rank number of each row, None where that is the row's own.

  Raises:
    RunError: the dense arrays would be much larger than the rows they hold.
  """
  def fits(ranks: int, factor: int = 1) -> bool:
    return ranks * axis.size <= factor * (_ROOM * rows + _ROOM_ANYWAY)

  highest = max(table.highest_rank + 1 for table in tables)
  for ranks in (max(declared, highest), highest):
    if fits(ranks):
      return ranks, None
  numbers = np.unique(np.concatenate([table.distinct("rank") for table in tables]))
  if not fits(numbers.size, 3):
    raise RunError(f"{path} names {numbers.size:,} ranks over {axis.size:,} steps but holds only "
                   f"{rows:,} rows: its rank or step numbers are damaged. Give a window with "
                   "--steps, or remove the damaged part.")
  if numbers.size == highest:
    return highest, None
  changed = np.flatnonzero(numbers != np.arange(numbers.size))
  named = [f"{at} is {numbers[at]} in the files" for at in changed[:8].tolist()]
  more = f" and {len(changed) - 8} more" if len(changed) > 8 else ""
  problems.append(f"The rank numbers lie far apart: the {numbers.size} ranks that recorded are "
                  f"numbered in their order here, so rank {', '.join(named)}{more}.")
  return int(numbers.size), numbers


def read_steps(table: TableFiles, ranks: int, axis: StepAxis, durations: Sequence[str],
               times: Sequence[str], count: Counter) -> StepRows:
  """Reads the named columns of the `steps` table."""
  shape = ranks, axis.size
  rows = StepRows(np.full(shape, -1, np.int16), np.full(ranks, -1, np.int32),
                  {name.removesuffix("_ns"): np.full(shape, np.nan, np.float32)
                   for name in durations},
                  {name: np.full(shape, MISSING, np.int64) for name in times if table.rows})
  keys = ["step", "rank", "attempt", "process"]
  for data in table.read([*keys, *durations, *times], _keep(axis)):
    numbers = _whole(data, [*keys, *rows.times])
    placed = _place(numbers, axis, rows.attempt)
    rows.duplicates += placed.duplicates
    rows.found += placed.found
    _note_process(numbers, placed, rows.process_of_rank)
    for name in durations:
      if name in data.column_names:
        placed.put(rows.durations[name.removesuffix("_ns")], _seconds(data.column(name)))
    for name in rows.times:
      if name in numbers:
        placed.put(rows.times[name], numbers[name])
    count.add(data.num_rows)
  return rows


def read_collectives(table: TableFiles, ranks: int, axis: StepAxis,
                     count: Counter) -> CollectiveRows:
  """Reads entries and exits of the `collectives` table, one pair of arrays a slot."""
  rows = CollectiveRows({}, {}, np.full(ranks, -1, np.int32))
  left_out: set[int] = set()
  held = HeldTimes._fields if "held_ns" in table.columns else ()
  columns = ["step", "rank", "attempt", "process", "enter_ns", "exit_ns", *held]
  several = table.highest_slot > 0
  if several:
    columns.append("collective")
  for data in table.read(columns, _keep(axis)):
    for slot, part in _by_slot(_whole(data, columns), several):
      if slot not in rows.slots:
        shape = ranks, axis.size
        if len(rows.slots) * ranks * axis.size > _ROOM_OF_SLOTS * table.rows + _ROOM_ANYWAY:
          left_out.add(slot)
          continue
        rows.slots[slot] = SlotTimes(np.full(shape, MISSING, np.int64),
                                     np.full(shape, MISSING, np.int64),
                                     np.full(shape, -1, np.int16),
                                     HeldTimes.missing(shape) if held else None)
      times = rows.slots[slot]
      placed = _place(part, axis, times.attempt)
      rows.duplicates += placed.duplicates
      rows.found += placed.found
      _note_process(part, placed, rows.process_of_rank)
      placed.put(times.enter_ns, part["enter_ns"])
      placed.put(times.exit_ns, part["exit_ns"])
      for name in held:
        if times.held is not None and name in part:
          placed.put(getattr(times.held, name), part[name])
    count.add(data.num_rows)
  if left_out:
    table.problems.append("'collectives' numbers more collectives than its rows can be of: "
                          f"{len(left_out):,} of them are left out.")
  rows.names = _names(table, set(rows.slots))
  return rows


@dataclasses.dataclass(frozen=True)
class _Placed:
  """Where the rows of one batch go."""

  rows: np.ndarray | slice  # rows of the batch that count
  at: np.ndarray  # flat positions in [R, K]
  duplicates: int

  @property
  def found(self) -> int:
    return len(self.at)

  def put(self, target: np.ndarray, values: np.ndarray) -> None:
    target.reshape(-1)[self.at] = values[self.rows]


def _place(data: Mapping[str, np.ndarray], axis: StepAxis, attempt: np.ndarray) -> _Placed:
  """Finds the cells of a batch's rows, drops rows of older attempts, and enters the attempts."""
  steps, ranks = data["step"], data["rank"]
  attempts = data["attempt"].astype(np.int16)
  at, inside = axis.index(steps)
  inside_ranks = (ranks >= 0) & (ranks < attempt.shape[0])
  keep: np.ndarray | slice = slice(None)
  if inside is not None or not inside_ranks.all():
    keep = np.flatnonzero(inside_ranks if inside is None else inside & inside_ranks)
  at = ranks[keep].astype(np.int64) * axis.size + at[keep]
  attempts = attempts[keep]
  flat = attempt.reshape(-1)
  known = flat[at]
  if (known >= 0).any() or (attempts.size and attempts.min() != attempts.max()):
    # Later attempts win; of one attempt the row read last. Writes to one cell happen in order.
    order = np.argsort(attempts, kind="stable")
    order = order[attempts[order] >= known[order]]
    keep = np.arange(len(steps))[keep][order]
    duplicates = len(at) - len(np.unique(at[known < 0]))
    at, attempts = at[order], attempts[order]
  else:
    duplicates = 0
  flat[at] = attempts
  return _Placed(keep, at, duplicates)


def _whole(data: pa.Table, names: Sequence[str]) -> dict[str, np.ndarray]:
  """The columns of whole numbers that a batch has; `MISSING` for null."""
  return {name: integers(data.column(name)) for name in names if name in data.column_names}


def _by_slot(data: Mapping[str, np.ndarray], several: bool
             ) -> list[tuple[int, Mapping[str, np.ndarray]]]:
  if not several:
    return [(0, data)]
  slots = data["collective"]
  parts = ((int(slot), np.flatnonzero(slots == slot)) for slot in np.unique(slots) if slot >= 0)
  return [(slot, {name: column[rows] for name, column in data.items()}) for slot, rows in parts]


def _note_process(data: Mapping[str, np.ndarray], placed: _Placed, process_of_rank: np.ndarray
                  ) -> None:
  if "process" in data and placed.found:
    process_of_rank[data["rank"][placed.rows]] = data["process"][placed.rows]


def _names(table: TableFiles, wanted: set[int]) -> dict[int, tuple[str, int | None]]:
  """Name and bytes of each slot, from the first rows that have them."""
  names: dict[int, tuple[str, int | None]] = {}
  for data in table.read(["collective", "name", "bytes"]):
    if "name" not in data.column_names:
      continue
    slots = integers(data.column("collective"))
    for slot in wanted - set(names):
      hits = np.flatnonzero(slots == slot)
      if hits.size:
        size = data.column("bytes")[int(hits[0])].as_py() if "bytes" in data.column_names else None
        size = size if isinstance(size, int) and size >= 0 else None
        names[slot] = str(data.column("name")[int(hits[0])].as_py() or "")[:4096], size
    if not wanted - set(names):
      break
  return names


def _keep(axis: StepAxis) -> tuple[int, int]:
  return int(axis.steps[0]), int(axis.steps[-1])


def integers(column: pa.ChunkedArray) -> np.ndarray:
  """Whole numbers; `MISSING` for null."""
  return filled(column, MISSING)


def _seconds(column: pa.ChunkedArray) -> np.ndarray:
  """float32 seconds; NaN for null."""
  values = np.multiply(column.to_numpy(), 1e-9, dtype=np.float64)
  return values.astype(np.float32)
