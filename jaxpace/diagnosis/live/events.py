"""What watchdogs have written into the run directory, in words; see `jaxpace.Watchdog`."""

from __future__ import annotations

import dataclasses
import os
import pathlib
from typing import Any, NamedTuple

from jaxpace.diagnosis.live.alive import duration
from jaxpace.trace.alarms import FOLDER, LateProcess, read_events
from jaxpace.trace.plain_text import plain

_KINDS = {f.name: f.type for f in dataclasses.fields(LateProcess)}


class Event(NamedTuple):
  """A step that does not complete, or does again."""

  unix: float  # s since 1970, the host's wall clock
  sentence: str
  over: bool


class EventFollower:
  """Reads the watchdogs' files again when one of them has changed."""

  def __init__(self, directory: pathlib.Path) -> None:
    """Reads nothing yet."""
    self._directory = directory
    self._stamps: dict[str, tuple[int, int]] = {}
    self._events: tuple[Event, ...] = ()

  def poll(self, run: str | None) -> tuple[Event, ...]:
    """Returns what is known of the run `run` (None: of all), the oldest first."""
    stamps = self._stat()
    if stamps != self._stamps:
      self._stamps = stamps
      self._events = tuple(_event(values) for values in read_events(self._directory, run)[-50:])
    return self._events

  def _stat(self) -> dict[str, tuple[int, int]]:
    try:
      with os.scandir(self._directory / FOLDER) as entries:
        return {e.name: (e.stat().st_size, e.stat().st_mtime_ns)
                for e in entries if e.name.endswith(".jsonl")}
    except OSError:
      return {}


def _event(values: dict[str, Any]) -> Event:
  unix = values["when_unix_ns"] / 1e9
  if values.get("event") == "resumed":
    seconds = _duration(values.get("seconds"))
    took = "" if seconds is None else f" after {seconds}"
    return Event(unix, f"Watchdog: steps complete again{took}.", True)
  if values.get("event") != "late":
    return Event(unix, f"Watchdog: {plain(values.get('event'))[:80]}.", True)
  step, waited, late = values.get("step"), _duration(values.get("waited")), values.get("late")
  what = f"step {step}" if isinstance(step, int) else "a step"
  since = "" if waited is None else f" for {waited}"
  sentence = f"Watchdog: {what} has not completed{since}."
  who = ([_late(entry) for entry in late if isinstance(entry, dict)] if isinstance(late, list)
         else [])
  sentence += " Not arrived: " + "; ".join(who[:4]) + (f"; {len(who) - 4} more." if len(who) > 4
                                                       else ".") if who else (
                                                           " All processes are inside it.")
  return Event(unix, sentence, False)


def _late(entry: dict[str, Any]) -> str:
  """One late process, as far as the file tells."""
  values = {name: value for name, value in entry.items() if name in _KINDS and name != "stack"}
  try:
    text = LateProcess(**values).sentence()
  except (TypeError, ValueError, AttributeError):
    text = f"process {entry.get('process')}"
  return plain(text)[:400]


def _duration(value: object) -> str | None:
  """Words for a number of seconds; None for anything else."""
  return duration(float(value)) if isinstance(value, int | float) and 0 <= value < 1e12 else None
