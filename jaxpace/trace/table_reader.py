"""Reads the rows of one table, part by part; a part that can't be read is reported and left out."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from jaxpace.trace.part_files import PartFile

_UNREADABLE = (OSError, pa.ArrowException, UnicodeDecodeError)  # the last: column names of a damaged footer
NEEDED = {"steps": ("step", "rank"), "collectives": ("step", "rank", "enter_ns", "exit_ns"),
          "hosts": ("time_ns", "process")}
"""Columns that a part of each table must have."""
_WHOLE = ("step", "rank", "process", "attempt", "collective")
_USERS = ("host_", "decision_")
"""Begin the names of columns that users and pacers name as they like, `host_pauses_ns` say: they hold floats."""


class TableFiles:
  """The readable parts of one table. Reading may find more of them torn."""

  def __init__(self, name: str, files: list[tuple[PartFile, pq.FileMetaData]], torn: int, vanished: int,
               problems: list[str]):
    self.name = name
    self.torn = torn
    self.vanished = vanished
    self.problems = problems
    self.unkeyed = 0
    self._files = files
    self.rows = sum(meta.num_rows for _, meta in files)
    self.step_range = self._range("step")
    self.highest_rank = self._range("rank")[1] if self.rows else -1
    self.highest_slot = self._range("collective")[1] if self.rows and name == "collectives" else -1

  @property
  def columns(self) -> set[str]:
    return {name for _, meta in self._files for name in meta.schema.names}

  def columns_like(self, wanted: Sequence[str], prefix: str) -> list[str]:
    """Names of the columns in `wanted` or with a prefix, as far as any part has them."""
    return sorted(c for c in self.columns if c in wanted or (c.startswith(prefix) and c.endswith("_ns")))

  def read(self, columns: Sequence[str], keep: tuple[int, int] | None = None) -> Iterator[pa.Table]:
    """Yields the rows, at most a row group at a time.

    Args:
      columns: names wanted; those a part lacks are absent from its tables.
      keep: lowest and highest step wanted; row groups wholly outside are not read.
    """
    for part, meta in self._files:
      yield from self._read_part(part, meta, columns, keep)

  def distinct_steps(self) -> list[np.ndarray]:
    """Every part's distinct step numbers."""
    return [np.unique(table.column("step").to_numpy()) for table in self.read(["step"])]

  def _read_part(self, part: PartFile, meta: pq.FileMetaData, columns: Sequence[str],
                 keep: tuple[int, int] | None) -> Iterator[pa.Table]:
    present = [c for c in columns if c in meta.schema.names]
    try:
      with pq.ParquetFile(part.path, metadata=meta, memory_map=False, page_checksum_verification=True) as file:
        for group in range(meta.num_row_groups):
          span = _statistics(meta, group, "step")
          if keep and span and (span[1] < keep[0] or span[0] > keep[1]):
            continue
          yield self._keyed(file.read_row_group(group, columns=present, use_threads=False))
    except FileNotFoundError:
      # The job still runs and has merged this part into another since it was listed.
      self.vanished += 1
      self.problems.append(f"{self.name}/{part.path.name} vanished while it was read: is the job still running?")
    except PermissionError:
      raise
    except _UNREADABLE as error:
      self.torn += 1
      self.problems.append(f"{self.name}/{part.path.name} is corrupt, its remaining rows are left out "
                           f"({_first_line(error)}).")
      for inner in part.inside:
        inner_meta = _metadata(inner, self.name)
        if inner_meta is not None and not isinstance(inner_meta, str):
          yield from self._read_part(inner, inner_meta, columns, keep)

  def _keyed(self, rows: pa.Table) -> pa.Table:
    """Without the rows that don't say which rank, step or attempt they are of."""
    keys = [name for name in rows.column_names if name in _WHOLE and rows.column(name).null_count]
    if not keys:
      return rows
    known = rows.filter(functools.reduce(pc.and_, [pc.is_valid(rows.column(name)) for name in keys]))
    if not self.unkeyed:
      self.problems.append(f"'{self.name}' holds rows without {' and '.join(keys)}: left out.")
    self.unkeyed += rows.num_rows - known.num_rows
    return known

  def _range(self, column: str) -> tuple[int, int]:
    spans: list[tuple[int, int]] = []
    for part, meta in self._files:
      found = [_statistics(meta, group, column) for group in range(meta.num_row_groups)]
      if None in found:
        values = [t.column(column).to_numpy() for t in self._read_part(part, meta, [column], None)]
        found = [(int(v.min()), int(v.max())) for v in values if v.size]
      spans.extend(s for s in found if s)
    return (min(s[0] for s in spans), max(s[1] for s in spans)) if spans else (0, -1)


def open_table(name: str, parts: Sequence[PartFile]) -> TableFiles:
  """Reads the footers of a table's parts; of a torn part, the leftovers inside it are taken instead."""
  files: list[tuple[PartFile, pq.FileMetaData]] = []
  torn, vanished = 0, 0
  problems: list[str] = []
  for part in parts:
    meta = _metadata(part, name)
    if meta is None:
      vanished += 1
      problems.append(f"{name}/{part.path.name} vanished while it was read: is the job still running?")
      continue
    if not isinstance(meta, str):
      if meta.num_rows:
        files.append((part, meta))
      continue
    torn += 1
    problems.append(f"{name}/{part.path.name} left out: {meta}.")
    for inner in part.inside:
      inner_meta = _metadata(inner, name)
      if inner_meta is not None and not isinstance(inner_meta, str) and inner_meta.num_rows:
        files.append((inner, inner_meta))
  return TableFiles(name, files, torn, vanished, problems)


def _metadata(part: PartFile, table: str) -> pq.FileMetaData | str | None:
  """The footer, or why it can't be used; None if the file is gone."""
  try:
    if part.path.stat().st_size == 0:
      return "empty file"
    meta = pq.read_metadata(part.path)
    names, fields = meta.schema.names, list(meta.schema.to_arrow_schema())
  except PermissionError:
    raise
  except FileNotFoundError:
    return None
  except _UNREADABLE as error:
    return f"torn or no Parquet file ({_first_line(error)})"
  lacking = [name for name in NEEDED[table] if name not in names]
  if lacking:
    return f"it has no column {' and '.join(map(repr, lacking))}"
  for field in fields:
    ours = field.name.endswith("_ns") and not field.name.startswith(_USERS)
    if (field.name in _WHOLE or ours) and not pa.types.is_integer(field.type):
      return f"its column {field.name!r} holds {field.type}, not whole numbers"
  return meta


def _statistics(meta: pq.FileMetaData, group: int, column: str) -> tuple[int, int] | None:
  row_group = meta.row_group(group)
  for i in range(row_group.num_columns):
    chunk = row_group.column(i)
    if chunk.path_in_schema == column:
      stats: Any = chunk.statistics
      return (int(stats.min), int(stats.max)) if stats is not None and stats.has_min_max else None
  return 0, 0


def _first_line(error: BaseException) -> str:
  return next(itertools.chain(str(error).strip().splitlines(), [type(error).__name__]))[:120].rstrip(". ")
