"""What watchdogs have found, kept in the run directory: `watchdog/<process>.jsonl`, one line an
event."""

from __future__ import annotations

import dataclasses
import json
import logging
import operator
import os
import pathlib
from typing import Annotated, Any, Literal, TypedDict

from msgspec import Meta

from jaxpace.core.words import list_ranks
from jaxpace.files.folders import Folder
from jaxpace.files.reading import UnreadableError, check, parse, read_end
from jaxpace.files.schemas import Count, Line, Nanoseconds, Number, Seconds, Step, Text

_LOG = logging.getLogger("jaxpace")
FOLDER = "watchdog"
_LARGEST, _MOST = 16 << 20, 10_000
"""Bytes that are read of a process's file, from its end; events."""

Ranks = Annotated[tuple[Number, ...], Meta(max_length=1 << 20)]
State = Literal["silent", "outside", "left", "absent", "service"]
"""Why a process has not arrived.

"silent": nothing has been heard of it lately; "outside": it answers, its loop is elsewhere; "left":
it has closed its watchdog; "absent": it was never heard of; "service": process 0, and the store
that lives in it, answer nobody.
"""


@dataclasses.dataclass(frozen=True)
class LateProcess:
  """A process that has not arrived."""

  process: Number
  state: State
  host: Line = ""
  pid: Count = 0
  last_step: Step | None = None  # last step it is known to have called; None where nobody knows
  phase: Line = ""  # where its loop is, or was when it was last heard of
  seconds: Seconds = 0.0  # since it was heard of, or since a step of it completed, approximately
  stack: Text = ""

  def sentence(self) -> str:
    """Says it in words, without the stack."""
    who = f"process {self.process}" + (f" (host {self.host}, pid {self.pid})" if self.host else "")
    if self.state == "absent":
      return (f"{who} was never heard of: it has not opened its watchdog, has ended, or can't be "
              "reached")
    last = ("; its last step isn't known" if self.last_step is None
            else f"; its last step is {self.last_step}")
    if self.state == "service":
      return (f"{who} does not answer, nor does the coordination service, which lives in it: it "
              f"stands still, has ended, or can't be reached from here{last}")
    if self.state == "left":
      return f"{who} has closed its watchdog: its loop has ended, or an error left it{last}"
    place = where(self.phase)
    if self.state == "silent":
      return (f"{who} has not been heard of for {self.seconds:.1f} s: it stands still, is swapped "
              "out, has ended or can't be reached, or native code holds its interpreter; when last "
              f"heard of it was {place}{last}")
    return f"{who} is {place}, and has completed no step for {self.seconds:.1f} s{last}"


class LateCause(TypedDict, total=False):
  """Why ranks wait within a step."""

  kind: Line
  ranks: Ranks
  collective: Line | None


@dataclasses.dataclass(frozen=True)
class Late:
  """What a watchdog has found.

  Attributes:
    step: the step that is waited for, counted from 1 as the watchdog sees them: the first call is
      step 1.
    waited: seconds since a step last completed here.
    late: those that have not arrived; empty where all have.
    arrived: indices of those that have called the step.
    process: index of the process that says so.
    marks: which collective of an observed step is not finished, who waits in it and for whom,
      in sentences.
    causes: the same briefly, that which keeps most ranks first.
  """

  step: Step = 0
  waited: Seconds = 0.0
  late: Annotated[tuple[LateProcess, ...], Meta(max_length=1 << 17)] = ()
  arrived: Ranks = ()
  process: Number = 0
  marks: Annotated[tuple[Line, ...], Meta(max_length=4096)] = ()
  causes: Annotated[tuple[LateCause, ...], Meta(max_length=4096)] = ()

  def text(self) -> str:
    """Says it in words, a line for each late process, each stack indented below its process."""
    lines = [f"step {self.step} has not completed for {self.waited:.1f} s."]
    if not self.late:
      all_of_them = (f"All {len(self.arrived)} processes have" if len(self.arrived) > 1
                     else "This process has")
      lines[0] += f" {all_of_them} called it" + ("." if self.marks else (
          ": a device, the network or a function of the host that it calls keeps it, or it takes "
          "this long."))
    lines += [f"  {'in the step' if not i else 'and'}: {sentence}"
              for i, sentence in enumerate(self.marks)]
    for process in self.late:
      lines.append(f"  not arrived: {process.sentence()}")
      lines += [f"    | {line}" for line in process.stack.splitlines()]
    if self.late and self.arrived:
      several = "processes" if len(self.arrived) > 1 else "process"
      lines.append(f"  have called it: {several} {list_ranks(self.arrived)}")
    return "\n".join(lines)

  def to_json(self) -> dict[str, Any]:
    """Returns plain lists, dicts and scalars."""
    return dataclasses.asdict(self)


@dataclasses.dataclass(frozen=True)
class _EventLine(Late):
  """A line of `watchdog/<process>.jsonl`."""

  event: Line | None = None
  run: Line | None = None
  when_unix_ns: Nanoseconds | None = None
  seconds: Seconds | None = None


class EventFile:
  """Appends events to this process's file. Trouble is one warning, no error."""

  def __init__(self, directory: str | os.PathLike[str], process: int, run: str | None) -> None:
    """Prepares; the file is made with its first event."""
    self._directory = pathlib.Path(os.path.abspath(directory))
    self._name, self._run = f"{process}.jsonl", run
    self._folder: Folder | None = None
    self._failed = False

  def write(self, event: str, when_unix_ns: int, values: dict[str, Any]) -> None:
    """Appends one line and has it reach the disk: the process may be killed next."""
    if self._failed:
      return
    line = json.dumps({"event": event, "run": self._run, "when_unix_ns": when_unix_ns, **values})
    try:
      if self._folder is None:
        self._directory.mkdir(parents=True, exist_ok=True)
        self._folder = Folder(self._directory, FOLDER)
      self._folder.append(self._name, line + "\n", fsync=True)
    except OSError as error:
      self._failed = True
      _LOG.warning("What the watchdog finds is not recorded: %s can't be written (%s).",
                   self._directory / FOLDER / self._name, error.strerror or error)


def read_events(directory: str | os.PathLike[str], run: str | None = None) -> list[dict[str, Any]]:
  """Reads what all watchdogs of a run, or of any, have found, each one's in its order, and among
  them by their hosts' wall clocks, which may be set back: dicts with "event" ("late" or
  "resumed"), "when_unix_ns", "process" and what `Late` holds, or the "seconds" that it took. Lines
  that can't be read are left out, and so are values that are not what a watchdog writes. Of very
  many the newest count."""
  found: list[tuple[int, dict[str, Any]]] = []
  folder = pathlib.Path(directory) / FOLDER
  for path in sorted(folder.glob("*.jsonl")) if folder.is_dir() else []:
    try:
      lines = read_end(path, _LARGEST).splitlines()
    except (OSError, UnreadableError):
      continue
    latest = 0
    for line in lines[-_MOST:]:
      try:
        event, _ = check(parse(line), _EventLine)
      except UnreadableError:
        continue
      if event.get("when_unix_ns") is not None and run in (None, event.get("run")):
        latest = max(latest, event["when_unix_ns"])
        found.append((latest, event))
  return [event for _, event in sorted(found, key=operator.itemgetter(0))[-_MOST:]]


def where(phase: str) -> str:
  """Says in words where a loop is."""
  known = {"step": "in its step", "between steps": "between two steps",
           "compiling": "compiling", "data": "waiting for data",
           "checkpoint": "writing a checkpoint", "": "not yet at its first step"}
  return known.get(phase, f"in {phase!r}")
