"""Rows as columns of numbers, and the quick way to read them from the small parts that a job writes
all the time.

A job of many processes writes dozens of small files a second. Each is read in one go, its footer is
parsed once, and columns that its footer says to be constant (whose process it is, which attempt)
are not decoded. Whatever is not as a recorder writes it, is left to `trace.table_reader`, which
finds out what is wrong and says it.
"""

from __future__ import annotations

import pathlib
from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from jaxpace.files.reading import UnreadableError, read_bytes
from jaxpace.files.schemas import TIME
from jaxpace.trace.host_causes import PAUSES
from jaxpace.trace.row_checks import (
  ABSENT,
  LIMITS,
  filled,
  is_number,
  is_whole,
  name_fault,
  type_fault,
)
from jaxpace.trace.run import MISSING

Columns = Mapping[str, np.ndarray]
"""Columns of equal length: whole numbers as int64, `MISSING` for null; others as float32, NaN for
null."""

KEYS = ("step", "rank", "process", "attempt", "collective")
CAUSES = tuple(cause.column for cause in PAUSES.values())
"""Of what a process did between steps; most often none of it, in all rows of a part."""
_SMALL = 1 << 18
"""Bytes. Larger files are merged ones, which come one at a time."""


def of_table(data: pa.Table) -> Columns:
  """Converts a table's columns of numbers; others are left out."""
  return {field.name: _numbers(data.column(field.name)) for field in data.schema
          if is_number(field.type)}


def read_small(path: pathlib.Path, needed: Sequence[str], wanted: Sequence[str]) -> Columns | None:
  """Reads a small part; None where it is large, gone, damaged, or not as a recorder writes it.

  Args:
    path: its file.
    needed: columns that it must have.
    wanted: columns to read; of those that it lacks there is what `row_checks.ABSENT` says, and not
      the others.

  Raises:
    PermissionError: it can't be read.
  """
  try:
    data = read_bytes(path, _SMALL)
    found = _read(data, needed, wanted) if data else None
    return (found if found is not None
            and all(_sound(name, values) for name, values in found.items()) else None)
  except PermissionError:
    raise
  except (OSError, pa.ArrowException, UnicodeDecodeError, UnreadableError):
    return None


def joined(parts: Iterable[Columns]) -> list[Columns]:
  """Puts rows together that have the same columns, in their order: fewer and larger pieces are
  quicker to work with."""
  alike: dict[tuple[str, ...], list[Columns]] = {}
  for part in parts:
    alike.setdefault(tuple(part), []).append(part)
  return [some[0] if len(some) == 1
          else {name: np.concatenate([one[name] for one in some]) for name in names}
          for names, some in alike.items()]


def _read(data: bytes, needed: Sequence[str], wanted: Sequence[str]) -> Columns | None:
  # of memory: nothing to close
  file = pq.ParquetFile(pa.BufferReader(data), page_checksum_verification=True)
  schema, meta = file.schema_arrow, file.metadata
  if name_fault(schema.names) or any(map(type_fault, schema)) or meta.num_rows > 16 * _SMALL:
    return None
  if any(map(pa.types.is_unsigned_integer, schema.types)):
    return None
  types = dict(zip(schema.names, schema.types, strict=True))
  present = [name for name in wanted if name in types]
  if meta.num_row_groups != 1 or not meta.num_rows or not types.keys() >= set(needed):
    return None
  group = meta.row_group(0)
  constant: dict[str, int] = {}
  for at, name in enumerate(schema.names):
    if name not in KEYS and name not in CAUSES:
      continue
    said = group.column(at).statistics
    if said is None or not said.has_null_count or said.null_count:
      if name in KEYS:
        return None
      if said is not None and said.null_count == meta.num_rows and name in present:
        present.remove(name)
      continue
    if said.has_min_max and (low := said.min) == said.max:
      constant[name] = low
  read = file.read_row_group(0, columns=[name for name in present if name not in constant],
                             use_threads=False)
  found = {name: np.full(meta.num_rows, constant[name], np.int64) if name in constant
           else _numbers(read.column(name))
           for name in present}
  return found | {name: np.full(meta.num_rows, value, np.int64) for name, value in ABSENT.items()
                  if name in wanted and name not in types}


def _sound(name: str, values: np.ndarray) -> bool:
  """Whether all numbers are in the range that `trace.row_checks` gives them; null is `MISSING` by
  now."""
  if name in LIMITS:
    return not values.size or (values.min() >= 0 and values.max() <= LIMITS[name])
  if not is_whole(name):
    return True
  return bool((((values > -TIME) & (values < TIME)) | (values == MISSING)).all())


def _numbers(column: pa.ChunkedArray) -> np.ndarray:
  if not pa.types.is_integer(column.type):
    return column.cast(pa.float32(), safe=False).fill_null(np.nan).to_numpy()
  return filled(column, MISSING).astype(np.int64, copy=False)
