"""Whole numbers of Parquet columns as numpy arrays, to the last digit where some are null.

`pyarrow.compute` does this too, but wraps and documents hundreds of functions as it is imported,
which takes some 30 ms: a noticeable part of a report on a small run. `ChunkedArray.to_numpy` makes
floats of whole numbers where some are null, and those are off beyond 2^53.
"""

from __future__ import annotations

import numpy as np
import pyarrow as pa


def values_and_known(column: pa.ChunkedArray) -> tuple[np.ndarray, np.ndarray]:
  """Splits a column of whole numbers into values and whether each is known.

  Args:
    column: of any type of whole numbers.

  Returns:
    Values of that type, anything where they are null; and booleans, false where they are null.
  """
  if not column.null_count:
    return column.to_numpy(), np.ones(len(column), bool)
  values, known = [], []
  for chunk in column.chunks:
    validity, data = chunk.buffers()
    place = len(chunk), chunk.offset
    values.append(_view(column.type, data, *place))
    known.append(np.ones(len(chunk), bool) if validity is None
                 else _view(pa.bool_(), validity, *place))
  return np.concatenate(values), np.concatenate(known)


def filled(column: pa.ChunkedArray, null: int) -> np.ndarray:
  """Whole numbers, with a number in place of null.

  Args:
    column: of any type of whole numbers.
    null: what to put in place of null.

  Returns:
    int64 where there are nulls, otherwise what the column holds.

  Raises:
    pyarrow.ArrowInvalid: there are nulls, and numbers beyond int64.
  """
  if not column.null_count:
    return column.to_numpy()
  if pa.types.is_uint64(column.type):
    column = column.cast(pa.int64())  # refuses what doesn't fit
  values, known = values_and_known(column)
  return np.where(known, values.astype(np.int64, copy=False), null)


def _view(kind: pa.DataType, data: pa.Buffer, length: int, offset: int) -> np.ndarray:
  """What a buffer holds, whatever is null."""
  return pa.Array.from_buffers(kind, length, [None, data], offset=offset).to_numpy(
      zero_copy_only=False)
