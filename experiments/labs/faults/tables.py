"""The figures of the fault lab for people: on a terminal, and in Markdown."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.table import Table

from experiments.labs.faults.spec import HEALTHY, MODES
from experiments.lib import measured

_NAMES = {"all": "with hosts' counters, link probe and measured fabric",
          "counters": "with hosts' counters", "bare": "by the stamps alone"}


def _name(how: str) -> str:
  way, comma, rest = how.rpartition(", ")
  return f"{way}{comma}{_NAMES.get(rest, rest)}"


def confusion_table(how: str, counts: Mapping[str, Mapping[str, int]]) -> Table:
  """Injected by found, for the terminal; the diagonal is bold, what is wrong red."""
  table = Table(title=f"Injected by found, {_name(how)}")
  table.add_column("injected")
  for column in (*MODES, HEALTHY):
    table.add_column(column.replace("_", "\n"), justify="right")
  for row in (*MODES, HEALTHY):
    cells = []
    for column in (*MODES, HEALTHY):
      number = counts[row][column]
      style = "bold green" if row == column and number else "bold red" if number else "dim"
      cells.append(f"[{style}]{number}[/{style}]")
    table.add_row(row, *cells)
  return table


def figures_table(judgements: Mapping[str, Mapping[str, Any]]) -> Table:
  """What matters of each way of judging."""
  table = Table(title="Fault lab")
  table.add_column("")
  for name in judgements:
    table.add_column(_name(name), justify="right")
  for row in _rows(judgements):
    table.add_row(*(measured.cell(value) for value in row))
  return table


def _rows(judgements: Mapping[str, Mapping[str, Any]]) -> list[list[Any]]:
  every = list(judgements.values())

  def row(name: str, value: Any) -> list[Any]:
    return [name, *(value(one) for one in every)]

  rows = [
      row("runs with faults, of them all above 5 %",
          lambda s: f"{s['with_faults']}, {s['counted']}"),
      row("healthy controls", lambda s: s["controls"]),
      row("mode macro-F1, faults of 5 % of the run or more", lambda s: f"{s['macro_f1']:.3f}"),
      row("mode macro-F1, 5 % or more while they last", lambda s: f"{s['macro_f1_active']:.3f}"),
      row("right rank or host blamed", lambda s: f"{s['blame']['right']} of {s['blame']['of']} "
          f"({s['blame']['accuracy']:.3f})"),
      row("healthy controls with a finding", lambda s: len(s["controls_with_findings"])),
      row("healthy controls in which somebody is blamed",
          lambda s: len(s["controls_falsely_blamed"])),
      row("somebody blamed where nobody is to blame",
          lambda s: f"{len(s['nobody_to_blame']['named'])} of {s['nobody_to_blame']['runs']}")]
  for group in next(iter(every))["share_error_points"]:
    rows.append(row(f"share error, {group}, points: median, 95 %",
                    lambda s, g=group: _pair(s["share_error_points"][g])))
  rows.append(
      row("what contention's truth says of runs with an untouched network, points: median, 95 %",
          lambda s: _pair(s["contention_truth_error_points"])))
  for name, key in (("what-if error against the twin", "twin"),
                    ("by which run and twin differ without the fault", "twins"),
                    ("what-if error against the same run, by the injectors", "same_run")):
    rows.append(row(f"{name}, %: median, 95 %",
                    lambda s, k=key: _pair(s["what_if_error_percent"].get(k))))
  rows.append(row("what-if off the twin by 8 % or more, by cause", lambda s: ", ".join(
      f"{cause} {number}" for cause, number in s.get("what_if_causes", {}).items()) or "–"))
  for name, key in (("mode", "within_30"), ("anything", "noticed_within_30")):
    rows.append(row(f"{name} told by the stream within 30 steps",
                    lambda s, k=key: f"{s['detection'][k]} of {s['detection']['faults']}"))
  rows.append(row("steps to detection: median, 95 %",
                  lambda s: "–" if s["detection"]["median"] is None else
                  f"{s['detection']['median']:.0f}, {s['detection']['p95']:.0f}"))
  rows.append(row("false alarms of the stream in controls, of steps", lambda s: (
      f"{s['detection']['false_alarms_in_controls']} in {s['detection']['steps_of_controls']:,}")))
  rows.append(row("of them, where the machine cost the job 5 % or more",
                  lambda s: s["detection"]["of_disturbances"]))
  rows.append(row("stretches of 24 healthy steps in which it did", lambda s: (
      f"{100 * s['detection']['disturbed_stretches']:.0f} %")))
  rows.append(row("runs not diagnosed", lambda s: len(s["undiagnosed"])))
  return rows


def _pair(spread: Mapping[str, Any] | None) -> str:
  if not spread or not spread["number"]:
    return "–"
  return f"{spread['median_abs']:.2f}, {spread['p95_abs']:.2f} (n={spread['number']})"


def markdown(figures: Mapping[str, Any]) -> list[str]:
  """The lines of docs/measurements/fault_lab.md."""
  judgements: Mapping[str, Mapping[str, Any]] = figures["judged"]
  lines = measured.introduction("The fault lab", dict(figures))
  load = figures["made"]["load"]
  lines += [
      f"The runs were made with `--config.seed={figures['made']['seed']}`, at load averages of "
      f"{load[0]:.1f} to {load[2]:.1f} (median {load[1]:.1f}) on {figures['machine']['cores']} "
      "cores; each run's own is in its label. What the faults are and how truth is measured: "
      "[how the lab works](../how_sure.md#how-the-lab-works). Other load is a fault that no label "
      "knows of: what it does to controls is real, and counts as a false finding here.", ""]
  if figures["note"]:
    lines += [figures["note"], ""]
  lines += measured.table(("", *(_name(name) for name in judgements)), _rows(judgements))
  for name, one in judgements.items():
    lines += [f"## Judged {_name(name)}", "",
              "Injected (rows) and found (columns), faults of 5 % or more:", ""]
    lines += measured.table(("", *MODES, HEALTHY),
                            [[row, *(one["confusion"][row][column] for column in (*MODES, HEALTHY))]
                             for row in (*MODES, HEALTHY)])
    lines += measured.table(("mode", "right", "missed", "false", "precision", "recall", "F1"),
                            [[mode,
                              *(entry[key] for key in ("right", "missed", "false", "precision",
                                                       "recall", "f1"))]
                             for mode, entry in one["modes"].items()])
    lines += ["Found or missed, by what a single fault costs of the whole run:", ""]
    lines += measured.table(("cost", "runs", "mode found", "rightly blamed, of those to blame"),
                            [[f"{100 * r['from']:g} to {100 * r['to']:g} %", r["runs"], r["found"],
                              f"{r['blamed']} of {r['to_blame']}"] for r in one["fading"]])
  lines += _detection(next(iter(judgements.values())))
  lines += _wrong(figures)
  return lines


def _detection(one: Mapping[str, Any]) -> list[str]:
  by_kind: Mapping[str, Sequence[int | None]] = one["detection"]["by_kind"]
  return ["## Steps to detection", "",
          "Faults that begin mid-run and cost 5 % or more while they last; –: never.", "",
          *measured.table(("fault", "steps from its onset to the stream's alarm"),
                          [[kind, ", ".join(measured.cell(steps) for steps in found)]
                           for kind, found in by_kind.items()])]


def _wrong(figures: Mapping[str, Any]) -> Sequence[str]:
  wrong: Sequence[str] = figures.get("misjudged", ())
  return (["## Misjudged with everything", "", *(f"- `{line}`" for line in wrong), ""] if wrong
          else [])
