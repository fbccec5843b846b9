"""Writes the page: as a whole or not at all."""

from __future__ import annotations

import pathlib
from typing import Any

from jaxpace.files import atomic_write
from jaxpace.reporting.html.page import page
from jaxpace.reporting.json_file import UnwritableError, check_target


def check(target: str | None) -> None:
  """Finds out, before the work is done, whether the page can be written; None is no page.

  Raises:
    UnwritableError: it can't.
  """
  if target is None:
    return
  if target == "-":
    raise UnwritableError("--html takes the name of a file, such as report.html, not '-'.")
  check_target(target)


def write(document: dict[str, Any], target: str) -> None:
  """Writes the page of a report to a file.

  Args:
    document: the JSON report with its section `series`.
    target: the file to make or replace.

  Raises:
    UnwritableError: it can't be written.
  """
  made = page(document)
  check_target(target)
  path = pathlib.Path(target)
  try:
    if path.exists() and not path.is_file():  # a pipe or device can't be renamed over
      path.write_text(made, encoding="utf-8")
    else:
      atomic_write.write_text(atomic_write.followed(path), made)
  except OSError as error:
    raise UnwritableError(f"{path} can't be written: {error.strerror or error}.") from error
