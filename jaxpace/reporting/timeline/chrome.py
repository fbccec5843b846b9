"""Writes a timeline as Chrome's trace JSON, which Perfetto and chrome://tracing open."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from jaxpace.reporting.timeline.slices import Timeline, Track


def encode(timeline: Timeline) -> Iterator[bytes]:
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
  for number, flow in enumerate(timeline.flows, 1):
    for phase, at in (("s", flow.begin), ("f", flow.end)):
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
