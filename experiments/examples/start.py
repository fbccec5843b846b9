"""What the example programs share: joining the job, and a sentence instead of a traceback for a
user's slip."""

from __future__ import annotations

import logging
import pathlib
import sys
from collections.abc import Callable

import jaxpace


class UserError(ValueError):
  """A slip in the flags; the message names it and the fix."""


def run(train: Callable[[], object]) -> None:
  """Joins this process to its job, however it was started, and trains.

  Args:
    train: what to run.

  Raises:
    SystemExit: with status 2 and a sentence, if `train` raises `UserError`.
  """
  # absl's default, INFO, tells how the coordinator starts
  logging.getLogger("jax").setLevel(logging.WARNING)
  try:
    jaxpace.distributed.initialize()
    train()
  except UserError as error:
    print(f"{pathlib.Path(sys.argv[0]).name}: {error}", file=sys.stderr)
    sys.exit(2)
