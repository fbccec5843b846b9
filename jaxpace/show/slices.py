"""What a timeline holds, as values and as Chrome's trace JSON; and where within a step its phases
lay: totals are recorded, and the collectives they go around."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from jaxpace.core.words import plain
from jaxpace.runs.run import MISSING, Run

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
  flows: tuple[tuple[int, int], ...]  # arrows from one slice to another, by their indices
  # of the job: [n] int64 ns and [n] float64 values, by name
  counters: dict[str, tuple[np.ndarray, np.ndarray]]
  spread: float  # seconds, see `Alignment`
  apart: bool = False  # see `Alignment`


def encode_chrome(timeline: Timeline) -> Iterator[bytes]:
  """Yields the trace in pieces, to be written one after the other. One event a line."""
  lead = '{"displayTimeUnit": "ms", "traceEvents": [\n'
  write = json.JSONEncoder(allow_nan=False).encode
  for event in _events(timeline):
    yield (lead + write(event)).encode()
    lead = ",\n"
  yield ("\n]}\n" if lead == ",\n" else lead + "]}\n").encode()


def _events(timeline: Timeline) -> Iterator[dict[str, Any]]:
  for track in timeline.tracks:
    kind = "process_name" if track.thread is None else "thread_name"
    yield {"ph": "M", "name": kind, **_place(track), "args": {"name": track.name}}
  columns = (timeline.track, timeline.begin, timeline.end, timeline.name, timeline.step)
  for i, (track, begin, end, name, step) in enumerate(
      zip(*(column.tolist() for column in columns), strict=True)):
    event = {"ph": "X", "name": timeline.names[name], "cat": "jaxpace", "ts": begin / 1e3,
             "dur": (end - begin) / 1e3, **_place(timeline.tracks[track])}
    details = {**({"step": step} if step >= 0 else {}), **timeline.details.get(i, {})}
    yield {**event, "args": details} if details else event
  for number, (source, target) in enumerate(timeline.flows, 1):
    for phase, at in (("s", source), ("f", target)):
      event = {"ph": phase, "id": number, "name": "late", "cat": "jaxpace",
               "ts": int(timeline.begin[at]) / 1e3,
               **_place(timeline.tracks[int(timeline.track[at])])}
      yield {**event, "bp": "e"} if phase == "f" else event
  for name, (times, values) in timeline.counters.items():
    for time, value in zip(times.tolist(), values.tolist(), strict=True):
      yield {"ph": "C", "name": name, "ts": time / 1e3, **_place(timeline.tracks[0]),
             "args": {"value": value}}


def _place(track: Track) -> dict[str, int]:
  return {"pid": track.process, "tid": track.thread or 0}


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


_DEFAULT = ("forward", "compute", "backward", "update")
_NOT_WORK = ("sync", "gap", "delay", "delay_applied", "held")
_SLIVER = 2_000
"""ns: rounding leaves pieces of phases no longer than this where none were."""


def order(run: Run) -> list[str]:
  """Phases recorded, in the order in which the plan's timestamps first name them; in the usual one
  where there are none."""
  named = [mark["segment"] for mark in run.plan.get("marks") or ()]
  planned = list(dict.fromkeys(f"phase_{name}" if f"phase_{name}" in run.durations else name
                               for name in named))
  own = [name for name in run.durations if name not in _NOT_WORK and name not in _DEFAULT]
  usual = [*_DEFAULT[:1], *own, *_DEFAULT[1:]]
  wanted = planned if set(planned) & (set(usual) - {"update"}) else usual
  return [name for name in [*wanted, *(n for n in usual if n not in wanted)]
          if name in run.durations and name not in _NOT_WORK]


def pour(free: np.ndarray,
         phases: Sequence[np.ndarray]) -> Iterator[tuple[int, int, np.ndarray, np.ndarray]]:
  """Fills the free intervals of a step with its phases, one after the other.

  Args:
    free: [I, ...] ns, length of each interval between delay, collectives and end.
    phases: [...] ns each, in their order.

  Yields:
    Interval, phase, and [...] begin and end within the interval in ns; nothing lies there where
    they are equal. An interval's phases come in their order.
  """
  edges = np.concatenate([np.zeros_like(free[:1]), np.cumsum(free, axis=0)])
  reach = np.cumsum(np.stack([np.zeros_like(free[0]), *phases]), axis=0)
  # An edge of a phase within rounding of a collective is that collective.
  for p in range(1, len(reach)):
    away = np.abs(edges - reach[p])
    nearest = away.argmin(axis=0)[None]
    close = np.take_along_axis(away, nearest, axis=0)[0] <= _SLIVER
    reach[p] = np.where(close, np.take_along_axis(edges, nearest, axis=0)[0], reach[p])
  for i in range(len(free)):
    for p in range(len(phases)):
      begin = np.clip(reach[p], edges[i], edges[i + 1])
      end = np.clip(reach[p + 1], edges[i], edges[i + 1])
      if (end > begin).any():
        yield i, p, begin - edges[i], end - edges[i]
