"""`jaxpace report`: arguments, and the way from a run directory to terminal and JSON."""

from __future__ import annotations

import argparse
import os
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
  from jaxpace.diagnosis.diagnosis import Diagnosis

EPILOG = """\
A run is the directory that a Recorder wrote to. It can be reported on while the job still runs.

examples:
  jaxpace report runs/demo
  jaxpace report runs/demo --json report.json
  jaxpace report runs/demo --steps 1000:2000 --ranks all
"""
_PIPED_WIDTH = 100


def add_arguments(parser: argparse.ArgumentParser) -> None:
  """Adds the arguments of `jaxpace report`."""
  parser.description = "Says where the step time of a recorded run goes, who is late, and what fixing it is worth."
  parser.epilog = EPILOG
  parser.formatter_class = argparse.RawDescriptionHelpFormatter
  parser.add_argument("run", metavar="RUN", help="run directory")
  parser.add_argument("--json", metavar="FILE",
                      help="also write the report as JSON; '-' writes it to standard output and nothing else")
  parser.add_argument("--steps", type=_window, metavar="A:B", default=(None, None),
                      help="only steps A to B - 1; either may be left out (default: all)")
  parser.add_argument("--ranks", type=_ranks, metavar="N", default=10,
                      help="rows of the table of ranks, latest first, or 'all' (default: 10)")


def run(args: argparse.Namespace) -> int:
  """Runs the command.

  Returns:
    Exit status: 0, or 2 where there is nothing to report on or the JSON file can't be written.
  """
  # Parquet, numpy and rich are imported here: `jaxpace --help` needs none of them.
  from jaxpace.diagnosis.diagnose import diagnose
  from jaxpace.diagnosis.document import to_json
  from jaxpace.reporting.json_file import UnwritableError, check_target, write_document
  from jaxpace.reporting.progress import Progress
  from jaxpace.trace.reader import read_run
  from jaxpace.trace.run import RunError

  progress = Progress()
  try:
    if args.json:
      check_target(args.json)
    recorded = read_run(args.run, window=args.steps, progress=progress.reading)
    diagnosis = diagnose(recorded, progress.adding_up)
  except (RunError, UnwritableError) as error:
    progress.clear()
    return _fail(str(error))
  except MemoryError:
    progress.clear()
    return _fail(f"{args.run} needs more memory than there is: report on a window of it with --steps A:B.")
  progress.clear()
  try:
    if args.json != "-":
      _print(diagnosis, args.ranks)
    if args.json:
      write_document(to_json(diagnosis), args.json)
    sys.stdout.flush()
  except BrokenPipeError:
    _give_up_output()  # the reader of a pipe (`| head`) has seen enough
    return 0
  except UnwritableError as error:
    return _fail(str(error))
  except OSError as error:
    _give_up_output()
    return _fail(f"standard output can't be written: {error.strerror or error}.")
  return 0


def _give_up_output() -> None:
  """Sends what is left of the output nowhere: Python would complain again of it while it shuts down."""
  os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _print(diagnosis: Diagnosis, ranks: int | None) -> None:
  from rich.console import Console

  from jaxpace.reporting.terminal import render

  options: dict[str, Any] = {}
  if not sys.stdout.isatty() and not os.environ.get("COLUMNS"):
    options["width"] = _PIPED_WIDTH
  console = Console(highlight=False, soft_wrap=False, **options)
  if console.width > 120:
    console.width = 120
  render(diagnosis, console, ranks)


def _fail(sentence: str) -> int:
  print(f"jaxpace report: {sentence}", file=sys.stderr)
  return 2


def _window(text: str) -> tuple[int | None, int | None]:
  """Parses "A:B".

  >>> _window("100:200"), _window(":50")
  ((100, 200), (None, 50))
  """
  begin, colon, end = text.partition(":")
  try:
    window = (int(begin) if begin else None, int(end) if end else None)
  except ValueError:
    window = None
  if not colon or window is None:
    raise argparse.ArgumentTypeError(f"{text!r} is no range of steps: write A:B, such as 100:200, 100: or :200")
  first, stop = window
  if (first is not None and first < 0) or (stop is not None and stop < 0):
    raise argparse.ArgumentTypeError(f"{text!r} has a negative step")
  if first is not None and stop is not None and stop <= first:
    raise argparse.ArgumentTypeError(f"{text!r} is empty: B is one past the last step, so it must be above A")
  return window


def _ranks(text: str) -> int | None:
  if text == "all":
    return None
  try:
    number = int(text)
  except ValueError:
    number = 0
  if number < 1:
    raise argparse.ArgumentTypeError(f"{text!r} is no number of ranks: give 1 or more, or 'all'")
  return number
