"""The processes of a run: what each says of itself."""

from __future__ import annotations

import pathlib
import re
from collections.abc import Iterator
from typing import Any

from jaxpace.files.documents import read_document
from jaxpace.files.reading import UnreadableError
from jaxpace.files.schemas import ProcessFile
from jaxpace.trace.problems import why_unreadable

FOLDER = "process"
_NAME = re.compile(r"^p?([0-9]{1,8})$")


def read_processes(directory: pathlib.Path, run: str | None, problems: list[str], *,
                   denied: bool = False) -> Iterator[tuple[int, dict[str, Any]]]:
  """Reads `process/*.json` of a run.

  Args:
    directory: run directory.
    run: id of the run; files of other runs are left out. None takes all.
    problems: gets a sentence for each file that is left out, or parts of it.
    denied: whether a file that may not be read is an error, not a problem.

  Yields:
    Index of a process, and its file's values.

  Raises:
    PermissionError: with `denied`, a file may not be read.
  """
  folder = directory / FOLDER
  for file in sorted(folder.glob("*.json")) if folder.is_dir() else []:
    try:
      document = read_document(file, ProcessFile)
    except (OSError, UnreadableError) as error:
      if denied and isinstance(error, PermissionError):
        raise
      problems.append(f"process/{file.name} {why_unreadable(error)}: its host name is unknown.")
      continue
    problems.extend(f"process/{file.name}: {sentence}." for sentence in document.left_out)
    info = document.value
    named = _NAME.match(file.stem)
    number = info.get("process", int(named[1]) if named else None)
    if number is None:
      problems.append(f"process/{file.name} does not say which process it is of: left out.")
    elif run is not None and info.get("run", run) != run:
      problems.append(f"process/{file.name} belongs to another run: left out.")
    else:
      yield number, info
