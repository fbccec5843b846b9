"""The results of `experiments.measure.bitwise` as tables."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from experiments.lib import measured
from experiments.measure import bitwise_cases, bitwise_delays

NO_FMA = "--xla_cpu_max_isa=AVX"
"""Instructions without fused multiply-add, for XLA_FLAGS."""


def instrumented(rows: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
  """Rows that are no nulls."""
  return [row for row in rows if row["way"] != bitwise_cases.NULL]


def markdown(figures: dict[str, Any]) -> list[str]:
  """Lines of the report."""
  lines = measured.introduction("Bitwise: on, off and removed", figures)
  lines += [line for part, run in figures.get("runs", {}).items()
            for line in (f"Part `{part}`: `{run['command']}`, {run['date']}, jax "
                         f"{run['machine']['jax']}, load average at the start "
                         f"{run['load_average_at_start']:g}.", "")]
  lines += [f"{figures['steps']} steps each. Bits: parameters, optimizer state, statistics and "
            "metrics. Collectives: of the compiled programs, number, kind, groups of ranks and "
            "operands, but for one operand where arrivals are shared. Control: the bare step that "
            "merely returns a gradient too, against the bare step.", ""]
  titles = {"one": "One process",
            "no_fma": f"One process, `XLA_FLAGS={NO_FMA}` (no fused multiply-add)",
            "processes": "Several processes, gloo",
            "pacers": "Every pacer, guard and housekeeper"}
  lines += measured.table(["part", "comparisons", "bits differ", "collectives differ",
                           "controls whose bits differ"],
                          [[title, *_counted(figures[part])] for part, title in titles.items()
                           if part in figures])
  for part, title in titles.items():
    if part in figures:
      lines += [f"## {title}", "", *(
          bitwise_delays.table if part == "pacers" else _summary)(instrumented(figures[part]))]
      wrong = [row for row in instrumented(figures[part]) if not bitwise_delays.sound(row)]
      if wrong:
        lines += ["Different:", "", *measured.table(
            ["case", "instrumented", "leaves that differ", "collectives"],
            [[_case(row), row["way"], f"{len(row['leaves'])} of {row['compared_leaves']}",
              row["hlo"] or "equal"]
             for row in wrong])]
  return lines


def _counted(rows: list[dict[str, Any]]) -> list[Any]:
  ours = instrumented(rows)
  nulls = [row for row in rows if row["way"] == bitwise_cases.NULL]
  strayed = sum(not row["bits_equal"] for row in nulls)
  return [len(ours), sum(not row["bits_equal"] for row in ours),
          sum(not row["hlo_equal"] for row in ours),
          f"{strayed} of {len(nulls)}" if nulls else None]


def _case(row: dict[str, Any]) -> str:
  return f"{row['model']}, {row['dtype']}, {row['layout']}, {row['ranks']} ranks"


def _summary(rows: list[dict[str, Any]]) -> list[str]:
  """How many comparisons of each kind are equal, of how many."""
  dtypes = list(dict.fromkeys(row["dtype"] for row in rows))
  lines: list[str] = []
  for key, title in (("layout", "layout"), ("ranks", "ranks"), ("model", "model"),
                     ("way", "instrumented")):
    values = list(dict.fromkeys(row[key] for row in rows))
    table = []
    for value in values:
      counts = []
      for dtype in dtypes:
        here = [row["bits_equal"] and row["hlo_equal"] for row in rows if row[key] == value
                and row["dtype"] == dtype]
        counts.append(f"{sum(here)} of {len(here)}")
      table.append([value, *counts])
    lines += measured.table([title, *(f"equal, {dtype}" for dtype in dtypes)], table)
  return lines
