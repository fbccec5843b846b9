"""What a control file asks for, checked; the file of a run, the note of what was applied when, and
how process 0 follows them."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import pathlib
import queue
import threading
from collections.abc import Mapping
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from jaxpace.files import UserError
from jaxpace.files.folders import Folder
from jaxpace.files.reading import UnreadableError, in_words, parse, read_bytes, read_end
from jaxpace.hosts.locality.host import format_list

_LOG = logging.getLogger("jaxpace")
MAX_STEP = 2**31 - 1
MAX_RANK = 2**20 - 1
_MOST_RANGES, _MOST_LISTED = 2**16, 64
"""Ranges that are read; ranks that are written one by one, and not as ranges."""


_STEPS = f"a step, from 0 to {MAX_STEP}"
_MEANINGS = {"max_delay": "seconds, from 0 to 10",
             "threshold": "a share of the median step, from 0 to 1", "enabled": "true or false",
             "from_step": _STEPS, "until_step": _STEPS}


class RequestError(UserError, ValueError):
  """The file asks for something that can't be: a sentence that says what."""


Step = Annotated[int, Meta(ge=0, le=MAX_STEP)]


class ControlRequest(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
  """Settings of a running job's pacer. The default leaves everything as the pacer was made."""

  enabled: bool = True
  max_delay: Annotated[float, Meta(ge=0, le=10)] | None = None
  """Seconds; None: as the pacer was made."""
  threshold: Annotated[float, Meta(ge=0, le=1)] | None = None
  """A share of the median step; None: as the pacer was made."""
  ranks: tuple[int, ...] | None = None
  """Ranks along the data axis that may be delayed; None: all."""
  from_step: Step = 0
  """First step in which delays are allowed."""
  until_step: Step | None = None
  """One past the last; None: for good."""

  def __post_init__(self) -> None:
    if self.until_step is not None and self.until_step <= self.from_step:
      raise RequestError(f"until_step={self.until_step} must be above from_step={self.from_step}: "
                         "no step lies between them. `jaxpace control RUN --off` switches pacing "
                         "off")

  def allows(self, step: int) -> bool:
    """Whether the pacer may act in a step, or work may be shared by speed."""
    return self.enabled and self.from_step <= step and (
        self.until_step is None or step < self.until_step)

  @staticmethod
  def from_json(data: Mapping[str, Any], ranks: int | None = None) -> ControlRequest:
    """Checks JSON values that were read from a file, absent keys and nulls for the default, against
    the number of ranks along the data axis where that is known. Raises RequestError where there are
    unknown keys, or a value is out of range."""
    given = {key: value for key, value in data.items() if value is not None}
    if "ranks" in given:
      given["ranks"] = parse_ranks(given["ranks"], ranks)
    try:
      return msgspec.convert(given, ControlRequest)
    except msgspec.ValidationError as error:
      if isinstance(error.__cause__, RequestError):
        raise error.__cause__ from None
      raise RequestError(in_words(
          error, _MEANINGS, f"it takes {', '.join(ControlRequest.__struct_fields__)}")) from error

  def to_json(self) -> dict[str, Any]:
    """Returns plain values; inverse of `from_json`. What is as made is left out, but for
    `enabled`."""
    values = {"enabled": self.enabled, **msgspec.to_builtins(self)}
    if self.ranks is not None and len(self.ranks) > _MOST_LISTED:
      values["ranks"] = format_list(self.ranks)
    return values

  def __str__(self) -> str:
    """Says it in words."""
    if not self.enabled:
      return "pacing off"
    words = []
    if self.max_delay is not None:
      words.append(f"longest delay {self.max_delay * 1e3:g} ms")
    if self.threshold is not None:
      words.append(f"threshold {self.threshold:g}")
    if self.ranks is not None:
      words.append(f"ranks {format_list(self.ranks)} only")
    if self.from_step:
      words.append(f"from step {self.from_step}")
    if self.until_step is not None:
      words.append(f"until step {self.until_step}")
    return "pacing on, " + (", ".join(words) if words else "as the pacer was made")


def parse_ranks(value: Any, ranks: int | None = None) -> tuple[int, ...]:
  """Reads ranks: a list of numbers, or text such as "0-7,9". Nothing is written out before all of
  it is checked.

  >>> parse_ranks("0-2,9")
  (0, 1, 2, 9)

  Args:
    value: of a JSON file, or of a command line.
    ranks: ranks along the data axis, where that is known.

  Raises:
    RequestError: there are none, it is something else, or there is no such rank.
  """
  wrong = RequestError("ranks must be a list of rank numbers, or text such as \"0-7,9\"")
  if not isinstance(value, str | list | tuple):
    raise wrong
  if (len(value) if not isinstance(value, str) else value.count(",") + 1) > _MOST_RANGES:
    raise RequestError(
        f"ranks has more than {_MOST_RANGES:,} pieces: write neighbours as a range, such "
        "as \"0-7\"")
  ranges: list[tuple[int, int]] = []
  try:
    for item in value.split(",") if isinstance(value, str) else value:
      if isinstance(item, str):
        first, dash, last = item.strip().partition("-")
        low, high = int(first), int(last if dash else first)
      else:
        low = high = item
      if type(low) is not int or not 0 <= low <= high <= MAX_RANK:
        raise wrong
      ranges.append((low, high))
  except (TypeError, ValueError):
    raise wrong from None
  if not ranges:
    raise wrong
  last_rank = max(high for _, high in ranges)
  if ranks is not None and last_rank >= ranks:
    raise RequestError(f"there is no rank {last_rank}: the data axis has ranks 0 to {ranks - 1}")
  chosen: list[int] = []
  for low, high in sorted(ranges):
    # each rank once: where ranges overlap, only what is beyond the ones before
    chosen.extend(range(max(low, chosen[-1] + 1 if chosen else 0), high + 1))
  return tuple(chosen)


# The file.

NAME = "control.json"
APPLIED = "control.applied.jsonl"
_LONGEST = 1 << 20
"""Bytes: ranges of ranks are short, and reading more would hold up the interpreter, and so the
loop."""

Signature = tuple[int, int, int] | None
"""What changes when the file is replaced or written: inode, time, size. None: there is no file."""


def locate(path: str | os.PathLike[str]) -> pathlib.Path:
  """Returns the control file: `path` itself if its name ends in .json, else the one in the run
  directory `path`."""
  path = pathlib.Path(os.path.abspath(path))
  return path if path.suffix == ".json" else path / NAME


def signature(path: pathlib.Path) -> Signature:
  """Returns what differs between two versions of the file, without reading it."""
  try:
    stat = path.stat()
  except OSError:
    return None
  return stat.st_ino, stat.st_mtime_ns, stat.st_size


def read(path: pathlib.Path, ranks: int | None = None) -> ControlRequest:
  """Reads a control file; where there is none, everything is as the pacer was made. Raises
  RequestError where it can't be read, is no JSON, or asks for something that can't be."""
  try:
    asked = parse(read_bytes(path, _LONGEST))
  except FileNotFoundError:
    return ControlRequest()
  except UnreadableError as error:
    raise RequestError(f"it {error}") from error
  except OSError as error:
    raise RequestError(f"it can't be read: {error.strerror or error}") from error
  return ControlRequest.from_json(asked, ranks)


def write(path: pathlib.Path, request: ControlRequest) -> None:
  """Replaces the file as a whole: the job reads the old one or the new one, never half of one."""
  Folder(path.parent).write_text(path.name, json.dumps(request.to_json(), indent=1) + "\n")


def note(path: pathlib.Path, step: int, unix_ns: int, request: ControlRequest) -> None:
  """Appends to the note beside the control file what applies from which step on."""
  line = json.dumps({"step": step, "unix_ns": unix_ns, "settings": request.to_json()})
  Folder(path.parent).append(APPLIED, line + "\n")


def last_note(path: pathlib.Path) -> tuple[int, ControlRequest] | None:
  """Returns the step of the last note, and what applies from it on; None where there is none."""
  with contextlib.suppress(OSError, ValueError, LookupError, AttributeError):
    line = parse(read_end(path.with_name(APPLIED), _LONGEST).splitlines()[-1])
    return msgspec.convert(line["step"], Step), ControlRequest.from_json(line["settings"])
  return None


_PATIENCE_SECONDS = 1.0
"""How long the first look is waited for, and the thread at the end: a file system may hang."""


class ControlFileFollower:
  """Process 0's part: says what the file asks for. Reads and writes beside the loop: a file system
  that hangs holds up this thread alone."""

  def __init__(self, path: pathlib.Path, ranks: int, every_seconds: float):
    """Begins to follow the file, looking every so many seconds; requests are checked against the
    number of ranks along the data axis."""
    self._path, self._ranks, self._every_seconds = path, ranks, every_seconds
    self._applied = 0, ControlRequest()
    self._seen: Signature = None
    self._notes: queue.SimpleQueue[tuple[int, int, ControlRequest]] = queue.SimpleQueue()
    self._looked, self._closing = threading.Event(), threading.Event()
    self._thread = threading.Thread(target=self._work, name="jaxpace-control-file", daemon=True)
    self._thread.start()

  def applied(self) -> list[Any]:
    """Says what applies now, as JSON values: a version, 0 for settings as made and counted up with
    every change, and the request."""
    self._looked.wait(_PATIENCE_SECONDS)
    version, request = self._applied
    return [version, request.to_json()]

  def note(self, step: int, unix_ns: int, request: ControlRequest) -> None:
    """Has it written down beside the file what applies from which step on, some time soon."""
    self._notes.put((step, unix_ns, request))

  def close(self) -> None:
    """Ends the thread, once all is noted; where that takes long, leaves it."""
    self._closing.set()
    self._thread.join(_PATIENCE_SECONDS)

  def _work(self) -> None:
    over = False
    while not over:
      self._look()
      self._looked.set()
      over = self._closing.wait(self._every_seconds)
      while not self._notes.empty():
        step, unix_ns, request = self._notes.get()
        try:
          note(self._path, step, unix_ns, request)
        except OSError as error:
          _LOG.debug("It is not noted what applies from step %d on: %s", step, error)

  def _look(self) -> None:
    """Takes in what the file says, if it has changed; one that can't be followed changes
    nothing."""
    version, request = self._applied
    try:
      now = signature(self._path)
      if now == self._seen:
        return
      self._seen = now
      asked = read(self._path, self._ranks)
      if asked != request:
        self._applied = version + 1, asked
    except Exception as error:  # whatever the file holds, this thread goes on
      why = error if isinstance(error, RequestError) else (
          f"it can't be read: {type(error).__name__}: {error}")
      _LOG.warning("%s is not followed: %s. Pacing stays as it is: %s.", self._path, why, request)
