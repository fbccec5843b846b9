"""A series of the job's steps, added up over blocks of neighbouring steps that count."""

from __future__ import annotations

import numpy as np

from jaxpace.diagnosis.selected_steps import SelectedSteps


def sums(values: np.ndarray, selected: SelectedSteps) -> np.ndarray:
  """Sums of the known values of each block: [K] -> [B]; what is not finite is left out."""
  use = _use(values, selected)
  return np.bincount(selected.block[use], values[use], selected.blocks)


def means(values: np.ndarray, selected: SelectedSteps) -> np.ndarray:
  """Means of the known values of each block: [K] -> [B]; NaN where nothing is known."""
  number = np.bincount(selected.block[_use(values, selected)], minlength=selected.blocks)
  return np.divide(sums(values, selected), number, out=np.full(selected.blocks, np.nan), where=number > 0)


def medians(values: np.ndarray, selected: SelectedSteps) -> np.ndarray:
  """Medians of the known values of each block: [K] -> [B]; NaN where nothing is known."""
  use = np.flatnonzero(_use(values, selected))
  order = np.lexsort((values[use], selected.block[use]))
  block, ordered = selected.block[use][order], values[use][order]
  first = np.searchsorted(block, np.arange(selected.blocks))
  number = np.append(first[1:], len(block)) - first
  found = np.full(selected.blocks, np.nan)
  some = np.flatnonzero(number)
  found[some] = (ordered[first[some] + (number[some] - 1) // 2] + ordered[first[some] + number[some] // 2]) / 2
  return found


def _use(values: np.ndarray, selected: SelectedSteps) -> np.ndarray:
  return np.isfinite(values) & (selected.block >= 0)
