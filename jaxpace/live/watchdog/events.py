"""Appends what a watchdog has found to the run directory; see `jaxpace.trace.alarms`."""

from __future__ import annotations

import json
import logging
import os
import pathlib
from typing import Any

from jaxpace.files.folders import Folder
from jaxpace.trace.alarms import FOLDER

_LOG = logging.getLogger("jaxpace")


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
