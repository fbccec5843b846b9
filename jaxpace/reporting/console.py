"""The terminal that commands print to."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
  from rich.console import Console

_PIPED_WIDTH, _WIDEST = 100, 120


def make_console() -> Console:
  """Makes a console on standard output, of a width that reads well also in a pipe."""
  from rich.console import Console  # not at the top: `jaxpace --help` needs no rich

  options: dict[str, Any] = {}
  if not sys.stdout.isatty() and not os.environ.get("COLUMNS"):
    options["width"] = _PIPED_WIDTH
  console = Console(highlight=False, **options)
  if console.width > _WIDEST:
    console.width = _WIDEST
  return console
