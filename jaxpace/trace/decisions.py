"""Reads what a guard decided, of one rank: columns of a pacer's own are many, and the report needs these only."""

from __future__ import annotations

import numpy as np

from jaxpace.trace.dense import StepAxis
from jaxpace.trace.table_reader import TableFiles

GUARD = ("guard_on", "guard_pair", "effect", "effect_low", "effect_high", "pairs")
"""Columns of `jaxpace.guard`, without the prefix `decision_`."""


def read_guard(table: TableFiles, axis: StepAxis, attempt: np.ndarray) -> dict[str, np.ndarray]:
  """Reads a guard's columns of the lowest rank that recorded anything.

  Args:
    table: the `steps` table.
    axis: the step numbers wanted.
    attempt: [R, K] newest attempt of each rank and step, -1 where nothing is recorded.

  Returns:
    [K] float32 by column, NaN where null; nothing if no guard ran.
  """
  names = [f"decision_{name}" for name in GUARD if f"decision_{name}" in table.columns]
  recorded = np.flatnonzero((attempt >= 0).any(axis=1))
  if "decision_guard_on" not in names or not recorded.size:
    return {}
  rank = int(recorded[0])
  columns = {name.removeprefix("decision_"): np.full(axis.size, np.nan, np.float32) for name in names}
  for data in table.read(["step", "rank", "attempt", *names], (int(axis.steps[0]), int(axis.steps[-1]))):
    rows = np.flatnonzero(data.column("rank").to_numpy() == rank)
    if not rows.size:
      continue
    at, inside = axis.index(data.column("step").to_numpy()[rows])
    keep = np.ones(len(rows), bool) if inside is None else inside
    if "attempt" in data.column_names:
      newest = attempt[rank, np.clip(at, 0, axis.size - 1)]
      keep &= data.column("attempt").to_numpy()[rows] == newest
    for name in names:
      if name in data.column_names:
        columns[name.removeprefix("decision_")][at[keep]] = data.column(name).to_numpy(zero_copy_only=False)[rows[keep]]
  return columns
