"""A series of the job's steps, added up over blocks of neighbouring steps that count."""

from __future__ import annotations

import numpy as np

from jaxpace.diagnosis.selected_steps import Counted


def sums(values: np.ndarray, counted: Counted) -> np.ndarray:
  """Sums of the known values of each block: [K] -> [B]; what is not finite is left out."""
  use = _use(values, counted)
  return np.bincount(counted.block[use], values[use], counted.blocks)


def means(values: np.ndarray, counted: Counted) -> np.ndarray:
  """Means of the known values of each block: [K] -> [B]; NaN where nothing is known."""
  number = np.bincount(counted.block[_use(values, counted)], minlength=counted.blocks)
  return np.divide(sums(values, counted), number, out=np.full(counted.blocks, np.nan), where=number > 0)


def medians(values: np.ndarray, counted: Counted) -> np.ndarray:
  """Medians of the known values of each block: [K] -> [B]; NaN where nothing is known."""
  use = np.flatnonzero(_use(values, counted))
  order = np.lexsort((values[use], counted.block[use]))
  block, ordered = counted.block[use][order], values[use][order]
  first = np.searchsorted(block, np.arange(counted.blocks))
  number = np.append(first[1:], len(block)) - first
  found = np.full(counted.blocks, np.nan)
  some = np.flatnonzero(number)
  found[some] = (ordered[first[some] + (number[some] - 1) // 2] + ordered[first[some] + number[some] // 2]) / 2
  return found


def _use(values: np.ndarray, counted: Counted) -> np.ndarray:
  return np.isfinite(values) & (counted.block >= 0)
