"""docs/paper.md: its tables, made from the figures on record, and the data beside the drawings."""

from __future__ import annotations

import json
import pathlib
import re
from collections.abc import Callable
from typing import Any

from experiments.paper import emulated, predict, tables, turns_page
from experiments.paper import world as worlds

TABLE: dict[str, Callable[[dict[str, Any]], list[str]]] = {
    "baseline": tables.baseline, "coordination": tables.coordination, "sentence": tables.sentence,
    "beyond": tables.beyond, "parts": tables.parts, "searches": tables.searches}
"""Parts of the page made from Table 1, by the name between their marks."""


def filled(page: str, table: pathlib.Path, measured: pathlib.Path) -> str:
  """Puts the tables between their marks, `<!-- name -->` and `<!-- end -->`.

  Args:
    page: its text.
    table: `docs/measurements/table1.json`, `table1_turns.json` beside it; a sentence takes the
      place of what is made from either while it isn't there.
    measured: `docs/measurements/emulated.json`, likewise.

  Raises:
    ValueError: a mark has a name that nothing is made for.
  """
  def made(match: re.Match[str]) -> str:
    name = match[1]
    if name == "emulated":
      lines = _from(measured, emulated.throughput, emulated.MODULE)
    elif name == "turns":
      lines = _from(table.with_name("table1_turns.json"), turns_page.both,
                    "experiments.paper.turns")
    elif name in TABLE:
      lines = _from(table, TABLE[name], "experiments.paper.table1")
    else:
      raise ValueError(
          f"Nothing is made for the mark {name!r}; there are emulated, turns, {', '.join(TABLE)}.")
    return f"<!-- {name} -->\n" + "\n".join(lines).strip("\n") + "\n<!-- end -->"

  return re.sub(r"<!-- (\w+) -->\n.*?<!-- end -->", made, page, flags=re.DOTALL)


def _from(path: pathlib.Path, make: Callable[[dict[str, Any]], list[str]],
          module: str) -> list[str]:
  if not path.is_file():
    return [f"Not run yet: `python -m {module}`."]
  return make(json.loads(path.read_text()))


def data(figures: dict[str, Any]) -> dict[str, Any]:
  """What figures 1 and 5 show, by name: the paper's columns, and of each world."""
  sizes = figures["sizes"]
  paper = {"nodes": worlds.NODES, "throughput": worlds.THROUGHPUT, "cv": worlds.CV}
  command = {"command": figures["command"], "date": figures["date"]}
  return {
      "figure1": {**command, "paper": paper, "worlds_beyond": figures["few"],
                  "mean_step_in_units_of_compute": {n: of["all"]["bare_mean"]
                                                    for n, of in sizes.items()}},
      "figure5": {**command, "paper": paper, "worlds": {
          n: {name: {field: of[name][field] for field in ("gain", "cv", "bare_cv", "bare_mean")}
              for name in predict.ARMS if name in of} for n, of in sizes.items()}}}
