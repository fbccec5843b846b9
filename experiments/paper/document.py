"""docs/paper.md: its tables, made from the figures on record, and the data beside the drawings."""

from __future__ import annotations

import json
import pathlib
import re
from collections.abc import Callable
from typing import Any

from experiments.paper import identified, mechanisms, tables
from experiments.paper import world as worlds

PARTS: dict[str, Callable[[dict[str, Any]], list[str]]] = {
    "said": identified.said, "groups": identified.groups, "literal": identified.literal,
    "mechanisms": mechanisms.gains,
    "sentence": lambda found: tables.sentence(found["table1.json"])}
"""Parts of the page, made of the records, by the name between their marks."""
RECORDS = (identified.RECORD, "table1_turns.json", "table1_literal.json", "table1_scenarios.json",
           "table1_scenarios_fitted.json")


def filled(page: str, table: pathlib.Path) -> str:
  """Puts the tables between their marks, `<!-- name -->` and `<!-- end -->`.

  Args:
    page: its text.
    table: `docs/measurements/table1.json`, the other records beside it.

  Raises:
    ValueError: a mark has a name that nothing is made for.
  """
  found = records(table)

  def made(match: re.Match[str]) -> str:
    name = match[1]
    if name not in PARTS:
      raise ValueError(f"Nothing is made for the mark {name!r}; there are {', '.join(PARTS)}.")
    lines = "\n".join(PARTS[name](found)).strip("\n")
    return f"<!-- {name} -->\n{lines}\n<!-- end -->"

  return re.sub(r"<!-- (\w+) -->\n.*?<!-- end -->", made, page, flags=re.DOTALL)


def records(table: pathlib.Path) -> dict[str, Any]:
  """Returns Table 1 and the records beside it that are there, by the names of their files."""
  return {name: json.loads(path.read_text()) for name in (table.name, *RECORDS)
          if (path := table.with_name(name)).is_file()}


def data(found: dict[str, Any]) -> dict[str, Any]:
  """What figures 1 and 5 show, by name: the paper's columns, and of each world.

  Args:
    found: as `records` returns them.
  """
  figures = found["table1.json"]
  paper = {"nodes": worlds.NODES, "throughput": worlds.THROUGHPUT, "cv": worlds.CV}
  command = {"command": figures["command"], "date": figures["date"]}
  return {
      "figure1": {**command, "paper": paper, "worlds_beyond": figures["few"],
                  "mean_step_in_units_of_compute": {n: of["all"]["bare_mean"]
                                                    for n, of in figures["sizes"].items()}},
      "figure5": {
          "commands": {name: of["command"] for name, of in found.items() if "command" in of},
          "paper": paper, "worlds": {
              column.about: {n: {field: of[column.arm][field] for field in ("gain", "cv")}
                             for n, of in found.get(column.record, {}).get("sizes", {}).items()
                             if column.arm in of}
              for column in mechanisms.COLUMNS}}}
