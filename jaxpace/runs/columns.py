"""Rows as columns of numbers: what they must be like, and how they are laid out as dense arrays of
slots, ranks and steps.

A number outside its range would overflow in a difference, or ask for memory. A row whose step, rank
or the like is outside says nothing of anybody and is left out; a time that is outside is not known.
Both are said once.

Of one cell's rows the newest attempt's counts, and of one attempt the row that was read last.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence

import numpy as np
import pyarrow as pa

from jaxpace.files.schemas import RANKS, TIME
from jaxpace.runs.run import MISSING

Columns = Mapping[str, np.ndarray]
"""Columns of equal length: whole numbers as int64, `MISSING` for null; others as float32, NaN for
null."""

KEYS = ("step", "rank", "process", "attempt")
"""Columns that say what a row is of."""


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


Say = Callable[[str], None]
"""Takes what was left out, as the end of a sentence that begins with the table's name."""


def sound(data: Columns, say: Say) -> Columns:
  """Returns the rows that say what they are of, every time within its range or `MISSING`."""
  kept = np.ones(len(next(iter(data.values()), ())), bool)
  for name in [name for name in data if name in LIMITS]:
    values = data[name]
    low, high = _span(values)
    if 0 <= low <= high <= LIMITS[name]:
      continue
    known = values != MISSING
    if not known.all():
      say(f"holds rows without {name}: left out.")
    if not in_range(name, *_span(values[known]), say):
      known &= (values >= 0) & (values <= LIMITS[name])
    kept &= known
  rows = data if kept.all() else {name: values[kept] for name, values in data.items()}
  return {name: _sound_times(name, values, say) for name, values in rows.items()}


def in_range(name: str, low: int, high: int, say: Say) -> bool:
  """Whether the lowest and the highest of a column are in its range; says it if not."""
  inside = low >= 0 and high <= LIMITS[name]
  if not inside:
    say(f"holds rows whose {name} is not a number from 0 to {LIMITS[name]:,}: left out.")
  return inside


def _sound_times(name: str, values: np.ndarray, say: Say) -> np.ndarray:
  if name in LIMITS or values.dtype != np.int64:
    return values
  low, high = _span(values)
  if -TIME < low <= high < TIME:
    return values
  # Users' own columns may be anything; they are not read as times.
  beyond = (values >= TIME) | ((values <= -TIME) & (values != MISSING))
  if not beyond.any():
    return values
  say(f"holds numbers beyond 2^62 in {name!r}: taken as not known.")
  return np.where(beyond, MISSING, values)


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


@dataclasses.dataclass(frozen=True)
class Axis:
  """Numbers of steps, ranks or slots that are laid out along one dimension."""

  numbers: np.ndarray  # [n] int64, rising

  @property
  def size(self) -> int:
    """n."""
    return len(self.numbers)

  @property
  def span(self) -> tuple[int, int]:
    """First and last number."""
    return int(self.numbers[0]), int(self.numbers[-1])

  def index(self, values: np.ndarray) -> tuple[np.ndarray, np.ndarray | None]:
    """Places of numbers, and which of them lie on the axis; None if all do."""
    if not self.size:
      return values, np.zeros(len(values), bool)
    low, high = self.span
    if high - low == self.size - 1:
      at = values - low
      if at.size and at.min() >= 0 and at.max() < self.size:
        return at, None
      return at, (at >= 0) & (at < self.size)
    at = np.minimum(np.searchsorted(self.numbers, values), self.size - 1)
    return at, self.numbers[at] == values


class Cells:
  """The rows of one table, laid out; S slots, R ranks, K steps.

  Attributes:
    slots: S numbers.
    attempt: [S, R, K] int16, -1 where there is no row.
    columns: [S, R, K] by name: int64 ns, `MISSING` where null, or float32 seconds or numbers, NaN
      where null.
    process_of_rank: [R] int32, -1 where not known.
    duplicates: rows of cells that had one.
  """

  def __init__(self, ranks: int | np.ndarray, steps: Axis, slots: Sequence[int] = (0,), *,
               times: Iterable[str] = (), values: Iterable[str] = ()):
    """Makes empty cells of R ranks, or the R ranks that are given, K steps and S slots, rising;
    rows of others will be left out. A table without slots has one, 0. Columns in `times` are kept
    in ns, those in `values` become seconds, or numbers as they are."""
    self.slots, self.steps = Axis(np.array(slots, np.int64)), steps
    self._ranks = Axis(np.arange(ranks) if isinstance(ranks, int) else ranks)
    self.attempt = np.full((self.slots.size, self._ranks.size, steps.size), -1, np.int16)
    shape = self.attempt.shape
    self.columns = {name: np.full(shape, MISSING, np.int64) for name in times}
    self.columns |= {name: np.full(shape, np.nan, np.float32) for name in values}
    self.process_of_rank = np.full(self._ranks.size, -1, np.int32)
    self.duplicates = 0

  def add(self, data: Columns) -> None:
    """Takes rows in: "step", "rank", "attempt", "collective" where there are several slots, and
    those of the expected columns that there are."""
    flat, sound = np.zeros(len(data["step"]), np.int64), np.ones(len(data["step"]), bool)
    for axis, name in ((self.slots, "collective"), (self._ranks, "rank"), (self.steps, "step")):
      if name in data:
        at, inside = axis.index(data[name])
        flat = flat * axis.size + at
        sound = sound if inside is None else sound & inside
    rows, cells = self._counting(data["attempt"].astype(np.int16), flat, sound)
    if "process" in data and len(cells):
      ranks = cells // self.steps.size % self._ranks.size
      self.process_of_rank[ranks] = data["process"][rows]
    for name, values in self.columns.items():
      if name in data:
        found = data[name] if values.dtype == np.int64 else seconds_of(name, data[name])
        values.reshape(-1)[cells] = found[rows]

  def _counting(self, attempts: np.ndarray, cells: np.ndarray, sound: np.ndarray
                ) -> tuple[np.ndarray | slice, np.ndarray]:
    """Enters the attempts of rows; returns which of them count and the flat places of their cells.
    """
    rows: np.ndarray | slice = slice(None) if sound.all() else np.flatnonzero(sound)
    attempts, cells = attempts[rows], cells[rows]
    flat = self.attempt.reshape(-1)
    known = flat[cells]
    if (known >= 0).any() or (attempts.size and attempts.min() != attempts.max()):
      # Writes to one cell happen in order.
      order = np.argsort(attempts, kind="stable")
      order = order[attempts[order] >= known[order]]
      self.duplicates += len(cells) - len(np.unique(cells[known < 0]))
      rows, attempts, cells = np.arange(len(sound))[rows][order], attempts[order], cells[order]
    flat[cells] = attempts
    return rows, cells

  def drop_empty(self) -> None:
    """Forgets slots without a row."""
    kept = np.flatnonzero((self.attempt >= 0).any(axis=(1, 2)))
    if len(kept) < self.slots.size:
      self.slots, self.attempt = Axis(self.slots.numbers[kept]), self.attempt[kept]
      self.columns = {name: values[kept] for name, values in self.columns.items()}


def seconds_of(name: str, values: np.ndarray) -> np.ndarray:
  """Seconds of ns, other numbers as they are; NaN for null."""
  if values.dtype != np.int64:
    return values
  scaled = values * 1e-9 if name.endswith("_ns") else values.astype(np.float64)
  scaled[values == MISSING] = np.nan
  return scaled.astype(np.float32)
