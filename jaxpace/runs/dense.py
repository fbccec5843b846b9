"""Builds a run in memory: reads the rows of its tables, from their files or kept in memory, into
dense arrays."""

from __future__ import annotations

import concurrent.futures
import pathlib
import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from jaxpace.core.words import plural
from jaxpace.runs import schema
from jaxpace.runs.collectives import Chosen, name_collectives
from jaxpace.runs.columns import KEYS, Axis, Cells
from jaxpace.runs.run import (
  HOST_CAUSES,
  MISSING,
  HeldTimes,
  HostCauses,
  HostSamples,
  Listening,
  Process,
  Run,
  RunError,
)
from jaxpace.runs.table_reader import Rows, TableFiles, open_table

HOST_COLUMNS = tuple(field.name for field in schema.HOSTS
                     if field.name not in ("time_ns", "process", "attempt"))
_ROOM, _ROOM_ANYWAY = 20, 1_000_000
"""Cells of a dense array for each row that there is, and cells in any case."""
_ROOM_OF_SLOTS = 64
PHASES = ("forward", "backward", "compute", "sync", "update", "gap")
_DURATIONS = (*(f"{name}_ns" for name in PHASES), "delay_ns", "delay_applied_ns", "held_ns")
_MOST_PHASES = 64
"""A user's phases that are read; a ring of timestamps has room for fewer."""
GUARD = ("guard_on", "guard_pair", "effect", "effect_low", "effect_high", "pairs")
"""Columns of `jaxpace.guard`, without the prefix `decision_`."""
WORK = ("work_uneven", "work_on", "work_effect", "work_effect_low", "work_effect_high",
        "work_pairs")
"""Those of work shared by speed, which are the same on all ranks."""


Table = TableFiles | Rows
Progress = Callable[[int, int], None]
"""Called from reading threads with the rows read so far and the rows in all."""


def build(path: pathlib.Path, info: dict[str, Any], processes: Sequence[Process], steps: Table,
          collectives: Table, axis: Axis, ranks: int, *, declared: int,
          window: tuple[int | None, int | None] = (None, None), chosen: Chosen | None = None,
          progress: Progress | None = None) -> Run:
  """Builds a run of the rows of its tables; `declared` are the ranks that it has by its own word,
  `chosen` which steps have their collectives laid out, None for all.

  The run is that over all these steps, without what else lies in its directory; where steps were
  chosen, `Run.detailed` makes of it the run over these.
  """
  of_steps, waits = _lay_out(steps, collectives, ranks, axis, chosen, progress)
  found = name_collectives(info, waits, collectives, by_exit=chosen is not None)
  attempt = of_steps.attempt[0]
  for collective in () if chosen is not None else found:
    np.maximum(attempt, collective.attempt, out=attempt)
  process_of_rank = np.maximum(of_steps.process_of_rank, waits.process_of_rank)
  for process in processes:
    for rank in process.ranks:
      if 0 <= rank < ranks and process_of_rank[rank] < 0:
        process_of_rank[rank] = process.process
  columns = {name: values[0] for name, values in of_steps.columns.items()}
  end_ns = columns.pop("end_ns" if chosen is None else "last_exit_ns", None)
  guard, causes = _read_few(steps, axis, attempt, of_steps.process_of_rank)
  return Run(path=path, id=str(info.get("run") or path.name), info=info, processes=tuple(processes),
             steps=axis.numbers, attempt=attempt, end_ns=end_ns,
             durations={name.removesuffix("_ns"): values for name, values in columns.items()},
             collectives=found, process_of_rank=process_of_rank,
             duplicates=max(of_steps.duplicates, waits.duplicates), problems=(), window=window,
             guard=guard, host_causes=causes, declared=declared)


def _lay_out(steps: Table, collectives: Table, ranks: int, axis: Axis,
             chosen: Chosen | None, progress: Progress | None) -> tuple[Cells, Cells]:
  """Reads both tables; of the steps of an observed run only those `chosen` have their
  collectives."""
  total, done, lock = steps.rows + collectives.rows, 0, threading.Lock()

  def count(rows: int) -> None:
    nonlocal done
    with lock:
      done += rows
      if progress:
        progress(done, total)

  names, times = _durations(steps), () if collectives.rows else ("end_ns",)
  if chosen is None:
    waits = _room_for_collectives(collectives, ranks, axis)
  else:
    times, names = ("last_exit_ns",), [name for name in names if name != "delay_ns"]
    waits = Cells(ranks, Axis(chosen.steps), chosen.slots.tolist(),
                  times=("enter_ns", "exit_ns"))
  of_steps = Cells(ranks, axis, times=times if steps.rows else (), values=names)
  with concurrent.futures.ThreadPoolExecutor(2) as pool:
    tasks = [pool.submit(_filled, of_steps, steps, KEYS, count),
             pool.submit(_filled, waits, collectives,
                         (*KEYS, "collective") if collectives.highest_slot > 0 else KEYS, count)]
    for task in tasks:
      task.result()
  if chosen is None:
    waits.drop_empty()
  return of_steps, waits


def _durations(table: Table) -> list[str]:
  """Names of the columns of durations that any part has; of a user's phases `_MOST_PHASES`."""
  columns = table.columns
  phases = sorted(name for name in columns if name.startswith("phase_") and name.endswith("_ns"))
  if len(phases) > _MOST_PHASES:
    table.problems.append(f"'steps' has {len(phases):,} columns phase_*: the first {_MOST_PHASES} "
                          "were read.")
  return sorted([name for name in columns if name in _DURATIONS] + phases[:_MOST_PHASES])


def count_ranks(path: pathlib.Path, tables: Sequence[TableFiles], declared: int, axis: Axis,
                problems: list[str]) -> int:
  """Finds how many ranks the dense arrays have, R: one more than the highest number. A number for
  which they would be much larger than the rows that they hold is damaged, and its rows are left
  out, with a sentence. Raises RunError where there is no other number."""
  most = (_ROOM * max(table.rows for table in tables) + _ROOM_ANYWAY) // axis.size
  highest = max(table.highest_rank + 1 for table in tables)
  for ranks in (max(declared, highest), highest):
    if ranks <= most:
      return ranks
  numbers = np.unique(np.concatenate([table.distinct("rank") for table in tables]))
  kept = numbers[numbers < most]
  if not kept.size:
    raise RunError(f"{path} has no rank below {int(numbers[0]):,}: its rank numbers are damaged.")
  problems.append(f"{plural(numbers.size - kept.size, 'rank')} left out: numbers from "
                  f"{int(numbers[kept.size]):,} on are no ranks of so few rows.")
  return max(int(kept[-1]) + 1, declared if declared <= most else 0)


def _filled(cells: Cells, table: Table, keys: Sequence[str] = KEYS,
            count: Callable[[int], None] = lambda rows: None) -> Cells:
  """Reads the columns that cells expect, and those that say what rows are of."""
  for data in table.read([*keys, *cells.columns], cells.steps.span):
    cells.add(data)
    count(len(data["step"]))
  return cells


def _room_for_collectives(table: Table, ranks: int, axis: Axis) -> Cells:
  """Empty cells of as many collectives as the rows of the table `collectives` can be of."""
  highest = max(table.highest_slot, 0)
  most = (_ROOM_OF_SLOTS * table.rows + _ROOM_ANYWAY) // max(1, ranks * axis.size)
  if highest > most:
    table.problems.append("'collectives' numbers more collectives than its rows can be of: those "
                          f"from {most + 1:,} on are left out.")
  held = HeldTimes._fields if "held_ns" in table.columns else ()
  return Cells(ranks, axis, range(min(highest, most) + 1), times=("enter_ns", "exit_ns", *held))


def _read_few(table: Table, axis: Axis, attempt: np.ndarray, process_of_rank: np.ndarray
              ) -> tuple[dict[str, np.ndarray], HostCauses]:
  """Reads what few ranks' rows tell, as far as they belong to the newest attempts, [R, K]: a
  pacer's own columns are many, the report needs few, and all ranks of a process have its causes.

  Returns [K] float32 by column of a guard and of shared work, NaN where null, of the lowest rank
  that recorded anything, nothing if neither ran; and what the host did in each step, of each
  process's lowest rank.
  """
  present = table.columns
  guard = [f"decision_{name}" for name in (*GUARD, *WORK) if f"decision_{name}" in present]
  if not {"decision_guard_on", "decision_work_uneven"}.intersection(guard):
    guard = []
  causes = {cause.column: cause.name for cause in HOST_CAUSES if cause.column in present}
  recorded = np.flatnonzero((attempt >= 0).any(axis=1))
  if not recorded.size or not (guard or causes):
    return {}, HostCauses()
  processes, first = np.unique(process_of_rank[recorded], return_index=True)
  ranks = np.sort(recorded[first])  # the lowest of all is that of its process
  cells = Cells(ranks, axis, values=[*guard, *causes])
  cells.attempt[0] = attempt[ranks]
  _filled(cells, table, ("step", "rank", "attempt"))
  found = {name: values[0] for name, values in cells.columns.items()}
  named = processes >= 0
  own = np.searchsorted(ranks, recorded[first[named]])
  of_causes = {name: found[column][own] for column, name in causes.items()}
  return ({name.removeprefix("decision_"): found[name][0] for name in guard},
          HostCauses(processes[named].astype(np.int64),
                     {name: values for name, values in of_causes.items()
                      if np.isfinite(values).any()}))


def _read_all(path: pathlib.Path, run: str | None, name: str, columns: Sequence[str],
              problems: list[str], span: tuple[int, int] | None = None) -> dict[str, np.ndarray]:
  """All rows of a small table, `MISSING` where a part lacks a column. Sentences about what was left
  out are added to `problems`."""
  table = open_table(path, name, run)
  parts = list(table.read(columns, span))
  problems += table.problems
  return {column: np.concatenate([
      part[column] if column in part else np.full(len(next(iter(part.values()))), MISSING)
      for part in parts] or [np.zeros(0, np.int64)]) for column in columns}


def read_listening(path: pathlib.Path, run: str | None, axis: Axis, attempt: np.ndarray,
                   problems: list[str]) -> Listening | None:
  """Reads what was heard in a run's steps; None where nobody listened. Of the attempts of each rank
  and step, [R, K], only the newest one's readings count. Sentences about what was left out are
  added to `problems`."""
  rows = _read_all(path, run, "listening", [*Listening._fields, "attempt"], problems, axis.span)
  at, inside = axis.index(rows["step"])
  keep = np.ones(len(at), bool) if inside is None else inside
  keep = keep & (rows["attempt"] == attempt.max(axis=0)[np.where(keep, at, 0)])
  heard = Listening(*(rows[name][keep] for name in Listening._fields))
  if not len(heard.step):
    return None
  # Of rows that say it twice, the one read last.
  _, last = np.unique(np.stack(heard[:3])[:, ::-1], axis=1, return_index=True)
  return Listening(*(values[::-1][last] for values in heard))


Bounds = tuple[np.ndarray, np.ndarray]
"""When steps started and ended: [R, K] int64 ns each of each rank's own clock, `MISSING` where not
known."""


def read_bounds(run: Run) -> Bounds:
  """Reads when the steps of a run that was read started and ended, which a timeline shows and the
  report does not need."""
  cells = _filled(Cells(run.ranks, Axis(run.steps), times=("start_ns", "end_ns")),
                  open_table(run.path, "steps", run.id))
  # A row written since the run was read may belong to a newer attempt, on another clock.
  same = cells.attempt[0] == run.attempt
  start, end = (np.where(same, cells.columns[name][0], MISSING) for name in ("start_ns", "end_ns"))
  return start, end


def read_host_samples(path: pathlib.Path, run: str | None, problems: list[str]
                      ) -> HostSamples | None:
  """Reads all samples of a run; None where nothing was sampled. Sentences about what was left out
  are added to `problems`."""
  keys = ("process", "attempt", "time_ns")
  rows = _read_all(path, run, "hosts", [*keys, *HOST_COLUMNS], problems)
  process, attempt, time_ns = (rows.pop(name) for name in keys)
  time_ns = np.where(time_ns == MISSING, 0, time_ns)
  order = np.lexsort((time_ns, attempt, process))
  return HostSamples(
      process[order].astype(np.int32), attempt[order].astype(np.int32), time_ns[order],
      {name: np.where(values == MISSING, np.nan, values)[order].astype(np.float64, copy=False)
       for name, values in rows.items()}) if len(order) else None
