"""Follows the parts of one table as they appear: each row is read once, or again with the part it
was merged into."""

from __future__ import annotations

import os
import pathlib
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from jaxpace.trace.columns import Columns, of_table, read_small
from jaxpace.trace.part_files import (
  PartFile,
  is_temporary,
  others_left_out,
  outermost,
  parse_part_name,
)
from jaxpace.trace.table_reader import NEEDED, TableFiles, open_table


class PartRows(NamedTuple):
  """Rows of one part, at most a row group of it. Rows that a merge carried over may come a second
  time."""

  process: int
  data: Columns


class PartFollower:
  """The new parts of one table, told by their names: a file is opened once.

  A job writes small parts and merges them into larger ones whose names cover theirs. A part counts
  as new if its range goes beyond what was read of its process; the larger part of a merge that
  holds nothing new is never opened.
  """

  def __init__(self, folder: pathlib.Path, table: str, run: str | None = None):
    """Reads nothing yet.

    Args:
      folder: the table's folder; it may be missing.
      table: its name.
      run: run id; None takes that of most parts.
    """
    self._folder, self._table, self._run = folder, table, run
    self._names: set[str] = set()
    self._pending: dict[int, dict[str, PartFile]] = {}
    self._read: dict[int, int] = {}  # by process, the number of the last part read
    self._torn: dict[str, tuple[PartFile, tuple[int, int]]] = {}
    self.problems: list[str] = []
    self.unnamed = ""
    """Says which files are no parts, if any are not."""
    self.newest_unix: float | None = None
    """When the newest of the parts that `poll` found was written, by the file system's clock; None
    if it found none."""

  def poll(self, columns: Sequence[str], steps: int) -> Iterator[PartRows]:
    """Yields the rows that are new, oldest first in each process.

    Args:
      columns: names wanted; those that a part lacks are absent.
      steps: of what has piled up, only the newest so many step numbers of each process are wanted.

    Raises:
      PermissionError: the folder or a part can't be read.
    """
    self._list()
    for process, parts in sorted(self._pending.items()):
      yield from self._catch_up(process, outermost(parts.values()), columns, steps)
      read = self._read.get(process, -1)
      self._pending[process] = {name: part for name, part in parts.items() if part.last > read}
    yield from self._mended(columns)

  @property
  def refused(self) -> bool:
    """Whether files lie there that are no parts, or can't be read."""
    return bool(self.unnamed or self.problems)

  def _list(self) -> None:
    self.newest_unix = None
    try:
      names = set(os.listdir(self._folder))
    except (FileNotFoundError, NotADirectoryError):
      names = set()
    found = [(name, part) for name in names - self._names if (part := parse_part_name(name))]
    if names != self._names:
      others = sorted(name for name in names if not is_temporary(name)
                      and parse_part_name(name) is None)
      self.unnamed = others_left_out(self._table, others[:3], len(others)) if others else ""
    if self._run is None and found:
      self._run = Counter(part.run for _, part in found).most_common(1)[0][0]
    for name, part in found:
      if part.run == self._run and part.last > self._read.get(part.process, -1):
        self._pending.setdefault(part.process, {})[name] = PartFile(
            self._folder / name, part.run, part.process, part.first, part.last)
    for process, parts in self._pending.items():
      self._pending[process] = {name: part for name, part in parts.items() if name in names}
    self._torn = {name: value for name, value in self._torn.items() if name in names}
    self._names = names

  def _catch_up(self, process: int, parts: list[PartFile], columns: Sequence[str],
                steps: int) -> Iterator[PartRows]:
    """Opens parts from the newest back, as far as is wanted, and reads them in their order."""
    opened: list[tuple[PartFile, TableFiles | Columns]] = []
    read = self._read.get(process, -1)
    newest: int | None = None
    for part in reversed(parts):
      if part.last <= read:
        break
      rows = read_small(part.path, NEEDED[self._table], columns)
      if rows is not None:
        low, high = int(rows["step"].min()), int(rows["step"].max())
        opened.append((part, rows))
      else:
        table = open_table(self._table, [part])
        if table.vanished:  # merged just now: what holds its rows is listed next time
          return
        if not table.rows:
          self._note(part, table)
          continue
        low, high = table.step_range
        opened.append((part, table))
      newest = high if newest is None else newest
      if low <= newest - steps + 1:
        break
    for part, source in reversed(opened):
      if not isinstance(source, TableFiles):
        yield PartRows(process, source)
        continue
      for data in source.read(columns):
        yield PartRows(process, of_table(data))
      if source.vanished:
        return
      self._note(part, source)
    if parts:
      self._read[process] = max(read, parts[-1].last)
      self._written(parts[-1])

  def _note(self, part: PartFile, table: TableFiles) -> None:
    if table.torn:
      self.problems += [problem for problem in table.problems if problem not in self.problems]
      self._torn[part.path.name] = part, _stamp(part.path)

  def _mended(self, columns: Sequence[str]) -> Iterator[PartRows]:
    """Parts that could not be read and have changed since: copied in pieces, or seen too early over
    a network."""
    for name, (part, stamp) in list(self._torn.items()):
      now = _stamp(part.path)
      if now == stamp:
        continue
      del self._torn[name]
      table = open_table(self._table, [part])
      self._note(part, table)
      if table.rows:
        self.problems = [problem for problem in self.problems if name not in problem]
        for data in table.read(columns):
          yield PartRows(part.process, of_table(data))

  def _written(self, part: PartFile) -> None:
    written = _stamp(part.path)[1] / 1e9
    if written:
      self.newest_unix = max(written, self.newest_unix or 0.0)


def _stamp(path: pathlib.Path) -> tuple[int, int]:
  """Size and time of the last change, ns since 1970; zeros where it is gone."""
  try:
    status = path.stat()
  except OSError:
    return 0, 0
  return status.st_size, status.st_mtime_ns
