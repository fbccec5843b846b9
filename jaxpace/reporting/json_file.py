"""Writes the JSON report: as a whole or not at all."""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import sys
from typing import Any


def write_document(document: dict[str, Any], target: str) -> None:
  """Writes the document to a file, or to standard output for "-".

  A reader of the file sees the old one or the new one, never half of one.

  Raises:
    OSError: it can't be written.
    ValueError: the document holds a NaN or infinity.
  """
  text = json.dumps(document, indent=1, allow_nan=False) + "\n"
  if target == "-":
    sys.stdout.write(text)
    return
  path = pathlib.Path(target)
  if path.is_dir():
    raise IsADirectoryError(f"{path} is a directory: give the name of a file in it, such as {path / 'report.json'}")
  if path.exists() and not path.is_file():  # a pipe or device can't be renamed over
    path.write_text(text, encoding="utf-8")
    return
  temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
  try:
    temporary.write_text(text, encoding="utf-8")
    os.replace(temporary, path)
  except BaseException:
    with contextlib.suppress(OSError):
      temporary.unlink(missing_ok=True)
    raise
