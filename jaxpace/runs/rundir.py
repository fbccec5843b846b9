"""The JSON files of a run directory, run ids, what each process says of itself, what happens to an
earlier run found there, and the lock by which one recorder at a time writes to it."""

from __future__ import annotations

import contextlib
import datetime
import fcntl
import functools
import json
import logging
import os
import pathlib
import re
import socket
import uuid
import weakref
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple, TypeGuard

import msgspec

from jaxpace.core.words import list_ranks, plain, plural
from jaxpace.files import UserError
from jaxpace.files.folders import Folder, ForeignFileError
from jaxpace.files.reading import UnreadableError, read_document, why_unreadable
from jaxpace.files.schemas import ProcessFile, RunFile
from jaxpace.runs import ring_file, schema
from jaxpace.runs.run import Process
from jaxpace.runs.table_reader import parse_part_name

_LOG = logging.getLogger("jaxpace")
RUN_FILE = "run.json"
PREVIOUS = ".previous"
FOLDER = "process"
TOGETHER = ("if hosts share no disk, each has its part in a run directory of its own; copy what "
            "these hold into one")
"""What to do where processes left nothing in a run directory."""
_LOCK_FILE = ".lock"
_PROCESS_FILE = re.compile(r"^([0-9]{1,8})\.json$")
_NO_NAME = re.compile(r"[^\w.-]", re.ASCII)
_NAMES_FILES = re.compile(r"[\w.-]{1,200}", re.ASCII)
_MOST_PROCESSES = 1 << 16
_LONGEST = 200
"""Characters of a folder's name."""


class RunIdentity(NamedTuple):
  """What all processes of a run must agree on."""

  run: str
  attempt: int
  started_unix_ns: int


def write_json(path: pathlib.Path, value: dict[str, Any]) -> None:
  """Replaces a JSON file as a whole, of plain values, anything else written as its `str`: a reader
  sees the old one or the new one. Its folder is made if it is missing."""
  if _PROCESS_FILE.match(path.name):
    folder = Folder(path.parent.parent, path.parent.name)
  else:
    path.parent.mkdir(exist_ok=True)
    folder = Folder(path.parent)
  folder.write_text(path.name, json_text(value))


def json_text(value: dict[str, Any]) -> str:
  """What a JSON file of a run holds, given its values, see `write_json`."""
  return json.dumps(value, indent=1, default=str) + "\n"


def read_json(path: pathlib.Path, schema: type[msgspec.Struct] = RunFile) -> dict[str, Any] | None:
  """Returns a JSON file's dict, without what is not of its schema; None if there is none, or it is
  no such file."""
  try:
    return read_document(path, schema)[0]
  except (OSError, UnreadableError):
    return None


def make(directory: pathlib.Path) -> None:
  """Makes a run directory if it is missing; UserError, if there is no place for one there."""
  try:
    directory.mkdir(parents=True, exist_ok=True)
  except FileNotFoundError as error:
    # Of /proc and the like; later it means that the directory was moved.
    raise UserError(f"{directory} can't be made: {os.path.dirname(error.filename)} takes no "
                    "directories. Choose another one.") from error


def prepare(directory: pathlib.Path) -> dict[str, Any] | None:
  """Makes the directory if it is missing, and reads the `run.json` of the run in it, if there is
  one. Raises ForeignFileError where that is not one of a recorded run."""
  make(directory)
  path = directory / RUN_FILE
  earlier = read_json(path)
  if os.path.lexists(path) and not _is_ours(earlier):
    raise ForeignFileError(
        f"{path} was not written by jaxpace: it is left as it is. Give the recorder a directory of "
        "its own.")
  return earlier


def claim(directory: pathlib.Path, resume: bool, now_unix_ns: int) -> RunIdentity:
  """Makes the directory ready for a run, and gives the run its id. For process 0 only. With
  `resume` it goes on with the run that is there, as its next attempt; not with one whose id is none
  that files can be named after. Raises ForeignFileError where there is a `run.json` of no recorded
  run.

  The files of an earlier run are moved to `.previous/<its id>/`, never deleted; foreign files are
  not touched.
  """
  earlier = prepare(directory)
  if earlier is not None and resume and _NAMES_FILES.fullmatch(earlier["run"]):
    return RunIdentity(earlier["run"], int(earlier.get("attempt", 0)) + 1, now_unix_ns)
  when = datetime.datetime.fromtimestamp(now_unix_ns / 1e9, datetime.UTC)
  identity = RunIdentity(f"{when:%Y%m%dT%H%M%S}-{uuid.uuid4().hex[:8]}", 0, now_unix_ns)
  if set_aside(directory, identity.run):
    _LOG.warning("The earlier run in %s is kept in its folder %s.", plain(directory), PREVIOUS)
  return identity


def set_aside(directory: pathlib.Path, current: str, process: int | None = None) -> int:
  """Moves the files of every run but `current` to `.previous/<run>/`, or only those of one process,
  whose directory may be on a disk of its own host; returns how many."""
  found = [(path, run) for path, owner, run in _of_processes(directory)
           if run not in (None, current) and process in (None, owner)]
  # `run.json` and what belongs to it go last: as long as it is there, the earlier run can be read.
  info = read_json(directory / RUN_FILE)
  if process is None and _is_ours(info) and info["run"] != current:
    found += [(path, info["run"]) for path in _files(directory, "locality")
              if _PROCESS_FILE.match(path.name)]
    found.append((directory / RUN_FILE, info["run"]))
  for path, run in found:
    _move(directory, path, run)
  return len(found)


def _of_processes(directory: pathlib.Path) -> Iterator[tuple[pathlib.Path, int, str | None]]:
  """Files that one process of a run wrote, the process, and the run as far as it is known."""
  for table in schema.TABLES:
    for path in _files(directory, table):
      if part := parse_part_name(path.name):
        yield path, part.process, part.run
  for path in _files(directory, FOLDER):
    if number := _PROCESS_FILE.match(path.name):
      info = read_json(path, ProcessFile)
      yield path, int(number[1]), info["run"] if _is_ours(info) else None
  for path in _files(directory, ring_file.FOLDER):
    if (owner := ring_file.process_of(path.name)) is not None:
      yield path, owner, (ring_file.run_of(path) if path.suffix == ".ring" else
                          (read_json(path, ProcessFile) or {}).get("run") or None)


def _files(directory: pathlib.Path, name: str) -> list[pathlib.Path]:
  """What lies in a folder of the run directory; nothing where that is a link."""
  folder = directory / name
  return sorted(folder.iterdir()) if folder.is_dir() and not folder.is_symlink() else []


def _is_ours(info: dict[str, Any] | None) -> TypeGuard[dict[str, Any]]:
  return info is not None and isinstance(info.get("run"), str) and "schema_version" in info


def _move(directory: pathlib.Path, path: pathlib.Path, run: str) -> None:
  inside = path.parent.relative_to(directory).parts
  # The run's id may be anything: a damaged file says it.
  aside = _NO_NAME.sub("_", pathlib.Path(run).name).strip(".")[:_LONGEST] or "_"
  Folder(directory, *inside).rename(
      path.name, path.name, Folder(directory, PREVIOUS, aside, *inside))


def read_processes(directory: pathlib.Path, run: str | None, problems: list[str]
                   ) -> Iterator[Process]:
  """Reads `process/*.json` of a run, or of any; `problems` gets a sentence for each file that is
  left out, or parts of it."""
  folder = directory / FOLDER
  for file in sorted(folder.glob("*.json")) if folder.is_dir() else []:
    try:
      info, left_out = read_document(file, ProcessFile)
    except (OSError, UnreadableError) as error:
      problems.append(f"process/{file.name} {why_unreadable(error)}: its host name is unknown.")
      continue
    problems.extend(f"process/{file.name}: {sentence}." for sentence in left_out)
    named = _PROCESS_FILE.match(file.name)
    number = info.get("process", int(named[1]) if named else None)
    if number is None:
      problems.append(f"process/{file.name} does not say which process it is of: left out.")
    elif run is not None and info.get("run", run) != run:
      problems.append(f"process/{file.name} belongs to another run: left out.")
    else:
      yield Process(number, info)


def told_by(processes: Iterable[Process]) -> dict[str, Any]:
  """What processes say of their job in place of `run.json`, which may be on another host's disk."""
  every = list(processes)
  number, devices = (max((one.info.get(name) or 0 for one in every), default=0)
                     for name in ("processes", "devices"))
  return {"processes": number, "devices": devices, "ranks": devices} if number and devices else {}


def left_nothing(number: int, known: Iterable[int]) -> str:
  """Names those of so many processes that are not known, and says what to do; empty where all are,
  or none is."""
  there = set(known)
  away = [process for process in range(min(number, _MOST_PROCESSES)) if process not in there]
  return (f"{plural(len(away), 'process', 'processes')} of {number:,} left nothing here "
          f"({list_ranks(away)}): {TOGETHER}." if there and away else "")


class DirectoryLock:
  """Held by process 0 of a recorded job, from `take` to `release`. The system frees it when the
  process dies.

  Where the file system knows no locks nothing is locked. A forked child closes its copy of the
  descriptor, so that it does not keep the lock when its parent is dead.
  """

  def __init__(self, folder: Folder):
    self._folder, self._descriptor = folder, -1
    os.register_at_fork(after_in_child=functools.partial(_let_go, weakref.ref(self)))

  @staticmethod
  def take(directory: pathlib.Path) -> DirectoryLock:
    """Locks a directory; ForeignFileError, if another recorder, in this process or another, has it.
    """
    lock = DirectoryLock(Folder(directory))
    # Its last owner may remove the file between our opening and locking it.
    while not lock._locked(directory):
      pass
    return lock

  def release(self) -> None:
    """Lets the next recorder in. Further calls, and calls in a forked child, do nothing."""
    if self._descriptor >= 0:
      with contextlib.suppress(OSError):
        self._folder.unlink(_LOCK_FILE)
      self._close()

  def _locked(self, directory: pathlib.Path) -> bool:
    """Whether the file that is locked, if locks are known here, is the one in the directory."""
    self._descriptor = self._folder.open_own(_LOCK_FILE, os.O_RDWR)
    try:
      fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
      owner = os.read(self._descriptor, 200).decode(errors="replace").split()
      self._close()
      raise ForeignFileError(_busy(directory, owner)) from None
    except OSError:
      self._close()
      return True
    try:
      there = os.path.samestat(os.fstat(self._descriptor), self._folder.stat(_LOCK_FILE))
    except FileNotFoundError:
      there = False
    if not there:
      self._close()
      return False
    os.ftruncate(self._descriptor, 0)
    os.write(self._descriptor, f"{os.getpid()} {socket.gethostname()}\n".encode())
    return True

  def _close(self) -> None:
    descriptor, self._descriptor = self._descriptor, -1
    with contextlib.suppress(OSError):
      os.close(descriptor)


def _let_go(lock: weakref.ref[DirectoryLock]) -> None:
  """In a forked child."""
  if (mine := lock()) is not None and mine._descriptor >= 0:
    mine._close()


def _busy(directory: pathlib.Path, owner: list[str]) -> str:
  who = f"process {owner[0]} on {owner[1]}" if len(owner) == 2 else "another process"
  if owner[:1] == [str(os.getpid())]:
    return (f"another Recorder of this process is recording to {directory}. Open one Recorder for "
            "a job, or give each a directory of its own.")
  if owner == [str(os.getppid()), socket.gethostname()]:
    return (f"process {owner[0]}, which started this one, is recording to {directory}. To record "
            "this one as well, start it with a directory of its own: JAXPACE_RUN=DIR.")
  return (f"{who} is recording to {directory} at this moment. Give each job a directory of its "
          "own. If the two are processes of one job, each takes itself for the whole of it: call "
          "jaxpace.distributed.initialize() (or jax.distributed.initialize()) first.")
