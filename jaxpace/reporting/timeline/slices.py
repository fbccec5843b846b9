"""What a timeline holds, whatever format it is written in."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import numpy as np

from jaxpace.trace.plain_text import plain

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
