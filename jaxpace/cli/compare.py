"""`jaxpace compare`: what changed between two recorded runs."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from jaxpace.cli import running
from jaxpace.show.console import make_console, make_table

if TYPE_CHECKING:
  from rich.console import Console

  from jaxpace.diagnose.compare import Comparison

EPILOG = """\
exit status: 0, or 1 where --fail-above is given and B's mean step is longer than A's by more than that, and longer
with 97.5 % confidence; 2 where the runs can't be compared.

examples:
  jaxpace compare runs/before runs/after
  jaxpace compare runs/main runs/branch --fail-above 3% --json compare.json
  jaxpace compare runs/demo runs/demo --steps-a :1000 --steps-b 1000:
"""  # noqa: E501
LESS = "compare windows with --steps-a and --steps-b"


def add_arguments(parser: argparse.ArgumentParser) -> None:
  """Adds the arguments of `jaxpace compare`."""
  parser.add_argument("a", metavar="RUN_A", help="run directory that counts as normal")
  parser.add_argument("b", metavar="RUN_B", help="run directory to compare with it")
  parser.add_argument("--fail-above", type=_share, metavar="P%",
                      help="exit with status 1 where B is slower by more than this, such as 3%% "
                           "or 0.03")
  running.add_json(parser, "the comparison")
  for letter in "ab":
    parser.add_argument(f"--steps-{letter}", type=running.window, metavar="A:B",
                        default=(None, None),
                        help=f"only these steps of RUN_{letter.upper()} (default: all)")
  parser.add_argument("--ranks", type=running.ranks, metavar="N", default=10,
                      help="rows of the table of ranks, or 'all' (default: 10)")


def run(args: argparse.Namespace) -> running.Answer:
  """Runs the command; the status is as the epilog of its help says."""
  # numpy, scipy, Parquet and rich are imported here: `jaxpace --help` needs none of them.
  from jaxpace.diagnose.compare import compare, to_json
  from jaxpace.diagnose.diagnose import diagnose
  from jaxpace.diagnose.links import read_links
  from jaxpace.hang.alarms import read_events
  from jaxpace.runs.reader import read_run

  diagnosed = []
  for path, window in ((args.a, args.steps_a), (args.b, args.steps_b)):
    recorded = read_run(path, window=window, progress=args.progress.counting("Reading"))
    diagnosed.append(diagnose(recorded, args.progress.counting("Adding up"), links=read_links(path),
                              events=read_events(path, recorded.id)))
  found = compare(diagnosed[0], diagnosed[1], args.fail_above)
  return running.Answer(lambda: _render(found, make_console(), args.ranks), lambda: to_json(found),
                        int(found.failed))


def _render(found: Comparison, console: Console, most: int | None) -> None:
  from rich.text import Text

  from jaxpace.core.words import plural
  from jaxpace.diagnose.words.names import milliseconds, signed

  for letter, diagnosis in (("A", found.a), ("B", found.b)):
    run = diagnosis.run
    console.print(Text(f"{letter}  {run.path}  run {run.id}: {plural(run.ranks_in_all, 'rank')}, "
                       f"{diagnosis.selected.size:,} steps counted"))
  console.print()
  console.print(Text(found.verdict, style="bold red" if found.failed else "bold"))
  console.print()
  table = make_table("", "A", "B", "change", "95 % interval", "of A's step")
  for name, c in (("step", found.step_time), *found.shares.items()):
    table.add_row(f"{name} *" if c.sure else name, milliseconds(c.a), milliseconds(c.b),
                  signed(c.difference), f"{signed(c.low)} to {signed(c.high)}",
                  f"{100 * c.difference / found.step_time.a:+.1f} %",
                  style="bold" if c.sure else "dim")
  console.print(table)
  console.print(Text("*: surely changed (the shares are tested together).", style="dim"))
  changed = found.changed_ranks
  if changed:
    console.print()
    ranks = make_table("rank", "host", "lateness A", "lateness B", "change", "95 % interval")
    for rank in changed if most is None else changed[:most]:
      c, (a, b) = found.ranks[rank], (d.run.host_of_rank(rank) for d in (found.a, found.b))
      host = b if a == b else f"{a or '?'} → {b or '?'}"
      ranks.add_row(str(rank), host, signed(c.a), signed(c.b), signed(c.difference),
                    f"{signed(c.low)} to {signed(c.high)}")
    console.print(ranks)
    console.print(
        Text(
            "Ranks whose arrival, against the ranks that changed as usual, surely changed by 1 % "
            "of the step"
            + (f": {most} of {len(changed)}." if most is not None and len(changed) > most else "."),
            style="dim"))
  elif found.ranks:
    console.print(Text("No rank's lateness surely changed by 1 % of the step.", style="dim"))
  sentences = [f"New in B: {mode.replace('_', ' ')}." for mode in found.new]
  sentences += [f"No longer in B: {mode.replace('_', ' ')}." for mode in found.gone]
  sentences += [*found.inconclusive, *found.notes]
  sentences += [f"{letter}: {p}" for letter, d in (("A", found.a), ("B", found.b))
                for p in d.run.problems]
  console.print()
  for sentence in sentences:
    console.print(Text(f"- {sentence}"))


def _share(text: str) -> float:
  """Parses a share.

  >>> _share("3%"), _share("0.5 %"), _share("0.03")
  (0.03, 0.005, 0.03)
  """
  number, percent, rest = text.strip().partition("%")
  try:
    value = float(number) / (100 if percent else 1)
  except ValueError:
    value = -1.0
  if rest.strip() or not 0 <= value < (10 if percent else 1):
    raise argparse.ArgumentTypeError(f"{text!r} is not a share of the step time: write 3% or 0.03")
  return value
