"""Writes the page: as a whole or not at all."""

from __future__ import annotations

from typing import Any

from jaxpace.reporting.html.page import page
from jaxpace.reporting.json_file import UnwritableError, check_target, write_file


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
  write_file([page(document).encode("utf-8")], target)
