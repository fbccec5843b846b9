"""The report, and a forecast, as a person reads them in a terminal."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from jaxpace.core.words import plural
from jaxpace.diagnose.diagnosis import Diagnosis, to_json
from jaxpace.diagnose.floor import MEANING, SHARES
from jaxpace.diagnose.hang import Hang
from jaxpace.diagnose.words.codes import Verdict
from jaxpace.diagnose.words.names import joined, milliseconds, percent, signed
from jaxpace.show.console import LongName, draw_bar, make_table
from jaxpace.show.contents import answer_at, confidence, facts, latest_first, might_have_been, whom

if TYPE_CHECKING:
  from jaxpace.diagnose.forecast import Forecast

COLOUR = {"compute": "green", "skew": "red", "transfer": "blue", "contention": "magenta",
          "runtime": "yellow", "pacing": "cyan"}


_MOST_WAITS = 6


def render(diagnosis: Diagnosis, console: Console, ranks: int | None = 10,
           hang: Hang | None = None) -> None:
  """Prints the report.

  Args:
    console: where; its width, colour and encoding are respected.
    ranks: rows of the table of ranks; None for all.
    hang: what the job waits for, or waited for last.
  """
  document = to_json(diagnosis)
  console.print(_header(document))
  if hang:
    render_hang(hang, console)
  healthy = diagnosis.verdict.code == Verdict.HEALTHY
  console.print(Panel(Text(diagnosis.verdict), title="Verdict", title_align="left",
                      border_style="red" if diagnosis.findings else "green" if healthy
                      else "yellow"))
  sections: list[tuple[str, RenderableType | None]] = [
      ("Where the step goes", _shares(diagnosis, console)),
      ("Findings", _findings(document)),
      ("Who is late", _ranks(document, ranks) if diagnosis.run.ranks > 1 else None),
      ("Where the waits are", _waits(diagnosis)),
      ("Computing while sending", _overlap(diagnosis)),
      ("Phases, medians", _phases(diagnosis)),
      ("Pacing", _pacing(diagnosis)),
      ("What it would be worth", _what_if(document)),
      ("Notes", _notes(document)),
  ]
  for title, body in sections:
    if body is not None:
      console.print()
      console.print(Text(title, style="bold"))
      console.print(Padding(body, (0, 0, 0, 2), expand=False))


def render_hang(hang: Hang, console: Console) -> None:
  """Prints what a job waits for."""
  console.print(Panel(_bullets([*hang.sentences, *hang.left_out]), title=hang.title,
                      title_align="left", border_style="red"))


def _header(document: dict[str, Any]) -> Text:
  text = Text(document["path"], style="bold")
  text.append(f"  run {document['run']}\n", style="dim")
  text.append(", ".join(facts(document)))
  return text


def _shares(diagnosis: Diagnosis, console: Console) -> RenderableType | None:
  step, shares = diagnosis.step_time, diagnosis.shares
  if step is None or shares is None:
    return None
  line = Text.assemble((milliseconds(step.mean), "bold"), " per step on average; ",
                       f"median {milliseconds(step.median)}, 99th percentile "
                       f"{milliseconds(step.p99)}, variation {100 * step.cv:.1f} %")
  width = max(8, min(40, console.width - 76))
  table = _grid()
  for justify in ("left", "left", "right", "right"):
    table.add_column(justify=justify, no_wrap=True)
  table.add_column(no_wrap=False)
  data = diagnosis.for_data or 0.0
  for name in SHARES:
    share = shares[name]
    meaning = MEANING[name]
    if name == "runtime" and data >= 5e-3 * step.mean:
      meaning += f"; data {percent(data / step.mean)} of the step"
    quiet = "dim" if abs(share) < 5e-4 else ""
    table.add_row(Text(name, style=quiet),
                  Text(draw_bar(share, width, console.encoding), style=COLOUR[name]),
                  Text(milliseconds(share * step.mean), style=quiet),
                  Text(f"{100 * share:.1f} %", style=quiet), Text(meaning, style="dim"))
  return Group(line, table)


def _findings(document: dict[str, Any]) -> RenderableType | None:
  parts: list[RenderableType] = []
  for finding in document["findings"]:
    if parts:
      parts.append(Text())
    title = Text(finding["mode"].replace("_", " "), style="bold red")
    title.append(f"  {100 * finding['share']:.1f} % of the step, confidence "
                 f"{confidence(finding['confidence'])}", style="default")
    parts += [title, Text("; ".join(whom(finding)), style="bold"),
              _bullets([*finding["evidence"], finding["advice"]], last="Do:")]
  return Group(*parts) if parts else None


def _ranks(document: dict[str, Any], most: int | None) -> RenderableType | None:
  rows = document["per_rank"]
  if not document["collectives"] or document["step_time"]["mean"] is None:
    return None
  order = latest_first(rows)
  shown = order if most is None else order[:most]
  table = make_table("rank", "host", "process", "lateness", "last", "cost", "compute", "gap")
  for row in (rows[at] for at in shown):
    cells = [str(row["rank"]), row["host"] or "?",
             "?" if row["process"] is None else str(row["process"])]
    if row["steps"]:
      cells += ["?" if row["lateness"] is None else signed(row["lateness"]),
                f"{100 * row['last_share']:.0f} %", f"{100 * row['cost_share']:.1f} %",
                milliseconds(row["compute"]), milliseconds(row["runtime"])]
    else:
      cells += ["nothing recorded"]
    late = str(row["rank"]) in document["what_if"]["without_rank"]
    table.add_row(*cells, style="bold red" if late else "" if row["steps"] else "dim")
  parts: list[RenderableType] = [table]
  if len(shown) < len(order):
    parts.append(
        Text(f"{len(order) - len(shown)} more ranks, all less late: --ranks all shows them.",
             style="dim"))
  parts.append(Text("lateness: mean arrival after the typical rank; last: steps in which the job "
                    "waited for this rank; cost: share of the step the ranks waited for it; "
                    "compute, gap: means per step.",
                    style="dim"))
  return Group(*parts)


def _waits(diagnosis: Diagnosis) -> RenderableType | None:
  step = diagnosis.step_time
  waits = [each for each in diagnosis.waits if each.waiting > 0][:_MOST_WAITS]
  if not waits or step is None:
    return None
  table = make_table("collective", "times", "waiting", "share", "most in", "mostly for", "transfer")
  for each in waits:
    most = "all iterations" if each.iterations > 1 else ""
    if each.stands_out:
      most = f"{each.place.iteration}: {milliseconds(each.worst)}"
    table.add_row(
        LongName(each.place.title), str(each.iterations), milliseconds(each.waiting),
        f"{100 * each.waiting / step.mean:.1f} %", most,
        "" if each.rank is None else f"rank {each.rank}: {percent(each.held)}",
        milliseconds(each.transfer))
  rest = [each for each in diagnosis.waits if each.waiting > 0][_MOST_WAITS:]
  said = ("waiting: what a rank waits there for later ones, per step, mean over ranks; iterations "
          "count from 0.")
  if rest:
    said = (f"{plural(len(rest), 'more collective')}, {milliseconds(sum(e.waiting for e in rest))} "
            "in all; ") + said
  return Group(table, Text(said, style="dim"))


def _overlap(diagnosis: Diagnosis) -> RenderableType | None:
  found, step = diagnosis.overlap, diagnosis.step_time
  if found is None or step is None or not found.tells:
    return None
  line = (f"Collectives are under way for {milliseconds(found.exposed + found.computing)} of a "
          f"step: at most {milliseconds(found.exposed)} of that are waited for, at least "
          f"{milliseconds(found.computing)} are hidden behind computing.")
  table = make_table("collective", "times", "in flight", "exposed", "hidden", "behind others",
                     "work meanwhile")
  for each in found.collectives[:_MOST_WAITS]:
    table.add_row(LongName(each.place.title), str(each.iterations),
                  *map(milliseconds, (each.in_flight, each.exposed, each.hidden,
                                      each.behind_others)),
                  "" if each.place.meanwhile is None else f"{100 * each.place.meanwhile:.1f} %")
  said = ("exposed: at most; hidden: at least; behind others: while another one is waited for; "
          "work meanwhile: the part of the step's operations that could run while it is under way.")
  rest = len(found.collectives) - _MOST_WAITS
  if rest > 0:
    said = f"{plural(rest, 'more collective')}; " + said
  return Group(Text(line), table, Text(said, style="dim"))


def _phases(diagnosis: Diagnosis) -> RenderableType | None:
  if not diagnosis.phases:
    return None
  table = make_table("phase", "median", "quickest rank", "slowest rank")
  for name, medians in diagnosis.phases.items():
    slow, quick = int(np.nanargmax(medians)), int(np.nanargmin(medians))
    table.add_row(name, milliseconds(float(np.nanmedian(medians))),
                  *(f"{milliseconds(float(medians[rank]))} (rank {rank})"
                    for rank in (quick, slow)))
  return table


def _pacing(diagnosis: Diagnosis) -> RenderableType | None:
  said = [one.sentence() for one in (diagnosis.measured, diagnosis.work_moved) if one]
  return Text("\n".join(said)) if said else None


def _what_if(document: dict[str, Any]) -> RenderableType | None:
  rows = might_have_been(document) if document["what_if"]["no_skew"] else []
  table = _grid()
  for justify in ("left", "right", "right"):
    table.add_column(justify=justify, no_wrap=True)
  for name, place in rows:
    answer = answer_at(document["what_if"], place)
    table.add_row(name, milliseconds(answer["step_time"]) + " per step",
                  f"{answer['speedup']:.2f}x")
  return table if rows else None


def _notes(document: dict[str, Any]) -> RenderableType | None:
  sentences = [*document["problems"], *document["notes"]]
  return _bullets(sentences) if sentences else None


def _bullets(sentences: list[str], last: str = "") -> Table:
  table = Table.grid(padding=(0, 1))
  table.add_column(no_wrap=True)
  table.add_column(overflow="fold")
  for i, sentence in enumerate(sentences):
    final = bool(last) and i == len(sentences) - 1
    table.add_row(last if final else "-", Text(sentence, style="bold" if final else ""))
  return table


def _grid() -> Table:
  return Table.grid(padding=(0, 2, 0, 0))


def render_forecast(found: Forecast, console: Console) -> None:
  """Prints a row for each number of ranks, then why some can't be forecast, and notes."""
  sample = found.sample
  console.print()
  table = make_table("ranks", "step", "90 % interval", "change", "variation", "efficiency",
                     "waiting", "transfer")
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
  if any(point.silent is None for point in found.points):
    sentences += found.notes
  if sentences:
    console.print()
  for sentence in sentences:
    console.print(Text(f"- {sentence}"), soft_wrap=False)
