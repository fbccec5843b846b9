"""Parquet parts of one table: written whole or not at all, small ones merged into larger ones.

A part is written under a temporary name and renamed, so that a reader or a crash never sees half of
one. Every 32 small parts become one larger part whose name covers their range; the small ones are
deleted after the rename, so a crash in between leaves parts contained in another, which readers
ignore.
"""

from __future__ import annotations

# pyarrow imports pandas with its first array, where that is installed, and pandas this: too late
# once Python shuts down, when a short run is written.
import concurrent.futures.thread  # noqa: F401
import itertools
import logging
import os
import pathlib
from typing import BinaryIO, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from jaxpace.files.folders import Folder
from jaxpace.files.reading import regular_file
from jaxpace.record.columns import Columns, length
from jaxpace.runs import schema
from jaxpace.runs.table_reader import UNREADABLE, Part, first_line, outermost, parse_part_name

_LOG = logging.getLogger("jaxpace")
_NEVER_MERGED = 99
MERGE_PARTS = 32
"""Small parts that make a larger one."""
MERGE_ROWS = 1_000_000
"""Rows of the largest part a merge makes: it keeps a merge well under a second, and its memory
small."""


def to_arrow(columns: Columns, table: str) -> pa.Table:
  """Converts columns to an Arrow table: the schema's columns first, null where absent, then the
  others."""
  fields = schema.TABLES[table]
  known = [pa.nulls(length(columns), field.type) if field.name not in columns
           else _array(columns[field.name], field.type) for field in fields]
  others = {name: pa.array(columns[name]) for name in sorted(set(columns) - set(fields.names))}
  return pa.Table.from_arrays([*known, *others.values()], schema=pa.schema(
      [*fields, *(pa.field(name, array.type) for name, array in others.items())]))


def _array(values: np.ndarray, kind: pa.DataType) -> pa.Array:
  if not pa.types.is_dictionary(kind):
    return pa.array(values, kind)
  names, codes = np.unique(values, return_inverse=True)
  return pa.DictionaryArray.from_arrays(pa.array(codes.astype(np.int16)),
                                        pa.array(names.tolist(), pa.string()))


class _Part(NamedTuple):
  id: Part
  rows: int
  level: int


class PartStore:
  """The parts of one table of one process of one run. Every method does file I/O and may raise
  `OSError`."""

  def __init__(self, directory: pathlib.Path, table: str, run: str, process: int):
    """Opens the store; parts of the same run and process already there are kept and counted on
    from."""
    self._table = table
    self._run, self._process = run, process
    directory.mkdir(parents=True, exist_ok=True)
    self._folder = Folder(directory, table)
    self._parts = self._recover()
    self._preliminary: _Part | None = None

  def append(self, columns: Columns, merge: bool = True, preliminary: bool = False) -> None:
    """Writes one small part; merges if enough of them have come together.

    Args:
      columns: columns of the table; no part is written for none or empty ones.
      merge: False to leave merging for later, when time is short.
      preliminary: whether the next part takes this one's place, as the result of a merge would.
    """
    if not length(columns):
      return
    data = to_arrow(columns, self._table)
    number = self._parts[-1].id.last + 1 if self._parts else 0
    first = number if self._preliminary is None else self._preliminary.id.first
    added = _Part(Part(self._run, self._process, first, number), data.num_rows, 0)
    self._write(added.id, data)
    self.drop_preliminary()
    self._parts.append(added)
    if preliminary:
      self._preliminary = added
    elif merge:
      self._merge_full_levels()

  def drop_preliminary(self) -> None:
    """Takes a preliminary part away."""
    if self._preliminary is not None:
      self._parts.remove(self._preliminary)
      self._folder.unlink(self._preliminary.id.file_name)
      self._preliminary = None

  def compact(self) -> None:
    """Merges the newest parts, at most `MERGE_ROWS` rows of them, so that a short run ends as a
    single part."""
    begin, rows = len(self._parts), 0
    while begin and rows + self._parts[begin - 1].rows <= MERGE_ROWS:
      begin -= 1
      rows += self._parts[begin].rows
    self._merge(begin, max((part.level for part in self._parts[begin:]), default=0) + 1)

  def _recover(self) -> list[_Part]:
    """Finds this process's parts of an earlier attempt, and tidies what a crash left."""
    found = []
    for name in self._folder.names():
      if name.startswith(f".{self._run}-p{self._process:05d}.") and name.endswith(".tmp"):
        self._folder.unlink(name)
      named = parse_part_name(name)
      if named and (named.run, named.process) == (self._run, self._process):
        found.append(named)
    parts: list[_Part] = []
    for part in outermost(found):
      for leftover in part.inside:
        self._folder.unlink(leftover.file_name)
      try:
        with self._open(part) as file:
          rows = pq.read_metadata(file).num_rows
      except UNREADABLE:
        rows = MERGE_ROWS  # Damaged: left as it is, and too large to be merged with anything.
      # Level 1: not merged with the new small parts before `compact`.
      parts.append(_Part(part, rows, 1))
    return parts

  def _write(self, part: Part, data: pa.Table) -> None:
    """Writes a part under a temporary name, then gives it its own."""
    with self._folder.replacing(part.file_name) as file:
      pq.write_table(data, file, **_encoding(data.schema))

  def _merge_full_levels(self) -> None:
    before = 0
    while before != len(self._parts):
      before = len(self._parts)
      level, run = next(itertools.groupby(reversed(self._parts), lambda part: part.level))
      if (count := len(list(run))) >= MERGE_PARTS and level < _NEVER_MERGED:
        self._merge(before - count, level + 1)

  def _merge(self, begin: int, level: int) -> None:
    """Merges the parts from index `begin` on into parts of at most `MERGE_ROWS` rows."""
    groups: list[list[_Part]] = []
    for part in self._parts[begin:]:
      if groups and sum(p.rows for p in groups[-1]) + part.rows <= MERGE_ROWS:
        groups[-1].append(part)
      else:
        groups.append([part])
    merged = self._parts[:begin]
    for group in groups:
      merged += self._merge_group(group, level)
    self._parts = merged

  def _merge_group(self, group: list[_Part], level: int) -> list[_Part]:
    """Merges parts into one; where one can't be read, they all stay as they are."""
    if len(group) == 1:
      return [group[0]._replace(level=level)]
    tables: list[pa.Table] = []
    for part in group:
      try:
        with (self._open(part.id) as opened,
              pq.ParquetFile(opened, page_checksum_verification=True) as file):
          tables.append(file.read(use_threads=False))
        data = pa.concat_tables(tables, promote_options="default")
      except UNREADABLE as error:
        _LOG.warning("%s can't be read any more (%s): it is left as it is, recording goes on.",
                     self._folder.path / part.id.file_name, first_line(error))
        # Too large to be merged with anything.
        return [each._replace(rows=MERGE_ROWS, level=_NEVER_MERGED) for each in group]
    merged = _Part(group[0].id._replace(last=group[-1].id.last), data.num_rows, level)
    self._write(merged.id, data.unify_dictionaries())
    for part in group:
      self._folder.unlink(part.id.file_name)
    return [merged]

  def _open(self, part: Part) -> BinaryIO:
    return regular_file(self._folder.open(part.file_name, os.O_RDONLY))


def _encoding(fields: pa.Schema) -> dict:
  """Times and steps go up by similar amounts: deltas. Few distinct values: a dictionary.

  Pages have checksums: damaged bytes would be read as other times, without an error.
  """
  few = [f.name for f in fields if pa.types.is_dictionary(f.type) or f.name in
         ("rank", "process", "attempt", "collective", "bytes", "listened")]
  delta = {f.name: "DELTA_BINARY_PACKED" for f in fields if f.name not in few
           and pa.types.is_integer(f.type)}
  return {"compression": "zstd", "use_dictionary": few, "column_encoding": delta,
          "store_schema": True, "write_page_checksum": True}
