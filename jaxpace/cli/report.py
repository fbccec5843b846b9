"""`jaxpace report`: arguments, and the way from a run directory to terminal and JSON."""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING

from jaxpace.cli import running
from jaxpace.core.words import write_plain
from jaxpace.files import UserError
from jaxpace.show.console import check_target, make_console, write_file

if TYPE_CHECKING:
  from jaxpace.costs.fabric_file import MeasuredFabric
  from jaxpace.diagnose.diagnosis import Diagnosis
  from jaxpace.diagnose.hang import Hang
  from jaxpace.diagnose.links import ProbedLinks
  from jaxpace.runs.run import Run

EPILOG = """\
A run is the directory that a Recorder wrote to. It can be reported on while the job still runs.

examples:
  jaxpace report runs/demo
  jaxpace report runs/demo --html report.html
  jaxpace report runs/demo --json report.json
  jaxpace report runs/demo --steps 1000:2000 --ranks all
  jaxpace report runs/demo --without rank:3,host:b --without jitter
  jaxpace report runs/demo --forecast 128,512,2048 --floor bench.json
  jaxpace report runs/demo --steps 1000:1200 --chrome demo.json
"""
LESS = "report on a window of it with --steps A:B"
_MOST_ROWS = 1 << 20
"""Steps of all ranks together of another loop that a report looks at: the report of a large run
takes little longer for it."""
_COUNT = running.number("the number of ranks", 1, (1 << 24) - 1)


def add_arguments(parser: argparse.ArgumentParser) -> None:
  """Adds the arguments of `jaxpace report`."""
  parser.add_argument("run", metavar="RUN", help="run directory")
  running.add_json(parser, "the report")
  parser.add_argument("--html", metavar="FILE",
                      help="also write the report as one page that needs no network, for a "
                           "browser; with charts")
  parser.add_argument("--series", action="store_true",
                      help="also put into the JSON, as 'series', what the page's charts show: some "
                           "MB at most")
  parser.add_argument("--steps", type=running.window, metavar="A:B", default=(None, None),
                      help="only steps A to B - 1; either may be left out (default: all)")
  parser.add_argument("--ranks", type=running.ranks, metavar="N", default=10,
                      help="rows of the table of ranks, latest first, or 'all' (default: 10)")
  parser.add_argument("--floor", metavar="FILE",
                      help="what collectives take on a quiet fabric, as `jaxpace bench --json "
                           "FILE` measured it; without it the floor is estimated from the run, and "
                           "contention is a lower bound")
  parser.add_argument("--without", metavar="WHAT", action="append", default=[],
                      help="also say how long a step would be without WHAT: rank:3, rank:4-7, "
                           "host:NAME, skew, contention, jitter, pauses, pacing or a finding's "
                           "mode, or several joined by commas; may be given several times")
  parser.add_argument("--forecast", type=running.listed(_COUNT, "128,512,2048"), metavar="N,M,...",
                      help="also say how long a step would take at these numbers of ranks, each "
                           "with the same work as now; --floor says what collectives cost there")
  parser.add_argument("--ranks-per-host", type=_COUNT, metavar="N",
                      help="ranks of one host in the forecast jobs (default: as in the run)")
  parser.add_argument("--algorithm", choices=("ring", "tree", "doubling"),
                      help="how the collectives of the forecast go, where no --floor says "
                           "(default: left open, wider intervals)")
  parser.add_argument("--chrome", metavar="FILE",
                      help="also write one merged timeline of all ranks in these steps as Chrome's "
                           "trace JSON, which https://ui.perfetto.dev opens")


def run(args: argparse.Namespace) -> running.Answer | int:
  """Runs the command."""
  # Parquet, numpy and rich are imported where they are needed: `jaxpace --help` needs none of them.
  from jaxpace.diagnose.hang import find_hang
  from jaxpace.hang.read_rings import read_flight
  from jaxpace.runs.run import RunError

  if args.series and not args.json:
    raise UserError("--series goes into the JSON: give --json FILE as well.")
  if not args.forecast and (args.ranks_per_host or args.algorithm):
    raise UserError("--ranks-per-host and --algorithm are about a forecast: give --forecast N,M "
                    "as well.")
  hang = find_hang(read_flight(args.run))
  try:
    return _report(args, hang)
  except RunError as error:
    if hang is None:
      raise
    return _hang_only(args, hang, str(error))


def _report(args: argparse.Namespace, hang: Hang | None) -> running.Answer:
  """The report. The page and the timeline that were asked for are written beside it; all targets
  are checked before the work."""
  from jaxpace.costs.fabric_file import read_fabric
  from jaxpace.diagnose.diagnose import diagnose
  from jaxpace.diagnose.diagnosis import to_json
  from jaxpace.diagnose.links import read_links
  from jaxpace.diagnose.worth import parse
  from jaxpace.hang.alarms import read_events
  from jaxpace.runs.reader import read_run
  from jaxpace.show.terminal import render, render_forecast

  for option, target in (("--html", args.html), ("--chrome", args.chrome)):
    if target is not None:
      check_target(target, only_files_for=option)
  asked = [parse(text) for text in args.without]
  fabric = read_fabric(args.floor) if args.floor else None
  counting = args.progress.counting
  recorded = read_run(args.run, window=args.steps, progress=counting("Reading"))
  links = read_links(args.run)
  in_loops = [_in_loop(args, window, fabric, links) for window in _other_loops(recorded)]
  diagnosis = diagnose(recorded, counting("Adding up"), asked=asked, fabric=fabric, links=links,
                       events=read_events(args.run, recorded.id), in_loops=in_loops)
  document = to_json(diagnosis, hang) if args.json or args.html else {}
  drawn = forecast = None
  # Both need scipy, which other reports don't wait for.
  if args.html or (args.series and args.json):
    from jaxpace.diagnose.series import series
    drawn = series(diagnosis, counting("Drawing"), fabric)
  if args.forecast:
    from jaxpace.diagnose import forecast as forecasts
    from jaxpace.diagnose.forecast_sample import take_sample
    forecast = forecasts.forecast(take_sample(diagnosis.run), args.forecast,
                                  per_host=args.ranks_per_host, fabric=fabric,
                                  algorithm=args.algorithm, progress=counting("Adding up"))
    document["forecast"] = forecasts.to_json(forecast, diagnosis.run)

  def show() -> None:
    render(diagnosis, make_console(), args.ranks, hang)
    if forecast:
      render_forecast(forecast, make_console())

  if args.html:
    from jaxpace.show.html.page import page
    write_file([page(document | {"series": drawn}).encode("utf-8")], args.html)
    write_plain(f"{args.html} written: open it in a browser.", sys.stderr)
  if args.chrome:
    write_plain(_write_timeline(diagnosis, args.chrome), sys.stderr)
  return running.Answer(show, lambda: document | ({"series": drawn} if args.series else {}))


def _other_loops(run: Run) -> list[tuple[int, int]]:
  """First and one past the last step of the other loops, of a long one the last steps, in which
  the report looks for late ranks as it does in its own."""
  from jaxpace.diagnose.limits import LISTED

  most, (begin, stop) = max(1, _MOST_ROWS // run.ranks), run.window
  return [(max(first, last + 1 - most, begin or 0), min(last + 1, stop or last + 1))
          for first, last in (loop.longest for loop in run.loops[1:LISTED + 1])]


def _in_loop(args: argparse.Namespace, window: tuple[int, int], fabric: MeasuredFabric | None,
             links: ProbedLinks | None) -> Diagnosis | None:
  """What is found in these steps; None where there is nothing to read."""
  from jaxpace.diagnose.diagnose import diagnose
  from jaxpace.runs.reader import read_run
  from jaxpace.runs.run import RunError

  try:
    recorded = read_run(args.run, window=window, progress=args.progress.counting("Reading"))
  except RunError:
    return None
  return diagnose(recorded, args.progress.counting("Adding up"), fabric=fabric, links=links)


def _hang_only(args: argparse.Namespace, hang: Hang, problem: str) -> running.Answer:
  """Reports on a job that hung before it had recorded a step."""
  from jaxpace.diagnose.diagnosis import hang_only
  from jaxpace.show.terminal import render_hang

  def show() -> None:
    render_hang(hang, make_console())
    write_plain(f"Nothing else can be reported: {problem}", sys.stderr)

  return running.Answer(show, lambda: hang_only(args.run, hang, problem))


def _write_timeline(diagnosis: Diagnosis, target: str) -> str:
  """Writes the timeline of the run, of a very large one its last steps; says what is in it."""
  from jaxpace.runs.dense import read_bounds
  from jaxpace.show.slices import encode_chrome
  from jaxpace.show.timeline import build, latest

  shown = latest(diagnosis.run)
  timeline = build(shown, read_bounds(shown), diagnosis.findings)
  write_file(encode_chrome(timeline), target)
  steps = shown.steps[shown.inside]
  left_out = "" if shown is diagnosis.run else (
      ", the last ones that a browser can show: choose others with --steps A:B")
  return (f"Timeline of {shown.ranks} ranks, steps {steps[0]} to {steps[-1]}{left_out}, in "
          f"{target}. Once aligned, exits of a collective lie {timeline.spread * 1e3:.3f} ms from "
          "their common one (median)."
          + (" Groups of ranks that never meet have no time in common: each is shown from the "
             "others' beginning on." if timeline.apart else ""))
