"""What the marks of each process mean, beside its ring: `marks/<process>.plan.json`.

A file a process: programs are numbered by the process that compiled them. It is written as soon as
a program is compiled, so that it is there should the first step never end.
"""

from __future__ import annotations

import json
import pathlib
from typing import NamedTuple

from jaxpace.core.observed import ObservedPlan
from jaxpace.files.documents import read_document
from jaxpace.files.folders import Folder
from jaxpace.files.reading import UnreadableError
from jaxpace.files.schemas import MarksFile

FOLDER = "marks"
"""Of a run directory; rings lie there, too."""
LARGEST = 64 << 20
"""Bytes of a plan that is read."""


class ProcessPlan(NamedTuple):
  """A process's programs, and the run that they belong to."""

  run: str | None
  attempt: int
  process: int
  plan: ObservedPlan


def path_of(directory: pathlib.Path, process: int) -> pathlib.Path:
  """Where the plan of a process lies."""
  return directory / FOLDER / f"{process}.plan.json"


def write_plan(directory: pathlib.Path | Folder, process: int, run: str, attempt: int,
               plan: ObservedPlan) -> None:
  """Replaces a process's plan as a whole; it is on the disk when this returns.

  Args:
    directory: run directory, which must be there; or its folder `FOLDER`, held open.
    process: index of this process.
    run: id of the run.
    attempt: attempt of the run.
    plan: the programs so far.

  Raises:
    OSError: it can't be written.
  """
  document = {"run": run, "attempt": attempt, "process": process, "plan": plan.to_json()}
  folder = directory if isinstance(directory, Folder) else Folder(directory, FOLDER)
  folder.write_text(f"{process}.plan.json", json.dumps(document), fsync=True)


def read_plan(directory: pathlib.Path, process: int) -> ProcessPlan:
  """Reads a process's plan.

  Raises:
    UnreadableError: it is no such file: the end of a sentence that begins with its name.
    OSError: there is none, or it can't be read.
  """
  document = read_document(path_of(directory, process), MarksFile, LARGEST)
  value = document.value
  if document.left_out or not isinstance(value.get("plan"), dict):
    raise UnreadableError("holds no plan of an observed step")
  try:
    plan = ObservedPlan.from_json(value["plan"])
  except (KeyError, TypeError, ValueError):
    raise UnreadableError("holds no plan of an observed step") from None
  return ProcessPlan(value.get("run"), value.get("attempt", 0), value.get("process", process), plan)
