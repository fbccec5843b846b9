"""`jaxpace watch`: a run in the terminal while it grows."""

from __future__ import annotations

import argparse
import pathlib
import sys

from jaxpace.cli import running
from jaxpace.files import UserError

EPILOG = """\
Reads the run directory's files and nothing else: the job is not touched, and may run anywhere that shares them. It may
be started before the job. Ctrl-C ends it. In a pipe it prints a line a refresh.

examples:
  jaxpace watch runs/demo
  jaxpace watch runs/demo --every 5 --steps 1000
  jaxpace watch runs/demo --once
  jaxpace watch runs/demo | tee -a watch.log
"""  # noqa: E501


def add_arguments(parser: argparse.ArgumentParser) -> None:
  """Adds the arguments of `jaxpace watch`."""
  parser.add_argument("run", metavar="RUN", help="run directory; it may be missing yet")
  parser.add_argument("--every", type=running.number("seconds", 0.1, 3600, whole=False),
                      metavar="SECONDS", default=1.0,
                      help="time between two looks (default: 1)")
  parser.add_argument("--steps", type=running.number("steps", 20, 10_000), metavar="N", default=200,
                      help="newest steps that step time, shares and lateness are of (default: 200)")
  parser.add_argument("--once", action="store_true", help="print what there is now, and end")


def run(args: argparse.Namespace) -> int:
  """Runs the command.

  Returns:
    Exit status: 0 after `--once`, 2 where RUN can't be a run. Otherwise it goes on until Ctrl-C.
  """
  # Parquet, numpy and rich are imported here: `jaxpace --help` needs none of them.
  from rich.console import Console

  from jaxpace.diagnose.follower import Follower
  from jaxpace.runs.reader import check_directory, misplaced
  from jaxpace.show import watch as live

  path = pathlib.Path(args.run)
  try:
    # A directory that is missing or holds other things yet is waited for.
    if path.exists():
      wrong = misplaced(path)
    else:
      wrong = None if path.absolute().parent.is_dir() else (
          f"There is no directory {path.parent}, so no run can begin at {path}. Is the name right?")
    if wrong:
      raise UserError(wrong)
    follower = Follower(path, args.steps)
    if args.once:
      check_directory(path)
      live.once(follower)
    elif sys.stdout.isatty():
      live.on_terminal(follower, Console(highlight=False), args.every)
    else:
      live.in_lines(follower, args.every)
  except PermissionError as error:
    raise UserError(f"No permission to read {error.filename or path}. Ask its owner.") from error
  return 0
