"""Gathers slices of a timeline in any order, and puts them into that of a `Timeline`."""

from __future__ import annotations

from typing import Any

import numpy as np

from jaxpace.trace.run import MISSING


class Slices:
  """Gathers slices; `add` returns what becomes their indices after `finish`."""

  def __init__(self) -> None:
    self._parts: list[tuple[Any, ...]] = []
    self._size = 0
    self.names: dict[str, int] = {}

  def name(self, name: str) -> int:
    return self.names.setdefault(name, len(self.names))

  def add(self, track: np.ndarray, begin: np.ndarray, end: np.ndarray, name: np.ndarray | int,
          step: np.ndarray, depth: int, keep: np.ndarray) -> np.ndarray:
    """Adds those of [...] slices that are kept and have a length; returns their provisional
    indices, -1 elsewhere."""
    shape = begin.shape
    keep = keep & (end > begin) & (begin != MISSING)
    index = np.full(shape, -1, np.int64)
    number = int(keep.sum())
    index[keep] = np.arange(self._size, self._size + number)
    self._size += number
    track, name, step = (np.broadcast_to(np.asarray(values), shape)[keep]
                         for values in (track, name, step))
    self._parts.append((track, begin[keep], end[keep], name, step,
                        np.full(number, depth, np.int64)))
    return index

  def finish(self) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """Columns in the order of a `Timeline`, and where each provisional index went."""
    columns = [np.concatenate(parts) for parts in zip(*self._parts, strict=True)]
    track, begin, end, name, step, depth = columns
    order = np.lexsort((depth, begin, track))
    place = np.empty(len(order), np.int64)
    place[order] = np.arange(len(order))
    return {"track": track[order].astype(np.int32), "begin": begin[order], "end": end[order],
            "name": name[order].astype(np.int32), "step": step[order].astype(np.int64)}, place
