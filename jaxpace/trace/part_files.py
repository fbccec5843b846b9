"""Finds the Parquet parts of a recorded run, and says which files are none."""

from __future__ import annotations

import os
import pathlib
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from jaxpace.trace import schema


class PartId(NamedTuple):
  """What a part's file name says."""

  run: str
  process: int
  first: int
  last: int

  @property
  def file_name(self) -> str:
    """The name of the part's file."""
    return schema.PART_NAME.format(**self._asdict())


def parse_part_name(name: str) -> PartId | None:
  """Inverse of `PartId.file_name`; None for a name that is not a part's."""
  match = schema.PART_PATTERN.match(name)
  if not match or int(match["first"]) > int(match["last"]):
    return None
  return PartId(match["run"], int(match["process"]), int(match["first"]), int(match["last"]))


class PartFile(NamedTuple):
  """One part of a table. `inside` are parts whose rows it already holds: what a merge left
  behind."""

  path: pathlib.Path
  run: str
  process: int
  first: int
  last: int
  inside: tuple[PartFile, ...] = ()


class Folder(NamedTuple):
  """What lies in the folder of one table."""

  parts: list[PartFile]
  temporary: int
  foreign: int  # parts of other runs
  unknown: int  # files that are no part at all
  others: tuple[str, ...] = ()  # names of some of those


def list_parts(folder: pathlib.Path, run: str | None) -> Folder:
  """Lists the parts of `run` in the folder of one table; leftovers of a merge hang on the part that
  holds them.

  Args:
    folder: the table's folder; it may be missing.
    run: run id; None takes the parts of every run.

  Raises:
    PermissionError: the folder can't be listed.
  """
  parts: list[PartFile] = []
  temporary = foreign = unknown = 0
  others: list[str] = []
  try:
    names = sorted(os.listdir(folder))
  except (FileNotFoundError, NotADirectoryError):
    names = []
  for name in names:
    match = schema.PART_PATTERN.match(name)
    if is_temporary(name):
      temporary += 1
    elif not match or int(match["first"]) > int(match["last"]):
      unknown += 1
      others.append(name)
    elif run is not None and match["run"] != run:
      foreign += 1
    else:
      parts.append(PartFile(folder / name, match["run"], int(match["process"]), int(match["first"]),
                            int(match["last"])))
  return Folder(outermost(parts), temporary, foreign, unknown, tuple(others[:3]))


def is_temporary(name: str) -> bool:
  """Whether a file of this name is still being written, or was left by a writer that was killed."""
  return name.startswith(".") or name.endswith((".tmp", "~"))


def others_left_out(table: str, names: Sequence[str], number: int) -> str:
  """Says that some files of a table's folder are none of its parts: `number` of them, of which
  `names` are named."""
  more = f" and {number - len(names)} more" if number > len(names) else ""
  return (f"{number:,} file{'s' if number > 1 else ''} in '{table}' left out "
          f"({', '.join(names)}{more}): not named as parts of a recorded run are, such as "
          "run-p00000.000000-000000.parquet.")


def outermost(parts: Iterable[PartFile]) -> list[PartFile]:
  """Puts parts in their order; those whose range lies inside another's hang on that one."""
  nested: list[PartFile] = []
  for part in sorted(parts, key=lambda p: (p.run, p.process, p.first, -p.last)):
    outer = nested[-1] if nested else None
    if outer and (outer.run, outer.process) == (part.run, part.process) and part.last <= outer.last:
      nested[-1] = outer._replace(inside=(*outer.inside, part))
    else:
      nested.append(part)
  return nested
