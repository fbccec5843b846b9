"""`jaxpace forecast`: step time at other numbers of ranks, from one recorded run."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from jaxpace.reporting.refusal import refuse

if TYPE_CHECKING:
  from rich.console import Console

  from jaxpace.diagnosis.forecast.forecast import Forecast
  from jaxpace.trace.run import Run

EPILOG = """\
Each rank is taken to do the same work as now (weak scaling). Where the run is too short for so many ranks, or a part
of the fabric begins that was not measured, there is no forecast, and the reason is given.

examples:
  jaxpace forecast runs/demo --ranks 128,512,2048
  jaxpace forecast runs/demo --ranks 128,512 --fabric bench.json --json forecast.json
  jaxpace forecast runs/demo --ranks 32,64 --ranks-per-host 64
"""  # noqa: E501


def add_arguments(parser: argparse.ArgumentParser) -> None:
  """Adds the arguments of `jaxpace forecast`."""
  from jaxpace.cli import arguments
  parser.description = ("Says how long a step would take at other numbers of ranks, with 90 % "
                        "intervals.")
  parser.epilog = EPILOG
  parser.formatter_class = argparse.RawDescriptionHelpFormatter
  parser.add_argument("run", metavar="RUN",
                      help="run directory, of 2 ranks or more and 100 steps; better 8 and 2,000")
  parser.add_argument("--ranks", type=_sizes, metavar="N,M,...", required=True,
                      help="numbers of ranks to forecast")
  parser.add_argument("--fabric", metavar="FILE",
                      help="what collectives cost: a file of `jaxpace bench --json`, or a "
                           "description (docs/forecast.md)")
  parser.add_argument("--ranks-per-host", type=_count, metavar="N",
                      help="ranks of one host in the forecast jobs (default: as in the run)")
  parser.add_argument("--algorithm", choices=("ring", "tree", "doubling"),
                      help="how the collectives go, where no --fabric says (default: left open, "
                           "wider intervals)")
  parser.add_argument("--steps", type=arguments.window, metavar="A:B", default=(None, None),
                      help="only steps A to B - 1 (default: all)")
  parser.add_argument("--json", metavar="FILE",
                      help="also write the forecast as JSON; '-' writes it to standard output and "
                           "nothing else")


def run(args: argparse.Namespace) -> int:
  """Runs the command.

  Returns:
    Exit status: 0, also where some numbers of ranks can't be told; 2 where there is nothing to
    forecast from or the JSON file can't be written.
  """
  # numpy, scipy, Parquet and rich are imported here: `jaxpace --help` needs none of them.
  from jaxpace.costs.fabric_file import read_fabric
  from jaxpace.diagnosis.forecast.forecast import forecast
  from jaxpace.diagnosis.forecast.forecast_json import to_json
  from jaxpace.diagnosis.forecast.sample import take_sample
  from jaxpace.reporting.console import make_console
  from jaxpace.reporting.json_file import UnwritableError, check_target, deliver
  from jaxpace.reporting.progress import Progress
  from jaxpace.trace.reader import read_run
  from jaxpace.trace.run import RunError

  progress = Progress()
  try:
    if args.json:
      check_target(args.json)
    fabric = read_fabric(args.fabric) if args.fabric else None
    recorded = read_run(args.run, window=args.steps, progress=progress.reading)
    found = forecast(take_sample(recorded), args.ranks, per_host=args.ranks_per_host, fabric=fabric,
                     algorithm=args.algorithm, progress=progress.adding_up)
  except (RunError, UnwritableError) as error:
    progress.clear()
    return refuse("forecast", str(error))
  except MemoryError:
    progress.clear()
    return refuse("forecast",
                  f"{args.run} needs more memory than there is: forecast from a window of it with "
                  "--steps A:B.")
  progress.clear()
  wrong = deliver(lambda: _render(found, recorded, make_console()),
                  lambda: to_json(found, recorded), args.json)
  return refuse("forecast", wrong) if wrong else 0


def _render(found: Forecast, run: Run, console: Console) -> None:
  from rich import box
  from rich.table import Table
  from rich.text import Text

  from jaxpace.diagnosis.findings import milliseconds
  from jaxpace.diagnosis.wording import joined
  sample = found.sample
  console.print(
      Text(
          f"{run.path}  run {run.id}: {sample.ranks} ranks, {sample.steps:,} steps with every "
          "rank known"))
  console.print()
  table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False, header_style="dim")
  for header in ("ranks", "step", "90 % interval", "change", "variation", "efficiency", "waiting",
                 "transfer"):
    table.add_column(header, justify="right", no_wrap=True)
  waiting = found.recorded * (1 - found.efficiency) - float(sample.transfer.sum(axis=0).mean())
  table.add_row(f"{sample.ranks}", milliseconds(found.recorded), "as recorded", "",
                f"{100 * found.recorded_cv:.1f} %", f"{100 * found.efficiency:.1f} %",
                milliseconds(max(waiting, 0.0)),
                milliseconds(float(sample.transfer.sum(axis=0).mean())), style="dim")
  for point in found.points:
    if point.silent is not None:
      table.add_row(f"{point.ranks:,}", "unknown", "why: below", style="yellow")
      continue
    assert point.step_time and point.cv and point.efficiency and point.change
    assert point.waiting is not None and point.transfer is not None
    step = point.step_time
    table.add_row(f"{point.ranks:,}", milliseconds(step.estimate),
                  f"{milliseconds(step.low)[:-3]} to {milliseconds(step.high)}",
                  f"{100 * point.change.estimate:+.1f} %", f"{100 * point.cv.estimate:.1f} %",
                  f"{100 * point.efficiency.estimate:.1f} %",
                  milliseconds(point.waiting), milliseconds(point.transfer))
  console.print(table)
  console.print(Text("efficiency: share of the step that a rank works on average; variation: "
                     "standard deviation of a step over its mean.", style="dim"))
  silent: dict[str, list[str]] = {}
  for point in found.points:
    if point.silent is not None:
      silent.setdefault(point.silent, []).append(f"{point.ranks:,}")
  sentences = [f"{joined(ranks)} ranks can't be forecast. {why}" for why, ranks in silent.items()]
  sentences += [*found.notes, *run.problems]
  if sentences:
    console.print()
  for sentence in sentences:
    console.print(Text(f"- {sentence}"), soft_wrap=False)


def _sizes(text: str) -> list[int]:
  """Parses numbers of ranks.

  >>> _sizes("128,512")
  [128, 512]
  """
  try:
    return list(dict.fromkeys(_count(part) for part in text.split(",")))
  except argparse.ArgumentTypeError:
    raise argparse.ArgumentTypeError(
        f"{text!r} are no numbers of ranks: write them like 128,512,2048") from None


def _count(text: str) -> int:
  if not text.strip().isdecimal() or not 0 < int(text) < 1 << 24:
    raise argparse.ArgumentTypeError(f"{text!r} is no number of ranks: give 1 or more")
  return int(text)
