"""What one recorded run shows of structural stability: how its variance grows, drift, re-runs.

    python -m experiments.stability.report runs/demo [--json FILE] [--steps A:B]
"""

from __future__ import annotations

import argparse
import sys

from experiments.stability.diagnosis import recorded as stability
from experiments.stability.terminal import render_stability
from jaxpace.cli import arguments
from jaxpace.diagnosis.diagnose import diagnose
from jaxpace.reporting.console import make_console
from jaxpace.reporting.json_file import UnwritableError, check_target, deliver
from jaxpace.trace.reader import read_run
from jaxpace.trace.run import RunError


def add_arguments(parser: argparse.ArgumentParser) -> None:
  """Adds the program's arguments."""
  parser.add_argument("run", metavar="RUN", help="run directory")
  parser.add_argument("--steps", type=arguments.window, metavar="A:B", default=(None, None),
                      help="only steps A to B - 1; either may be left out (default: all)")
  parser.add_argument("--json", metavar="FILE",
                      help="also write what was found as JSON; '-' writes it to standard output "
                           "and nothing else")


def main(argv: list[str] | None = None) -> int:
  """Runs the program.

  Returns:
    Exit status: 0, or 2 where there is nothing to say anything about or the JSON file can't be
    written.
  """
  parser = argparse.ArgumentParser(prog="python -m experiments.stability.report",
                                   description=__doc__,
                                   formatter_class=argparse.RawDescriptionHelpFormatter)
  add_arguments(parser)
  args = parser.parse_args(argv)
  try:
    if args.json:
      check_target(args.json)
    found = stability.recorded(diagnose(read_run(args.run, window=args.steps)))
    wrong = deliver(lambda: render_stability(found, make_console()),
                    lambda: stability.to_json(found), args.json)
  except (RunError, UnwritableError) as error:
    wrong = str(error)
  if wrong:
    print(f"experiments.stability.report: {wrong}", file=sys.stderr)
  return 2 if wrong else 0


if __name__ == "__main__":
  sys.exit(main())
