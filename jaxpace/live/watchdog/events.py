"""What a watchdog has found, kept in the run directory: `watchdog/<process>.jsonl`, one line an
event."""

from __future__ import annotations

import json
import logging
import os
import pathlib
from typing import Any

from jaxpace.files.documents import check, parse
from jaxpace.files.folders import Folder
from jaxpace.files.reading import UnreadableError, read_end
from jaxpace.files.schemas import EventLine
from jaxpace.live.watchdog.verdict import Late

_LOG = logging.getLogger("jaxpace")
FOLDER = "watchdog"
_LARGEST, _MOST = 16 << 20, 10_000
"""Bytes that are read of a process's file, from its end; events."""


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


def late_event(late: Late) -> dict[str, Any]:
  """The values of an event "late"."""
  return late.to_json()


def read_events(directory: str | os.PathLike[str], run: str | None = None) -> list[dict[str, Any]]:
  """Reads what all watchdogs of a run have found, in the order of their hosts' wall clocks.

  Args:
    directory: run directory.
    run: id of the run; events of others are left out. None: all.

  Returns:
    Events: dicts with "event" ("late" or "resumed"), "when_unix_ns", "process" and what `Late`
      holds, or the "seconds"
    that it took. Lines that can't be read are left out, and so are values that are not what a
    watchdog writes. Of very many the newest count.
  """
  found = []
  folder = pathlib.Path(directory) / FOLDER
  for path in sorted(folder.glob("*.jsonl")) if folder.is_dir() else []:
    try:
      lines = read_end(path, _LARGEST).splitlines()
    except (OSError, UnreadableError):
      continue
    for line in lines[-_MOST:]:
      try:
        event = check(parse(line), EventLine).value
      except UnreadableError:
        continue
      if event.get("when_unix_ns") is not None and run in (None, event.get("run")):
        found.append(event)
  return sorted(found, key=lambda event: event["when_unix_ns"])[-_MOST:]
