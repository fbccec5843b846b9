"""Writes the files that a command's user names, the JSON report above all: whole or not at all."""

from __future__ import annotations

import errno
import json
import pathlib
import sys
from collections.abc import Iterable
from typing import Any

from jaxpace.files import UserError
from jaxpace.files.folders import Folder, is_special, writing_named


class UnwritableError(UserError):
  """The file can't be written; the message is a sentence that says why."""


def check_target(target: str, only_files_for: str = "") -> None:
  """Finds out, before the work is done, whether a document can be written there.

  Args:
    target: the file, or "-" for standard output.
    only_files_for: option that takes no "-"; empty where it may be one.

  Raises:
    UnwritableError: it can't.
  """
  path = pathlib.Path(target)
  if target == "-" and only_files_for:
    raise UnwritableError(f"{only_files_for} takes the name of a file, not '-'.")
  if target == "-" or is_special(path):
    return
  if path.is_dir():
    raise UnwritableError(
        f"{path} is a directory: give the name of a file in it, such as {path / 'report.json'}.")
  if not path.parent.is_dir():
    reason = "is a file" if path.parent.exists() else "does not exist"
    raise UnwritableError(f"{path} can't be written: the directory {path.parent} {reason}.")
  try:
    real = path.resolve()
    Folder(real.parent).try_out(real.name)
  except OSError as error:
    raise UnwritableError(_refused(path, error)) from error


def write_document(document: dict[str, Any], target: str) -> None:
  """Writes the document to a file, or to standard output for "-".

  Raises:
    UnwritableError: the file can't be written.
    OSError: standard output can't be.
    ValueError: the document holds a NaN or infinity.
  """
  text = json.dumps(document, indent=1, allow_nan=False) + "\n"
  if target == "-":
    sys.stdout.write(text)
    return
  write_file([text.encode("utf-8")], target)


def write_file(pieces: Iterable[bytes], target: str) -> None:
  """Writes what a command made to the file that its user names.

  A reader of the file sees the old one or the new one, never half of one.

  Raises:
    UnwritableError: the file can't be written.
  """
  check_target(target)
  try:
    with writing_named(target) as file:
      file.writelines(pieces)
  except OSError as error:
    raise UnwritableError(_refused(pathlib.Path(target), error)) from error


def _refused(path: pathlib.Path, error: OSError) -> str:
  if error.errno == errno.ENOENT:  # the directory is there: what it lacks is the wish
    return f"{path} can't be written: no file can be made in {path.parent}."
  return f"{path} can't be written: {error.strerror or error}."
