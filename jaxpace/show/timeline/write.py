"""From a run that was read to a timeline: Chrome's trace JSON, which Perfetto opens."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from jaxpace.diagnose.modes.inputs import Finding
from jaxpace.runs.dense import read_bounds
from jaxpace.runs.run import Run
from jaxpace.show.json_file import write_file
from jaxpace.show.timeline.build import build, latest
from jaxpace.show.timeline.slices import Timeline, Track


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


def write(run: Run, findings: tuple[Finding, ...], target: str) -> str:
  """Writes the timeline, as a whole or not at all.

  Args:
    run: the recorded run, or a window of it; of a very large one, its last steps are shown.
    findings: what was found in it.
    target: file for the events, as Chrome's trace JSON.

  Returns:
    A sentence on what is in it.

  Raises:
    UnwritableError: the file can't be written.
  """
  shown = latest(run)
  timeline = build(shown, read_bounds(shown), findings)
  write_file(encode_chrome(timeline), target)
  steps = shown.steps[shown.inside]
  left_out = "" if shown is run else (", the last ones that a browser can show: choose others with "
                                      "--steps A:B")
  return (f"Timeline of {shown.ranks} ranks, steps {steps[0]} to {steps[-1]}{left_out}, in "
          f"{target}. Once aligned, exits of a collective lie {timeline.spread * 1e3:.3f} ms from "
          "their common one (median)."
          + (" Groups of ranks that never meet have no time in common: each is shown from the "
             "others' beginning on."
             if timeline.apart else ""))
