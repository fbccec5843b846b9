"""Columns of the recorded tables. Pure numpy: no device, no clock, no I/O."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from jaxpace.runs.step_causes import HOST_CAUSES, Sample

Columns = dict[str, np.ndarray]
"""Columns of one table, all of one length. A masked entry of a masked array, or an absent column,
is null."""


def length(columns: Columns) -> int:
  """Rows of a table."""
  return len(next(iter(columns.values()))) if columns else 0


def concatenate(parts: Sequence[Columns]) -> Columns:
  """Joins batches of the same table end to end; a column one of them lacks is null there."""
  names = list(dict.fromkeys(name for part in parts for name in part))
  joined: Columns = {}
  for name in names:
    dtype: Any = next(part[name].dtype for part in parts if name in part)
    pieces = [part[name] if name in part else np.ma.masked_all(length(part), dtype)
              for part in parts]
    masked = any(isinstance(piece, np.ma.MaskedArray) for piece in pieces)
    joined[name] = np.ma.concatenate(pieces) if masked else np.concatenate(pieces)
  return joined


def picked(columns: Mapping[str, np.ndarray], chosen: np.ndarray) -> Columns:
  """Some of the rows: [n] bool, or places."""
  return {name: values[chosen] for name, values in columns.items()}


def null(values: np.ndarray, unknown: np.ndarray) -> np.ndarray:
  """Masks `values` where `unknown`; leaves them a plain array where nothing is."""
  return (np.ma.masked_array(np.ma.getdata(values), unknown) if unknown.any()
          else np.ma.getdata(values))


def whose(steps: np.ndarray, rank: np.ndarray | int, process: int,
          attempt: np.ndarray | int) -> Columns:
  """Makes the columns that say of whom rows are, [n], from their steps."""
  return {"step": steps, **{name: np.full(len(steps), value, np.int32) for name, value in
                            (("rank", rank), ("process", process), ("attempt", attempt))}}


def ends_before(steps: np.ndarray, ends: np.ndarray, previous: tuple[int, int] | None
                ) -> np.ndarray:
  """When the step before each ended, ns; null after a hole.

  Args:
    steps: [n] numbers.
    ends: [n] ns.
    previous: number and end of the step before these; None if there is none.
  """
  step, end = previous or (-2, 0)
  before = np.concatenate([[step], steps[:-1]])[:len(steps)]
  return null(np.concatenate([[end], ends[:-1]])[:len(steps)], before != steps - 1)


def of_samples(samples: Sequence[Sample]) -> np.ma.MaskedArray:
  """[n, causes] int64: samples of n steps, masked where not known."""
  rows = [[0 if value is None else value for value in sample] for sample in samples]
  unknown = [[value is None for value in sample] for sample in samples]
  shape = len(samples), len(HOST_CAUSES)
  return np.ma.masked_array(np.array(rows, np.int64).reshape(shape),
                            np.array(unknown, bool).reshape(shape))


def of_host(samples: np.ma.MaskedArray, extra: Sequence[Mapping[str, float]]) -> Columns:
  """Lays out what the host did in n steps, [n, causes], and the user's own columns of each."""
  columns = {cause.column: null(samples[:, i], np.ma.getmaskarray(samples)[:, i])
             for i, cause in enumerate(HOST_CAUSES)}
  for name in sorted({name for row in extra for name in row}):
    columns[f"host_{name}"] = null(np.array([row.get(name, 0.0) for row in extra], np.float64),
                                   np.array([name not in row for row in extra], bool))
  return columns
