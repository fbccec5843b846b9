"""Whether the run still lives: by the files its processes rewrite every few seconds, and by the age
of its rows."""

from __future__ import annotations

import dataclasses
import os
import pathlib
from collections.abc import Sequence
from typing import Any, NamedTuple

from jaxpace.core.words import Sentence, duration, list_ranks, plain, plural
from jaxpace.files.schemas import ProcessFile
from jaxpace.hang.alarms import FOLDER, LateProcess, read_events
from jaxpace.runs.run import Process
from jaxpace.runs.rundir import read_json

SILENT = 20.0
"""Seconds: a recorder rewrites its process's file every 5 s, whether steps complete or not."""
_FEW, _REREAD = 16, 5.0
"""Files of more processes than these are read once in so many seconds each; whether they changed is
seen at once."""


class Seen(NamedTuple):
  """A process's file."""

  process: Process
  timestamp: int  # ns, when it was last written, by the file system's clock
  changed: float  # s, the same on this machine's monotonic clock, as far as it is known
  read: float  # s, monotonic, when its contents were read
  fresh: bool  # whether the contents are those of the timestamp

  @property
  def closed(self) -> bool:
    """Whether it has ended its recording by itself."""
    return self.process.info.get("closed_cleanly") is True

  @property
  def name(self) -> str:
    """Its number, and its host's name as plain text."""
    host = plain(self.process.host)
    return f"{self.process.process}" + (f" ({host})" if host else "")


class ProcessFiles:
  """The folder `process` of a run directory."""

  def __init__(self, folder: pathlib.Path) -> None:
    """Reads nothing yet."""
    self._folder = folder
    self._seen: dict[str, Seen] = {}

  @property
  def seen(self) -> tuple[Seen, ...]:
    """All processes seen so far, by number."""
    return tuple(sorted(self._seen.values(), key=lambda seen: seen.process.process))

  @property
  def processes(self) -> tuple[Process, ...]:
    """The same, as they described themselves."""
    return tuple(seen.process for seen in self.seen)

  def poll(self, run: str | None, now: float, unix: float) -> None:
    """Looks again.

    A change that is seen happening dates a file by this machine's own clock. Only the age that a
    file has at first sight needs the file system's clock to be right.

    Args:
      run: run id; files of other runs are left out.
      now: s, monotonic.
      unix: s since 1970, this machine's wall clock.
    """
    there: set[str] = set()
    for entry in self._entries():
      there.add(entry.name)
      try:
        timestamp = entry.stat().st_mtime_ns
      except OSError:
        continue
      before = self._seen.get(entry.name)
      if before and before.timestamp == timestamp and before.fresh:
        continue
      changed = now - max(0.0, unix - timestamp / 1e9) if before is None else before.changed
      if before and before.timestamp != timestamp:
        changed = now
      if before and len(self._seen) > _FEW and now - before.read < _REREAD:
        self._seen[entry.name] = before._replace(timestamp=timestamp, changed=changed, fresh=False)
        continue
      info = read_json(pathlib.Path(entry.path), ProcessFile)
      if info is None or (run is not None and info.get("run", run) != run):
        self._seen.pop(entry.name, None)
        continue
      process = Process(int(entry.name.removesuffix(".json")), info)
      self._seen[entry.name] = Seen(process, timestamp, changed, now, True)
    for name in set(self._seen) - there:
      del self._seen[name]

  def _entries(self) -> list[os.DirEntry[str]]:
    try:
      with os.scandir(self._folder) as entries:
        return [e for e in entries if e.name.endswith(".json") and e.name[:-5].isdecimal()
                and len(e.name) < 16]
    except (FileNotFoundError, NotADirectoryError):
      return []


def judge(seen: Sequence[Seen], declared: int, age: float | None, step: int,
          step_time: float | None, now: float) -> Sentence:
  """Says how the run is.

  Args:
    seen: the processes' files.
    declared: number of processes the run says it has; 0 where it doesn't.
    age: s since the newest rows were written; None where there are none yet.
    step: last step.
    step_time: s per step usually takes; None where not known.
    now: s, monotonic.

  Returns:
    A sentence with the code "waiting", "running", "ended", "quiet" or "dead".
  """
  open_ones = [s for s in seen if not s.closed]
  silent = [s for s in open_ones if now - s.changed > SILENT]
  if seen and not open_ones and len(seen) >= declared:
    ended = sorted({plain(s.process.info["ended_by"])
                    for s in seen if s.process.info.get("ended_by")})
    after = f"after step {step:,}" if age is not None else "without a recorded step"
    return Sentence("ended", f"The run has ended {after}"
                    + (f" ({', '.join(ended[:3])})." if ended else "."))
  if seen and not open_ones and age is not None:
    have = "processes have" if len(seen) > 1 else "process has"
    return Sentence("quiet", f"{len(seen)} {have} ended after step {step:,}; of "
                    f"{declared - len(seen)} more nothing is here.")
  if open_ones and len(silent) == len(open_ones):
    least = min(now - s.changed for s in silent)
    return Sentence("dead",
                    f"No process has written anything for {duration(least)}: they were killed or "
                    "stopped, or this machine no longer sees their files.")
  if silent:
    least = min(now - s.changed for s in silent)
    return Sentence("dead", f"{_named(silent)} {'has' if len(silent) == 1 else 'have'} written "
                            f"nothing for {duration(least)}, others have: killed, stopped, or "
                            "cut off?")
  if age is None:
    if not seen:
      return Sentence("waiting", "Nothing is recorded yet: waiting for the job to start.")
    few = f" of {declared}" if declared > len(seen) else ""
    return Sentence("waiting", f"{plural(len(seen), 'process', 'processes')}{few} started, no step "
                               "recorded yet: programs are being compiled, or the first steps run.")
  if age > longest_quiet(step_time):
    if not seen:
      return Sentence("quiet", f"No new rows for {duration(age)}. The folder 'process' is missing, "
                               "so whether the job ended, died or hangs is unknown.")
    return Sentence("quiet", f"No step has been recorded for {duration(age)}, though "
                 + ("its process still runs" if len(open_ones) == 1 else "its processes still run")
                 + ": it hangs, compiles, or does something else between two steps.")
  return Sentence("running", "Running.")


def longest_quiet(step_time: float | None) -> float:
  """Seconds without new rows that mean nothing: a recorder writes every other second, and a step
  must be over first."""
  return max(10.0, 5.0 + 5.0 * (step_time or 0.0))


def _named(seen: Sequence[Seen]) -> str:
  if len(seen) == 1:
    return f"Process {seen[0].name}"
  return f"Processes {', '.join(s.name for s in seen)}" if len(seen) <= 3 else (
      f"{len(seen)} processes ({list_ranks(s.process.process for s in seen)})")


# What watchdogs have written into the run directory, in words; see `jaxpace.Watchdog`.

class Alert(NamedTuple):
  """Something that began or was over."""

  sentence: str
  over: bool
  unix: float | None = None  # s since 1970, the host's wall clock; None: when its step was read


class EventFollower:
  """Reads the watchdogs' files again when one of them has changed."""

  def __init__(self, directory: pathlib.Path) -> None:
    """Reads nothing yet."""
    self._directory = directory
    self._timestamps: dict[str, tuple[int, int]] = {}
    self._events: tuple[Alert, ...] = ()

  def poll(self, run: str | None) -> tuple[Alert, ...]:
    """Returns what is known of the run `run` (None: of all), the oldest first."""
    timestamps = self._stat()
    if timestamps != self._timestamps:
      self._timestamps = timestamps
      self._events = tuple(_event(values) for values in read_events(self._directory, run)[-50:])
    return self._events

  def _stat(self) -> dict[str, tuple[int, int]]:
    try:
      with os.scandir(self._directory / FOLDER) as entries:
        return {e.name: (e.stat().st_size, e.stat().st_mtime_ns)
                for e in entries if e.name.endswith(".jsonl")}
    except OSError:
      return {}


def _event(values: dict[str, Any]) -> Alert:
  unix, waited, seconds = (values["when_unix_ns"] / 1e9, values.get("waited"),
                           values.get("seconds"))
  if values.get("event") == "resumed":
    took = "" if seconds is None else f" after {duration(seconds)}"
    return Alert(f"Watchdog: steps complete again{took}.", True, unix)
  if values.get("event") != "late":
    return Alert(f"Watchdog: {plain(values.get('event'))[:80]}.", True, unix)
  what = "a step" if values.get("step") is None else f"step {values['step']}"
  since = "" if waited is None else f" for {duration(waited)}"
  who = [_late(entry) for entry in values.get("late") or ()]
  more = f"; {len(who) - 4} more." if len(who) > 4 else "."
  where = (f" Not arrived: {'; '.join(who[:4])}{more}" if who
           else " All processes are inside it.")
  return Alert(f"Watchdog: {what} has not completed{since}.{where}", False, unix)


def _late(entry: dict[str, Any]) -> str:
  """One late process, without its stack."""
  values = {f.name: entry[f.name] for f in dataclasses.fields(LateProcess)
            if f.name in entry and f.name != "stack"}
  return plain(LateProcess(**values).sentence())[:400]
