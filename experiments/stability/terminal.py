"""Structural stability of a run as a person reads it in a terminal."""

from __future__ import annotations

from rich import box
from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from experiments.stability.diagnosis.growth import ALPHA, Growth
from experiments.stability.diagnosis.recorded import Stability
from jaxpace.trace.problems import plural


def render_stability(stability: Stability, console: Console) -> None:
  """Prints the section that `jaxpace report --stability` adds."""
  console.print()
  console.print(Text("Structural stability", style="bold"))
  for line in _lines(stability):
    console.print(Padding(Text(line), (0, 0, 0, 2)))
  if stability.growth and stability.settled:
    console.print(Padding(_table(stability.growth, stability.settled), (0, 0, 0, 2), expand=False))
  console.print(Padding(Text(stability.decision, style="bold"), (0, 0, 0, 2)))
  for sentence in stability.silent:
    console.print(Padding(Text(sentence, style="dim"), (0, 0, 0, 2)))


def _lines(stability: Stability) -> list[str]:
  lines = []
  if stability.growth and stability.settled:
    verdict = ("it rises, steps are not independent" if stability.growth.rises
               else "no rise is shown")
    lines.append(f"Variance of sums over K steps, over that of independent ones: {verdict} (p = "
                 f"{stability.growth.p:.3g}, drift taken out {stability.settled.p:.3g}; threshold "
                 f"{ALPHA:g}).")
    if stability.growth.block > 1:
      lines.append(
          f"Steps were added up by {stability.growth.block} first: what lasts less is not "
          "seen here.")
  if stability.drift:
    own = stability.drift
    lines.append(f"Drift over the run: {100 * own.change:+.2f} % [{100 * own.low:+.2f}, "
                 f"{100 * own.high:+.2f}] of the step, {'shown' if own.drifts else 'not shown'} (p "
                 f"= {own.p:.3g}).")
  again = "" if not stability.reruns else (f"; {100 * stability.reruns:.2f} % of the rank-steps "
                                           "recorded were run again")
  lines.append(f"{plural(stability.restarts, 'restart').capitalize()} in the record{again}.")
  return lines


def _table(growth: Growth, settled: Growth) -> Table:
  table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False, header_style="dim")
  for header in ("K, steps", "ratio", "95 % band", "drift taken out"):
    table.add_column(header, justify="right", no_wrap=True)
  for width, ratio, low, high, other in zip(growth.windows, growth.ratio, growth.low, growth.high,
                                            settled.ratio, strict=True):
    table.add_row(f"{width:,}", f"{ratio:.2f}", f"{low:.2f} to {high:.2f}", f"{other:.2f}")
  return table
