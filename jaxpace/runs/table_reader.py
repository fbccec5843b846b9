"""Finds the Parquet parts of a table and reads its rows, part by part; a part that can't be read is
reported and left out.

A job of many processes writes dozens of small files a second: each is opened once, and read in one
go.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import pathlib
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from jaxpace.core.words import plural
from jaxpace.files.reading import UnreadableError, check_regular, read_bytes
from jaxpace.runs.columns import (
  ABSENT,
  LIMITS,
  Columns,
  in_range,
  name_fault,
  of_table,
  sound,
  type_fault,
)

# The last but one: column names of a damaged footer.
UNREADABLE = (OSError, pa.ArrowException, UnicodeDecodeError, UnreadableError)
NEEDED = {"steps": ("step", "rank"), "collectives": ("step", "rank", "enter_ns", "exit_ns"),
          "hosts": ("time_ns", "process"),
          "listening": ("step", "collective", "turn", "heard_ns", "told_ns")}
"""Columns that a part of each table must have."""
_SMALL, _MOST_HELD = 1 << 18, 64 << 20
"""Bytes of a file that is read in one go, and of all that are held until their rows are read."""
_LARGEST_BATCH = 1 << 20
"""Rows that are handed on at once."""
_ROWS_OF_A_BYTE, _ROWS_ANYWAY = 1000, 1 << 20
"""More rows than this a byte of the file are no rows: the plainest part that a recorder writes has
70."""


class TableFiles:
  """The readable parts of one table. Reading may find more of them torn."""

  def __init__(self, name: str, parts: Sequence[Part], problems: Sequence[str] = ()):
    """Reads the footers of its parts, in their order; of a torn part, the leftovers inside it are
    taken instead. `problems` say what was wrong with the folder."""
    self.name = name
    self.torn: set[str] = set()
    """Names of parts that can't be read."""
    self.vanished: set[str] = set()
    """Names of parts that were listed and are gone."""
    self.problems = list(problems)
    self._held = 0
    self._files = [opened for part in parts for opened in self._open(part)]
    self.rows = sum(file.meta.num_rows for file in self._files)
    self.step_range = self._range("step")
    if self.step_range[1] < 0:
      self.rows = 0  # none that says which step it is of
    self.highest_rank = self._range("rank")[1] if self.rows else -1
    self.highest_slot = self._range("collective")[1] if self.rows and name == "collectives" else -1

  @property
  def columns(self) -> set[str]:
    """Names of the columns that any part has."""
    return {name for file in self._files for name in file.meta.schema.names}

  def read(self, columns: Sequence[str], keep: tuple[int, int] | None = None) -> Iterator[Columns]:
    """Yields the columns of numbers, brought into range; else as `tables`."""
    return (sound(of_table(rows), self._say) for rows in self.tables(columns, keep))

  def tables(self, columns: Sequence[str], keep: tuple[int, int] | None = None
             ) -> Iterator[pa.Table]:
    """Yields those columns of the rows as they are, at most a row group at a time; of those that a
    part lacks its tables have what `columns.ABSENT` says, and not the others. Row groups wholly
    outside of the steps `keep`, the lowest and the highest, are not read."""
    for file in self._files:
      yield from self._read_file(file, columns, keep)

  def distinct(self, column: str) -> np.ndarray:
    """The distinct numbers of a column, rising."""
    parts = [np.unique(data[column]) for data in self.read([column])]
    return np.unique(np.concatenate(parts)) if parts else np.empty(0, np.int64)

  def _read_file(self, opened: _Opened, columns: Sequence[str],
                 keep: tuple[int, int] | None) -> Iterator[pa.Table]:
    part, meta = opened.part, opened.meta
    there = set(meta.schema.names)
    present = [c for c in columns if c in there]
    try:
      # What is in memory needs no closing.
      with (contextlib.nullcontext(opened.held) if opened.held else pq.ParquetFile(
          part.path, metadata=meta, memory_map=False, page_checksum_verification=True)) as file:
        for group in range(meta.num_row_groups):
          span = _statistics(meta, group, "step")
          if keep and span and (span[1] < keep[0] or span[0] > keep[1]):
            continue
          for batch in file.iter_batches(_LARGEST_BATCH, row_groups=[group], columns=present,
                                         use_threads=False):
            yield _completed(pa.Table.from_batches([batch]), columns)
    except FileNotFoundError:
      self._gone(part)
    except PermissionError:
      raise
    except UNREADABLE as error:
      self._left_out(self.torn, part, "is corrupt, its remaining rows are left out "
                     f"({first_line(error)}).")
      for inner in self._inside(part):
        yield from self._read_file(inner, columns, keep)

  def _range(self, column: str) -> tuple[int, int]:
    spans: list[tuple[int, int]] = []
    for file in self._files:
      found = [_statistics(file.meta, group, column) for group in range(file.meta.num_row_groups)]
      if None in found:
        values = [sound(of_table(rows), self._say)[column]
                  for rows in self._read_file(file, [column], None)]
        found = [(int(v.min()), int(v.max())) for v in values if v.size]
      spans.extend(s for s in found if s)
    most = LIMITS[column]
    for low, high in spans:
      in_range(column, low, high, self._say)
    inside = [(max(low, 0), min(high, most)) for low, high in spans if low <= most and high >= 0]
    return (min(s[0] for s in inside), max(s[1] for s in inside)) if inside else (0, -1)

  def _open(self, part: Part) -> list[_Opened]:
    """A part that holds rows; of a torn one, the leftovers inside it."""
    opened = _opened(part, self.name)
    if opened is None:
      self._gone(part)
      return []
    if isinstance(opened, _Opened):
      return self._with_rows(opened)
    self._left_out(self.torn, part, f"left out: {opened}.")
    return self._inside(part)

  def _inside(self, part: Part) -> list[_Opened]:
    found = (_opened(inner, self.name) for inner in part.inside)
    return [one for opened in found if isinstance(opened, _Opened)
            for one in self._with_rows(opened)]

  def _with_rows(self, opened: _Opened) -> list[_Opened]:
    """Itself, if it has rows: held in memory while there is room."""
    self._held += opened.size if opened.held else 0
    kept = opened if self._held <= _MOST_HELD else opened._replace(held=None)
    return [kept] if opened.meta.num_rows else []

  def _say(self, what: str) -> None:
    sentence = f"'{self.name}' {what}"
    if sentence not in self.problems:
      self.problems.append(sentence)

  def _gone(self, part: Part) -> None:
    """The job still runs and has merged this part into another since it was listed."""
    self._left_out(self.vanished, part, "vanished while it was read: is the job still running?")

  def _left_out(self, among: set[str], part: Part, why: str) -> None:
    """Says it once."""
    if part.path.name not in among:
      among.add(part.path.name)
      self.problems.append(f"{self.name}/{part.path.name} {why}")


class Rows:
  """Rows of one table in memory, which are read as `TableFiles` are."""

  def __init__(self) -> None:
    self._kept: list[tuple[int, int, Columns]] = []
    self.problems: list[str] = []

  def add(self, data: Columns) -> None:
    """Takes rows in, at least one."""
    self._kept.append((int(data["step"].min()), int(data["step"].max()), data))

  def forget(self, below: int) -> None:
    """Lets go of rows of steps below one, as far as none beside them is of a later step."""
    self._kept = [kept for kept in self._kept if kept[1] >= below]

  @property
  def rows(self) -> int:
    """Number of rows."""
    return sum(len(data["step"]) for _, _, data in self._kept)

  @property
  def columns(self) -> set[str]:
    """Names of the columns that any row has."""
    return set().union(*(data for _, _, data in self._kept))

  @property
  def highest_slot(self) -> int:
    """Highest number of a collective; -1 where rows don't say theirs."""
    return max((int(data["collective"].max()) for _, _, data in self._kept
                if "collective" in data), default=-1)

  def read(self, columns: Sequence[str], keep: tuple[int, int]) -> Iterator[Columns]:
    """Yields the rows of the steps `keep`, the first and the last one, and some beside them."""
    for low, high, data in self._kept:
      if high >= keep[0] and low <= keep[1]:
        yield {name: data[name] for name in columns if name in data}


class _Opened(NamedTuple):
  """A part that can be read, as far as its footer says."""

  part: Part
  meta: pq.FileMetaData
  size: int
  """Bytes."""
  held: pq.ParquetFile | None
  """All of a small one, in memory."""


def _opened(part: Part, table: str) -> _Opened | str | None:
  """A part's file, or why it can't be used; None if it is gone."""
  held = None
  try:
    size = check_regular(part.path)
    if size == 0:
      return "empty"
    if size <= _SMALL:
      held = pq.ParquetFile(pa.BufferReader(read_bytes(part.path, _SMALL)),
                            page_checksum_verification=True)
      meta = held.metadata
    else:
      meta = pq.read_metadata(part.path)
    fields = list(meta.schema.to_arrow_schema())
    names = [field.name for field in fields]
    for group in range(meta.num_row_groups):
      _statistics(meta, group, "")  # reads the names that its columns have there
  except PermissionError:
    raise
  except FileNotFoundError:
    return None
  except UNREADABLE as error:
    return f"torn or no Parquet file ({first_line(error)})"
  lacking = [name for name in NEEDED[table] if name not in names]
  if lacking:
    return f"it has no column {' and '.join(map(repr, lacking))}"
  fault = name_fault(names) or next(filter(None, map(type_fault, fields)), None)
  if fault:
    return fault
  if meta.num_rows > _ROWS_ANYWAY + _ROWS_OF_A_BYTE * size:
    return f"it claims {meta.num_rows:,} rows in {size:,} bytes"
  return _Opened(part, meta, size, held)


def _completed(rows: pa.Table, columns: Sequence[str]) -> pa.Table:
  for name in columns:
    if name in ABSENT and name not in rows.column_names:
      rows = rows.append_column(name, pa.array(np.full(len(rows), ABSENT[name])))
  return rows


def _statistics(meta: pq.FileMetaData, group: int, column: str) -> tuple[int, int] | None:
  row_group = meta.row_group(group)
  for i in range(row_group.num_columns):
    chunk = row_group.column(i)
    if chunk.path_in_schema == column:
      stats: Any = chunk.statistics
      return (int(stats.min), int(stats.max)) if stats is not None and stats.has_min_max else None
  return 0, 0


def first_line(error: BaseException) -> str:
  """What an error says, cut short."""
  return next(itertools.chain(str(error).strip().splitlines(),
                              [type(error).__name__]))[:120].rstrip(". ")


class Part(NamedTuple):
  """Parts `first` to `last` of a process's table, merged, by what its file's name says. Where that
  range lies inside another's it is a leftover of a merge."""

  run: str
  process: int
  first: int
  last: int
  path: pathlib.Path = pathlib.Path()
  inside: tuple[Part, ...] = ()
  """Parts whose rows it already holds: what a merge left behind."""

  @property
  def file_name(self) -> str:
    """The name of the part's file."""
    return f"{self.run}-p{self.process:05d}.{self.first:06d}-{self.last:06d}.parquet"


_PART_NAME = re.compile(r"^(.+)-p(\d{5,})\.(\d{6,})-(\d{6,})\.parquet$")


@functools.lru_cache(1 << 16)
def parse_part_name(name: str) -> Part | None:
  """Inverse of `Part.file_name`; None for a name that is not a part's."""
  match = _PART_NAME.match(name)
  part = match and Part(match[1], int(match[2]), int(match[3]), int(match[4]))
  return part if part and part.first <= part.last else None


def list_parts(folder: pathlib.Path) -> tuple[list[Part], list[str]]:
  """Lists a table's folder, which may be missing: the parts, of any run, by name; and names of
  other files, without temporary ones."""
  try:
    names = sorted(os.listdir(folder))
  except (FileNotFoundError, NotADirectoryError):
    return [], []
  # Others are still being written, or were left by a writer that was killed.
  found = [(name, parse_part_name(name)) for name in names
           if not name.startswith(".") and not name.endswith((".tmp", "~"))]
  return ([part._replace(path=folder / name) for name, part in found if part],
          [name for name, part in found if not part])


def open_table(directory: pathlib.Path, name: str, run: str | None) -> TableFiles:
  """Opens a table, of one run or of every run; leftovers of a merge hang on the part that holds
  them."""
  found, others = list_parts(directory / name)
  own = [part for part in found if run in (None, part.run)]
  problems = []
  if foreign := len(found) - len(own):
    problems.append(f"{plural(foreign, 'part')} of other runs in '{name}' left out.")
  if others:
    problems.append(others_left_out(name, others))
  return TableFiles(name, outermost(own), problems)


def others_left_out(table: str, names: Sequence[str]) -> str:
  """Says that some files of a table's folder are none of its parts."""
  more = f" and {len(names) - 3} more" if len(names) > 3 else ""
  return (f"{plural(len(names), 'file')} in '{table}' left out ({', '.join(names[:3])}{more}): "
          "not named as parts of a recorded run are, such as run-p00000.000000-000000.parquet.")


def outermost(parts: Iterable[Part]) -> list[Part]:
  """Puts parts in their order; those whose range lies inside another's hang on that one."""
  nested: list[Part] = []
  for part in sorted(parts, key=lambda p: (p.run, p.process, p.first, -p.last)):
    outer = nested[-1] if nested else None
    if outer and (outer.run, outer.process) == (part.run, part.process) and part.last <= outer.last:
      nested[-1] = outer._replace(inside=(*outer.inside, part))
    else:
      nested.append(part)
  return nested
