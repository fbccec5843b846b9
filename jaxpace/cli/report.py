"""`jaxpace report`: arguments, and the way from a run directory to terminal and JSON."""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING, Any

from jaxpace.cli import arguments
from jaxpace.reporting.refusal import give_up_output, refuse

if TYPE_CHECKING:
  from jaxpace.diagnosis.diagnosis import Diagnosis
  from jaxpace.diagnosis.hang import Hang
  from jaxpace.reporting.progress import Progress

EPILOG = """\
A run is the directory that a Recorder wrote to. It can be reported on while the job still runs.

examples:
  jaxpace report runs/demo
  jaxpace report runs/demo --html report.html
  jaxpace report runs/demo --json report.json
  jaxpace report runs/demo --steps 1000:2000 --ranks all
  jaxpace report runs/demo --without rank:3,host:b --without jitter
  jaxpace report runs/demo --steps 1000:1200 --perfetto demo.pftrace
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
  """Adds the arguments of `jaxpace report`."""
  parser.description = ("Says where the step time of a recorded run goes, who is late, and what "
                        "fixing it is worth.")
  parser.epilog = EPILOG
  parser.formatter_class = argparse.RawDescriptionHelpFormatter
  parser.add_argument("run", metavar="RUN", help="run directory")
  parser.add_argument("--json", metavar="FILE",
                      help="also write the report as JSON; '-' writes it to standard output and "
                           "nothing else")
  parser.add_argument("--html", metavar="FILE",
                      help="also write the report as one page that needs no network, for a "
                           "browser; with charts")
  parser.add_argument("--series", action="store_true",
                      help="also put into the JSON, as 'series', what the page's charts show: some "
                           "MB at most")
  parser.add_argument("--steps", type=arguments.window, metavar="A:B", default=(None, None),
                      help="only steps A to B - 1; either may be left out (default: all)")
  parser.add_argument("--ranks", type=arguments.ranks, metavar="N", default=10,
                      help="rows of the table of ranks, latest first, or 'all' (default: 10)")
  parser.add_argument("--floor", metavar="FILE",
                      help="what collectives take on a quiet fabric, as `jaxpace bench --json "
                           "FILE` measured it; without it the floor is estimated from the run, and "
                           "contention is a lower bound")
  parser.add_argument("--without", metavar="WHAT", action="append", default=[],
                      help="also say how long a step would be without WHAT: rank:3, rank:4-7, "
                           "host:NAME, skew, contention, jitter, pauses, pacing or a finding's "
                           "mode, or several joined by commas; may be given several times")
  parser.add_argument("--perfetto", metavar="FILE",
                      help="also write one merged timeline of all ranks in these steps, for "
                           "https://ui.perfetto.dev")
  parser.add_argument("--chrome", metavar="FILE", help="the same timeline as Chrome's trace JSON")


def run(args: argparse.Namespace) -> int:
  """Runs the command.

  Returns:
    Exit status: 0, or 2 where there is nothing to report on or a file can't be written.
  """
  # Parquet, numpy and rich are imported where they are needed: `jaxpace --help` needs none of them.
  from jaxpace.diagnosis.hang import find_hang
  from jaxpace.diagnosis.what_if_request import WhatError
  from jaxpace.reporting.json_file import UnwritableError
  from jaxpace.reporting.progress import Progress
  from jaxpace.trace.flight.read import read_flight
  from jaxpace.trace.run import RunError

  progress = Progress()
  hang = None
  try:
    hang = find_hang(read_flight(args.run))
    diagnosis, drawn = _diagnosed(args, progress)
  except (RunError, UnwritableError, WhatError) as error:
    progress.clear()
    if hang is not None and isinstance(error, RunError):
      return _hang_only(args, hang, str(error))
    return refuse("report", str(error))
  except MemoryError:
    progress.clear()
    return refuse("report",
                  f"{args.run} needs more memory than there is: report on a window of it with "
                  "--steps A:B.")
  progress.clear()
  try:
    _deliver(args, diagnosis, drawn, hang)
  except BrokenPipeError:
    give_up_output()  # the reader of a pipe (`| head`) has seen enough
    return 0
  except UnwritableError as error:
    return refuse("report", str(error))
  except OSError as error:
    give_up_output()
    return refuse("report", f"standard output can't be written: {error.strerror or error}.")
  return 0


def _diagnosed(args: argparse.Namespace,
               progress: Progress) -> tuple[Diagnosis, dict[str, Any] | None]:
  """The diagnosis, and what charts show of the run, where they are wanted. All targets are checked
  before the work."""
  from jaxpace.costs.fabric_file import read_fabric
  from jaxpace.diagnosis.diagnose import diagnose
  from jaxpace.diagnosis.what_if_request import parse
  from jaxpace.live.probe.links import read_links
  from jaxpace.live.watchdog.events import read_events
  from jaxpace.reporting.json_file import check_target
  from jaxpace.trace.reader import read_run

  if args.json:
    check_target(args.json)
  # Charts and timelines are imported for those who ask for them.
  if args.html is not None:
    from jaxpace.reporting.html import write as html

    html.check(args.html)
  if args.perfetto is not None or args.chrome is not None:
    from jaxpace.reporting.timeline import write as timeline

    timeline.check(args.perfetto, args.chrome)
  asked = [parse(text) for text in args.without]
  fabric = read_fabric(args.floor) if args.floor else None
  recorded = read_run(args.run, window=args.steps, progress=progress.reading)
  diagnosis = diagnose(recorded, progress.adding_up, asked=asked, fabric=fabric,
                       links=read_links(args.run), events=read_events(args.run, recorded.id))
  if not (args.html or (args.series and args.json)):
    return diagnosis, None
  # forecasts need scipy, which other reports don't wait for
  from jaxpace.diagnosis.series.series_json import series

  return diagnosis, series(diagnosis, progress.drawing, fabric)


def _hang_only(args: argparse.Namespace, hang: Hang, problem: str) -> int:
  """Reports on a job that hung before it had recorded a step."""
  from jaxpace.diagnosis.report_json import hang_only
  from jaxpace.reporting.console import make_console
  from jaxpace.reporting.json_file import deliver
  from jaxpace.reporting.terminal import render_hang
  from jaxpace.trace.plain_text import write_plain

  try:
    why = deliver(lambda: render_hang(hang, make_console()),
                  lambda: hang_only(args.run, hang, problem), args.json)
  except BrokenPipeError:
    give_up_output()
    return 0
  if why:
    return refuse("report", why)
  write_plain(f"Nothing else can be reported: {problem}", sys.stderr)
  return 0


def _deliver(args: argparse.Namespace, diagnosis: Diagnosis, drawn: dict[str, Any] | None,
             hang: Hang | None) -> None:
  """Prints the report, and writes what was asked for."""
  from jaxpace.diagnosis.report_json import to_json
  from jaxpace.reporting.console import make_console
  from jaxpace.reporting.json_file import write_document
  from jaxpace.reporting.terminal import render
  from jaxpace.trace.plain_text import write_plain

  document = to_json(diagnosis, hang) if args.json or args.html else {}
  if args.json != "-":
    render(diagnosis, make_console(), args.ranks, hang)
  if args.html:
    from jaxpace.reporting.html import write as html

    html.write(document | {"series": drawn}, args.html)
    write_plain(f"{args.html} written: open it in a browser.", sys.stderr)
  if args.json:
    write_document(document | ({"series": drawn} if args.series else {}), args.json)
  if args.perfetto or args.chrome:
    from jaxpace.reporting.timeline import write as timeline

    write_plain(timeline.write(diagnosis.run, diagnosis.findings, args.perfetto, args.chrome),
                sys.stderr)
  sys.stdout.flush()
