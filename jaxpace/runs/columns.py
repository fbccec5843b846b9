"""Rows as columns of numbers, and what they must be like.

A number outside its range would overflow in a difference, or ask for memory. A row whose step, rank
or the like is outside says nothing of anybody and is left out; a time that is outside is not known.
Both are said once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import pyarrow as pa

from jaxpace.files.schemas import RANKS, TIME
from jaxpace.runs.run import MISSING
from jaxpace.runs.step_causes import PAUSES

Columns = Mapping[str, np.ndarray]
"""Columns of equal length: whole numbers as int64, `MISSING` for null; others as float32, NaN for
null."""

KEYS = ("step", "rank", "process", "attempt", "collective")
CAUSES = tuple(cause.column for cause in PAUSES.values())
"""Of what a process did between steps; most often none of it, in all rows of a part."""


def of_table(data: pa.Table) -> Columns:
  """Converts a table's columns of numbers; others are left out."""
  return {field.name: _numbers(data.column(field.name)) for field in data.schema
          if is_number(field.type)}


def joined(parts: Iterable[Columns]) -> list[Columns]:
  """Puts rows together that have the same columns, in their order: fewer and larger pieces are
  quicker to work with."""
  alike: dict[tuple[str, ...], list[Columns]] = {}
  for part in parts:
    alike.setdefault(tuple(part), []).append(part)
  return [some[0] if len(some) == 1
          else {name: np.concatenate([one[name] for one in some]) for name in names}
          for names, some in alike.items()]


def _numbers(column: pa.ChunkedArray) -> np.ndarray:
  if pa.types.is_integer(column.type):
    return whole_numbers(column)
  if not pa.types.is_floating(column.type):
    column = column.cast(pa.float32(), safe=False)
  return column.to_numpy().astype(np.float32)  # null is NaN


LIMITS = {"step": 1 << 53, "rank": RANKS - 1, "process": RANKS - 1, "attempt": (1 << 15) - 1,
          "collective": (1 << 16) - 1, "turn": (1 << 15) - 1}
"""The largest of each of the whole numbers that say what a row is of; the smallest is 0."""
ABSENT = {"attempt": 0, "collective": 0}
"""What stands for these where a part lacks them: the first attempt, the only collective."""
_USERS = ("host_", "decision_")
"""Begin the names of columns that users and pacers name as they like, `host_pauses_ns` say: they
hold floats."""


def is_whole(name: str) -> bool:
  """Whether a column of this name holds whole numbers."""
  return name in LIMITS or (name.endswith("_ns") and not name.startswith(_USERS))


def name_fault(names: Sequence[str]) -> str | None:
  """What is wrong about the names of a part's columns."""
  (name, count), = Counter(names).most_common(1) or [("", 0)]
  return f"it has {count} columns {name!r}" if count > 1 else None


def type_fault(field: pa.Field) -> str | None:
  """What is wrong about the type of a column."""
  if is_whole(field.name) and not pa.types.is_integer(field.type):
    return (f"its column {field.name!r} holds {field.type}, not whole numbers: "
            f"convert it with .cast(\"int64\"), null for what is not known")
  if field.name in ("name", "axis") and not _is_text(field.type):
    return f"its column {field.name!r} holds {field.type}, not text"
  if field.name.startswith("decision_") and not is_number(field.type):
    return f"its column {field.name!r} holds {field.type}, not numbers"
  return None


def _is_text(kind: pa.DataType) -> bool:
  kind = kind.value_type if pa.types.is_dictionary(kind) else kind
  return pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_null(kind)


def is_number(kind: pa.DataType) -> bool:
  """Whether a column of this type holds numbers, or nothing at all."""
  return (pa.types.is_floating(kind) or pa.types.is_integer(kind) or pa.types.is_boolean(kind)
          or pa.types.is_null(kind))


class Soundness:
  """Brings rows into range, and says once what it left out."""

  def __init__(self, table: str, problems: list[str]):
    """Args: the table's name, and the list that sentences are added to."""
    self._table, self._problems = table, problems

  def rows(self, data: Columns) -> Columns:
    """Returns the rows that say what they are of, every time within its range or `MISSING`."""
    kept = np.ones(len(next(iter(data.values()), ())), bool)
    for name in [name for name in data if name in LIMITS]:
      values = data[name]
      low, high = _span(values)
      if 0 <= low <= high <= LIMITS[name]:
        continue
      known = values != MISSING
      if not known.all():
        self._say(f"'{self._table}' holds rows without {name}: left out.")
      if not self.check(name, *_span(values[known])):
        known &= (values >= 0) & (values <= LIMITS[name])
      kept &= known
    sound = data if kept.all() else {name: values[kept] for name, values in data.items()}
    return {name: self._times(name, values) for name, values in sound.items()}

  def _times(self, name: str, values: np.ndarray) -> np.ndarray:
    if name in LIMITS or values.dtype != np.int64:
      return values
    low, high = _span(values)
    if -TIME < low <= high < TIME:
      return values
    # Users' own columns may be anything; they are not read as times.
    beyond = (values >= TIME) | ((values <= -TIME) & (values != MISSING))
    if not beyond.any():
      return values
    self._say(f"'{self._table}' holds numbers beyond 2^62 in {name!r}: taken as not known.")
    return np.where(beyond, MISSING, values)

  def check(self, name: str, low: int, high: int) -> bool:
    """Whether the lowest and the highest of a column are in its range; says it if not."""
    if low >= 0 and high <= LIMITS[name]:
      return True
    self._say(
        f"'{self._table}' holds rows whose {name} is not a number from 0 to {LIMITS[name]:,}: "
        "left out.")
    return False

  def _say(self, sentence: str) -> None:
    if sentence not in self._problems:
      self._problems.append(sentence)


def _span(values: np.ndarray) -> tuple[int, int]:
  return (int(values.min()), int(values.max())) if values.size else (0, 0)


def whole_numbers(column: pa.ChunkedArray) -> np.ndarray:
  """Converts a column of whole numbers to int64, to the last digit: `MISSING` for null, `TIME` for
  what int64 does not hold.

  `ChunkedArray.to_numpy` makes floats of whole numbers where some are null, and those are off
  beyond 2^53. `pyarrow.compute`, which `cast` imports, does this too, but wraps and documents
  hundreds of functions as it is imported: a noticeable part of a report on a small run.
  """
  found = []
  for chunk in column.chunks:
    validity, data = chunk.buffers()
    values = _view(column.type, data, chunk)
    if pa.types.is_uint64(column.type):
      values = np.minimum(values, TIME)
    values = values.astype(np.int64, copy=False)
    found.append(np.where(_view(pa.bool_(), validity, chunk), values, MISSING)
                 if chunk.null_count else values)
  return found[0] if len(found) == 1 else np.concatenate(found or [np.zeros(0, np.int64)])


def _view(kind: pa.DataType, data: pa.Buffer, of: pa.Array) -> np.ndarray:
  """What a buffer of an array holds, whatever is null."""
  return pa.Array.from_buffers(kind, len(of), [None, data], offset=of.offset).to_numpy(
      zero_copy_only=False)
