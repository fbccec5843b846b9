"""What a timeline holds, whatever format it is written in."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import numpy as np

from jaxpace.trace.plain_text import plain
from jaxpace.trace.run import MISSING

JOB, UNKNOWN = 0, 1 << 30
"""Stand for the job as a whole, and for a process that no row names, where else a process's number
from 1 on is."""
_LONGEST = 200


class Track(NamedTuple):
  """A row of the timeline. `thread` is None for the process itself, under which its other tracks
  lie."""

  name: str
  process: int  # from 1 on; `JOB` or `UNKNOWN`
  thread: int | None


class Flow(NamedTuple):
  """An arrow from one slice to another; both are indices of slices."""

  begin: int
  end: int


@dataclasses.dataclass(frozen=True)
class Timeline:
  """All slices of all tracks. N slices; those of a track lie together, nest properly and rise with
  time."""

  tracks: tuple[Track, ...]
  names: tuple[str, ...]
  track: np.ndarray  # [N] int32 index of the slice's track
  name: np.ndarray  # [N] int32 index of its name
  begin: np.ndarray  # [N] int64 ns since the timeline's start
  end: np.ndarray  # [N] int64 ns
  step: np.ndarray  # [N] int64 number of the step, -1 for none
  details: dict[int, dict[str, str | int | float]]  # of some slices, by index
  flows: tuple[Flow, ...]
  # of the job: [n] int64 ns and [n] float64 values, by name
  counters: dict[str, tuple[np.ndarray, np.ndarray]]
  spread: float  # seconds, see `Alignment`
  apart: bool = False  # see `Alignment`


def text(name: object) -> str:
  """A name as plain text of one line, cut to 200 characters.

  >>> text("host\\x1b[31m\\n<b>")
  'host\\\\x1b[31m\\\\n<b>'
  """
  shown = plain(str(name)[:_LONGEST + 1])
  return shown if len(shown) <= _LONGEST else shown[:_LONGEST - 1] + "…"


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
