"""A forecast in the terminal."""

from __future__ import annotations

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from jaxpace.diagnosis.findings import milliseconds
from jaxpace.diagnosis.forecast.forecast import Forecast
from jaxpace.diagnosis.wording import joined


def render_forecast(found: Forecast, console: Console) -> None:
  """Prints a row for each number of ranks, then why some can't be forecast, and notes."""
  sample = found.sample
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
  sentences += [*found.notes]
  if sentences:
    console.print()
  for sentence in sentences:
    console.print(Text(f"- {sentence}"), soft_wrap=False)
