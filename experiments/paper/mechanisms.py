"""Table 1 with a column for each mechanism: the paper's own, pacing, turns; tables and figure 5."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from experiments.lib import measured
from experiments.paper import drawing, identified, tables
from experiments.paper import world as worlds


class Column(NamedTuple):
  """One mechanism, in the recorded worlds."""

  about: str
  record: str  # file
  arm: str
  colour: str
  line: str


COLUMNS = (
    Column("section 5.3, one reading", "table1_literal.json", "literal", drawing.GREEN, ":"),
    Column("pacing as it comes", "table1.json", "all", drawing.BLUE, "--"),
    Column("turns, this job alone", "table1_turns.json", "one", drawing.GREY, "-."),
    Column("turns, both jobs", "table1_turns.json", "both", drawing.ORANGE, "-"),
    Column("first come, first served", "table1_turns.json", "first_come", drawing.INK, (0, (1, 3))),
)
"""In the order of the table. The last one knows all, and is none that a job could run."""


def _of(records: dict[str, Any], column: Column, nodes: int) -> dict[str, Any] | None:
  found: dict[str, Any] | None = (
      records.get(column.record, {}).get("sizes", {}).get(str(nodes), {}).get(column.arm))
  return found


def gains(records: dict[str, Any]) -> list[str]:
  """Gains in throughput, lowest .. highest of the worlds: what is in the middle hangs on which
  worlds were looked for.

  Args:
    records: by name of the file, those on record.
  """
  rows = [[nodes, f"{100 * tables.PAPER[nodes]:+.1f} %",
           *_spans(records, nodes, "gain", lambda value: f"{100 * value:+.1f}", " %")]
          for nodes in worlds.NODES]
  return measured.table(["nodes", "the paper", *(column.about for column in COLUMNS)], rows)


def _spans(records: dict[str, Any], nodes: int, field: str, form: Callable[[float], str],
           unit: str = "") -> list[str | None]:
  found = [_of(records, column, nodes) for column in COLUMNS]
  return [f"{form(min(of[field]))} .. {form(max(of[field]))}{unit}" if of else None
          for of in found]


def comparison(records: dict[str, Any]) -> Any:
  """Figure 5: throughput, gain and variation, the paper's and each mechanism's.

  Args:
    records: as for `gains`; Table 1 must be among them.

  Returns:
    A matplotlib figure.
  """
  from matplotlib.figure import Figure
  figure = Figure(figsize=(12.6, 4.6), layout="constrained")
  left, middle, right = figure.subplots(1, 3)
  nodes = np.array(worlds.NODES)
  rate = drawing.rates(records["table1.json"]["sizes"])
  left.plot(nodes, worlds.THROUGHPUT["baseline"][0] / 4 * nodes, "--", color=drawing.GREY,
            label="ideal: linear from 4")
  drawing.band(left, nodes, rate, drawing.BLUE, "worlds, baseline")
  for column in COLUMNS:
    found = [_of(records, column, n) for n in worlds.NODES]
    known = [of for of in found if of is not None]
    if len(known) < len(found):
      continue
    gain = 100 * np.stack([np.array(of["gain"]) for of in known], axis=1)
    cv = np.stack([np.array(of["cv"]) for of in known], axis=1)
    if column.arm == "both":
      for dash, (group, chosen) in zip(("-", "--"), _groups(records, len(gain)), strict=False):
        about = f"{column.about}{group}"
        drawing.band(left, nodes, (rate * (1 + gain / 100))[chosen], column.colour, about, dash)
        drawing.band(middle, nodes, gain[chosen], column.colour, about, dash)
        drawing.band(right, nodes, cv[chosen], column.colour, about, dash)
    else:
      for axes, values in ((middle, gain), (right, cv)):
        axes.plot(nodes, np.median(values, axis=0), linestyle=column.line, color=column.colour,
                  label=f"{column.about}: median")
  for name, mark in (("baseline", "o"), ("coordination", "s")):
    left.plot(nodes, worlds.THROUGHPUT[name], mark, color=drawing.INK, mfc="white", ms=6,
              label=f"paper, {name}", zorder=5)
    right.plot(nodes, worlds.CV[name], mark, color=drawing.INK, mfc="white", ms=6,
               label=f"paper, {name}", zorder=5)
  middle.plot(nodes, [100 * tables.PAPER[n] for n in worlds.NODES], "s", color=drawing.INK,
              mfc="white", ms=6, label="paper, coordination", zorder=5)
  middle.axhline(0, color=drawing.INK, lw=0.6)
  left.set_yscale("log", base=2)
  left.yaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
  left.set_ylabel("throughput, samples a second")
  left.set_title("Throughput")
  middle.set_ylabel("gain in throughput, %")
  middle.set_title("What each mechanism gains")
  right.set_ylim(0)
  right.set_ylabel("coefficient of variation of the step")
  right.set_title("Variation")
  for axes in (left, middle, right):
    drawing.by_nodes(axes, nodes)
    axes.legend(frameon=False, fontsize=7)
  return figure


def _groups(records: dict[str, Any], count: int) -> list[tuple[str, np.ndarray]]:
  """Both groups of worlds, where they are on record."""
  if identified.RECORD not in records:
    return [("", np.ones(count, bool))]
  groups = identified.Found(records[identified.RECORD]).groups
  return [(f", {name}", mask) for name, mask in groups.items()]


def architecture() -> Any:
  """Figure 4: nodes, the fabric that they share with another job, and where coordination sits.

  Returns:
    A matplotlib figure.
  """
  from matplotlib.figure import Figure
  from matplotlib.patches import FancyBboxPatch
  figure = Figure(figsize=(9.2, 4.4), layout="constrained")
  axes = figure.subplots()

  def box(x: float, y: float, wide: float, high: float, text: str, colour: str,
          size: float = 8) -> None:
    axes.add_patch(FancyBboxPatch((x, y), wide, high, boxstyle="round,pad=0.02", fc=colour,
                                  ec=drawing.INK, lw=0.8))
    axes.text(x + wide / 2, y + high / 2, text, ha="center", va="center", fontsize=size,
              color=drawing.INK)

  box(0.1, 4.2, 8.8, 0.6, "fabric: two tiers of switches; the trunk is shared, and slower than "
      "what the nodes could send", "#fde3c8")
  for place in range(4):
    x = 0.1 + 1.5 * place
    box(x, 0.9, 1.3, 2.9, "", "#eef4fa")
    box(x + 0.08, 3.2, 1.14, 0.45, "collective", "#f4a442", 7.5)
    box(x + 0.08, 2.35, 1.14, 0.65, "listen, hold,\nstamp", "#bfe3d3", 7.5)
    box(x + 0.08, 1.6, 1.14, 0.55, "JAX step:\ncompute", "#9ecae1", 7.5)
    box(x + 0.08, 1.0, 1.14, 0.42, "pace, gap", "#bfe3d3", 7.5)
    axes.annotate("", (x + 0.65, 4.18), (x + 0.65, 3.82),
                  arrowprops={"arrowstyle": "<->", "color": drawing.INK, "lw": 0.8})
    axes.text(x + 0.65, 0.72, f"node {place + 1}" if place < 3 else "node N", ha="center",
              va="center", fontsize=8)
  box(6.3, 0.9, 2.6, 2.9, "another job:\nits own steps,\nits own pacer or none;\nno message "
      "between\nthe two", "#eeeeee")
  axes.annotate("", (7.6, 4.18), (7.6, 3.82),
                arrowprops={"arrowstyle": "<->", "color": drawing.INK, "lw": 0.8})
  axes.text(2.95, 0.3, "green: what this package adds, inside the compiled step; ranks' arrivals "
            "ride\nin the collective that is there anyway", ha="center", va="center", fontsize=8)
  axes.set_xlim(0, 9)
  axes.set_ylim(0.1, 5)
  axes.axis("off")
  axes.set_title("A job, the fabric it shares, and the coordination layer")
  return figure
