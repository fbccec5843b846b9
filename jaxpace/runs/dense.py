"""Reads the tables of a run that is over, or read as if it were, into dense arrays."""

from __future__ import annotations

import dataclasses
import pathlib
import threading
from collections.abc import Callable, Sequence

import numpy as np
import pyarrow as pa

from jaxpace.runs import schema
from jaxpace.runs.cells import Cells, StepAxis
from jaxpace.runs.columns import filled, of_table
from jaxpace.runs.run import MISSING, HeldTimes, HostCauses, HostSamples, Listening, Run, RunError
from jaxpace.runs.step_causes import HOST_CAUSES
from jaxpace.runs.table_reader import TableFiles, list_parts, open_table

HOST_COLUMNS = tuple(field.name for field in schema.HOSTS
                     if field.name not in ("time_ns", "process", "attempt"))
_ROOM, _ROOM_ANYWAY = 20, 1_000_000
"""Cells of a dense array for each row that there is, and cells in any case."""
_ROOM_OF_SLOTS = 64
KEYS = ("step", "rank", "attempt", "process")
GUARD = ("guard_on", "guard_pair", "effect", "effect_low", "effect_high", "pairs")
"""Columns of `jaxpace.guard`, without the prefix `decision_`."""
WORK = ("work_uneven", "work_gain", "work_on", "work_effect", "work_effect_low", "work_effect_high",
        "work_pairs")
"""Those of `jaxpace.share_work`, which are the same on all ranks."""


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
               times: Sequence[str], count: Counter | None = None) -> Cells:
  """Reads the named columns of the `steps` table."""
  cells = Cells(ranks, axis.size)
  cells.expect(times=times, values=durations)
  for data in table.read([*KEYS, *durations, *times], axis.span):
    cells.add(of_table(data), axis)
    if count:
      count.add(data.num_rows)
  return cells


def read_collectives(table: TableFiles, ranks: int, axis: StepAxis, count: Counter,
                     slots: Sequence[int] | None = None) -> Cells:
  """Reads entries and exits of the `collectives` table: of some slots, or of as many as its rows
  can be of."""
  held = HeldTimes._fields if slots is None and "held_ns" in table.columns else ()
  cells = (Cells(ranks, axis.size, (), _ROOM_OF_SLOTS * table.rows + _ROOM_ANYWAY)
           if slots is None else Cells(ranks, axis.size, slots))
  cells.expect(times=("enter_ns", "exit_ns", *held))
  columns = [*KEYS, "enter_ns", "exit_ns", *held]
  if table.highest_slot > 0:
    columns.append("collective")
  for data in table.read(columns, axis.span):
    cells.add(of_table(data), axis)
    count.add(data.num_rows)
  if cells.left_out and slots is None:
    table.problems.append("'collectives' numbers more collectives than its rows can be of: "
                          f"{len(cells.left_out):,} of them are left out.")
  return cells


def _read_ranks(table: TableFiles, axis: StepAxis, attempt: np.ndarray, ranks: np.ndarray,
                names: Sequence[str]) -> dict[str, np.ndarray]:
  """Reads [P, K] columns of some ranks' rows, as far as they belong to the attempts that count:
  `attempt`, [R, K]."""
  row_of_rank = np.full(len(attempt), -1, np.int64)
  row_of_rank[ranks] = np.arange(len(ranks))
  cells = Cells(len(ranks), axis.size)
  cells.expect(values=names)
  cells.attempt[0] = attempt[ranks]
  for data in table.read(["step", "rank", "attempt", *names], axis.span):
    own = row_of_rank[np.clip(data.column("rank").to_numpy(), 0, len(attempt) - 1)]
    if (own >= 0).any():
      cells.add({**of_table(data), "rank": own}, axis)
  return {name: values[0] for name, values in cells.columns.items()}


def read_guard(table: TableFiles, axis: StepAxis, attempt: np.ndarray) -> dict[str, np.ndarray]:
  """Reads a guard's columns, and those of shared work, of the lowest rank that recorded anything: a
  pacer's own columns are many, the report needs few.

  Args:
    table: the `steps` table.
    axis: the step numbers wanted.
    attempt: [R, K] newest attempt of each rank and step, -1 where nothing is recorded.

  Returns:
    [K] float32 by column, NaN where null; nothing if neither ran.
  """
  names = [f"decision_{name}" for name in (*GUARD, *WORK) if f"decision_{name}" in table.columns]
  recorded = np.flatnonzero((attempt >= 0).any(axis=1))
  if not {"decision_guard_on", "decision_work_uneven"}.intersection(names) or not recorded.size:
    return {}
  return {name.removeprefix("decision_"): values[0]
          for name, values in _read_ranks(table, axis, attempt, recorded[:1], names).items()}


def read_host_causes(table: TableFiles, axis: StepAxis, attempt: np.ndarray,
                     process_of_rank: np.ndarray) -> HostCauses:
  """Reads what the host did in each step, of each process's lowest rank.

  Args:
    table: the `steps` table.
    axis: the step numbers wanted.
    attempt: [R, K] newest attempt of each rank and step, -1 where nothing is recorded.
    process_of_rank: [R] int32, -1 where no row says.
  """
  names = {cause.column: cause.name for cause in HOST_CAUSES if cause.column in table.columns}
  recorded = np.flatnonzero((attempt >= 0).any(axis=1) & (process_of_rank >= 0))
  processes, first = np.unique(process_of_rank[recorded], return_index=True)
  if not names or not recorded.size:
    return HostCauses()
  found = _read_ranks(table, axis, attempt, recorded[first], list(names))
  return HostCauses(processes.astype(np.int64), {
      names[column]: values for column, values in found.items() if np.isfinite(values).any()})


def read_listening(path: pathlib.Path, run: str | None, axis: StepAxis, attempt: np.ndarray
                   ) -> tuple[Listening, list[str]]:
  """Reads what was heard in a run's steps.

  Args:
    path: run directory.
    run: id of the run; None takes every run's.
    axis: the step numbers wanted.
    attempt: [R, K] newest attempt of each rank and step, -1 where nothing is recorded; only the
      newest one's readings count.

  Returns:
    The readings, none where nobody listened; and sentences about what was left out.

  Raises:
    PermissionError: the folder or a part may not be read.
  """
  table = open_table("listening", list_parts(path / "listening", run).parts)
  newest = attempt.max(axis=0)
  parts: list[list[np.ndarray]] = []
  for rows in table.read([*Listening._fields, "attempt"], axis.span):
    data = of_table(rows)
    at, inside = axis.index(data["step"])
    keep = np.ones(len(at), bool) if inside is None else inside
    keep = keep & (data["attempt"] == newest[np.where(keep, at, 0)])
    parts.append([data[name][keep] for name in Listening._fields])
  step, slot, turn, heard, told = ([np.concatenate(each) for each in zip(*parts, strict=True)]
                                   or [np.zeros(0, np.int64)] * 5)
  # Of rows that say it twice, the one read last.
  order = np.lexsort((np.arange(len(step)), turn, slot, step))
  keys = np.stack([step, slot, turn])[:, order]
  last = np.append((keys[:, 1:] != keys[:, :-1]).any(axis=0), True)[:len(order)]
  return (Listening(*(values[order[last]] for values in (step, slot, turn, heard, told))),
          list(table.problems))


@dataclasses.dataclass(frozen=True)
class Bounds:
  """R ranks, K steps; int64 ns of each rank's own clock, `MISSING` where not known."""

  start: np.ndarray  # [R, K]
  end: np.ndarray  # [R, K]


def read_bounds(run: Run) -> Bounds:
  """Reads start and end of the steps of a run that was read, which a timeline shows and the report
  does not need. What can't be read is `MISSING`."""
  table = open_table("steps", list_parts(run.path / "steps", run.id).parts)
  axis = StepAxis(run.steps, bool((np.diff(run.steps) == 1).all()))
  if run.numbers is not None:
    table.renumber(run.numbers)
  cells = read_steps(table, run.ranks, axis, (), ("start_ns", "end_ns"))
  # A row written since the run was read may belong to a newer attempt, on another clock.
  same = cells.attempt[0] == run.attempt
  return Bounds(*(np.where(same, cells.columns[name][0], MISSING)
                  for name in ("start_ns", "end_ns")))


def read_names(table: TableFiles, wanted: set[int]) -> dict[int, tuple[str, int | None]]:
  """Name and bytes of each slot, from the first rows that have them."""
  names: dict[int, tuple[str, int | None]] = {}
  for data in table.read(["collective", "name", "bytes"]):
    if "name" not in data.column_names:
      continue
    slots = filled(data.column("collective"), MISSING)
    for slot in wanted - set(names):
      hits = np.flatnonzero(slots == slot)
      if hits.size:
        size = data.column("bytes")[int(hits[0])].as_py() if "bytes" in data.column_names else None
        size = size if isinstance(size, int) and size >= 0 else None
        names[slot] = str(data.column("name")[int(hits[0])].as_py() or "")[:4096], size
    if not wanted - set(names):
      break
  return names


def read_host_samples(path: pathlib.Path, run: str | None) -> tuple[HostSamples, list[str]]:
  """Reads all samples of a run.

  Args:
    path: run directory.
    run: id of the run; None takes every run's.

  Returns:
    The samples, none if nothing was sampled; and sentences about what was left out.

  Raises:
    PermissionError: the folder or a part may not be read.
  """
  table = open_table("hosts", list_parts(path / "hosts", run).parts)
  batches = list(table.read(["process", "attempt", "time_ns", *HOST_COLUMNS]))
  process = _join([_whole(batch, "process") for batch in batches])
  attempt = _join([_whole(batch, "attempt") for batch in batches])
  time_ns = _join([_whole(batch, "time_ns") for batch in batches])
  order = np.lexsort((time_ns, attempt, process))
  columns = {name: np.concatenate([_number(batch, name) for batch in batches] or [np.zeros(0)])
             for name in HOST_COLUMNS}
  samples = HostSamples(process[order].astype(np.int32), attempt[order].astype(np.int32),
                        time_ns[order],
                        {name: values[order] for name, values in columns.items()})
  return samples, list(table.problems)


def _join(parts: list[np.ndarray]) -> np.ndarray:
  return np.concatenate(parts or [np.zeros(0, np.int64)])


def _whole(batch: pa.Table, name: str) -> np.ndarray:
  if name not in batch.column_names:
    return np.zeros(batch.num_rows, np.int64)
  return filled(batch.column(name), 0).astype(np.int64)


def _number(batch: pa.Table, name: str) -> np.ndarray:
  """A column as floats; NaN throughout where it is absent or holds no numbers."""
  kind = batch.schema.field(name).type if name in batch.column_names else None
  if kind is None or not (pa.types.is_integer(kind) or pa.types.is_floating(kind)):
    return np.full(batch.num_rows, np.nan)
  # Null is NaN by now; whole numbers beyond 2^53 are rounded.
  return batch.column(name).to_numpy().astype(np.float64, copy=False)
