"""From a run that was read to timeline files."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from jaxpace.diagnosis.findings import Finding
from jaxpace.reporting.json_file import UnwritableError, check_target, write_file
from jaxpace.reporting.timeline import perfetto
from jaxpace.reporting.timeline.build import build, latest
from jaxpace.reporting.timeline.slices import Timeline, Track
from jaxpace.trace.dense import read_bounds
from jaxpace.trace.run import Run


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


def check(perfetto_file: str | None, chrome_file: str | None) -> None:
  """Finds out, before the work is done, whether the timelines can be written.

  Raises:
    UnwritableError: they can't.
    perfetto.MissingPackageError: Perfetto's format is asked for and its package is not installed.
  """
  for target, option in ((perfetto_file, "--perfetto"), (chrome_file, "--chrome")):
    if target == "-":
      raise UnwritableError(
          f"{option} takes the name of a file, such as timeline.pftrace, not '-'.")
    if target is not None:
      check_target(target)
  if perfetto_file is not None:
    perfetto.messages()


def write(run: Run, findings: tuple[Finding, ...], perfetto_file: str | None,
          chrome_file: str | None) -> str:
  """Writes the timelines asked for, each as a whole or not at all.

  Args:
    run: the recorded run, or a window of it; of a very large one, its last steps are shown.
    findings: what was found in it.
    perfetto_file: file for Perfetto's protobuf; None for none.
    chrome_file: file for Chrome's JSON; None for none.

  Returns:
    A sentence on what is in them.

  Raises:
    UnwritableError: a file can't be written.
    perfetto.MissingPackageError: Perfetto's package is not installed.
  """
  shown = latest(run)
  timeline = build(shown, read_bounds(shown), findings)
  for target, encode in ((perfetto_file, perfetto.encode), (chrome_file, encode_chrome)):
    if target is not None:
      write_file(encode(timeline), target)
  steps = shown.steps[shown.inside]
  left_out = "" if shown is run else (", the last ones that a browser can show: choose others with "
                                      "--steps A:B")
  names = " and ".join(name for name in (perfetto_file, chrome_file) if name is not None)
  return (f"Timeline of {shown.ranks} ranks, steps {steps[0]} to {steps[-1]}{left_out}, in "
          f"{names}. Once aligned, exits of a collective lie {timeline.spread * 1e3:.3f} ms from "
          "their common one (median)."
          + (" Groups of ranks that never meet have no time in common: each is shown from the "
             "others' beginning on."
             if timeline.apart else ""))
