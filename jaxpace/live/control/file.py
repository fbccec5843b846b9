"""The control file of a run, and the note of what was applied when."""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
from typing import Any

from jaxpace.files import atomic_write
from jaxpace.files.documents import parse
from jaxpace.files.folders import Folder
from jaxpace.files.reading import UnreadableError, read_bytes, read_end
from jaxpace.live.control.request import ControlRequest, RequestError

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
  """Returns what tells one version of the file from the next, without reading it."""
  try:
    stat = path.stat()
  except OSError:
    return None
  return stat.st_ino, stat.st_mtime_ns, stat.st_size


def read(path: pathlib.Path, ranks: int | None = None) -> ControlRequest:
  """Reads a control file; where there is none, everything is as the pacer was made.

  Raises:
    RequestError: it can't be read, is no JSON, or asks for something that can't be.
  """
  try:
    text = read_bytes(path, _LONGEST).decode("utf-8")
  except FileNotFoundError:
    return ControlRequest()
  except UnreadableError as error:
    raise RequestError(f"it {error}") from error
  except (OSError, UnicodeDecodeError) as error:
    raise RequestError(f"it can't be read: {getattr(error, 'strerror', None) or error}") from error
  try:
    asked: Any = json.loads(text)
  except (ValueError, RecursionError) as error:
    raise RequestError(f"it is no JSON: {error}") from error
  return ControlRequest.from_json(asked, ranks)


def write(path: pathlib.Path, request: ControlRequest) -> None:
  """Replaces the file as a whole: the job reads the old one or the new one, never half of one.

  Raises:
    OSError: it can't be written.
  """
  atomic_write.write_text(path, json.dumps(request.to_json(), indent=1) + "\n")


def note(path: pathlib.Path, step: int, unix_ns: int, request: ControlRequest) -> None:
  """Appends to the note beside the control file what applies from which step on.

  Raises:
    OSError: it can't be written.
  """
  line = json.dumps({"step": step, "unix_ns": unix_ns, "settings": request.to_json()})
  Folder(path.parent).append(APPLIED, line + "\n")


def last_note(path: pathlib.Path) -> tuple[int, ControlRequest] | None:
  """Returns the step of the last note, and what applies from it on; None where there is none."""
  with contextlib.suppress(OSError, ValueError, KeyError, IndexError, TypeError):
    entry = parse(read_end(path.with_name(APPLIED), _LONGEST).splitlines()[-1])
    return int(entry["step"]), ControlRequest.from_json(entry["settings"])
  return None
