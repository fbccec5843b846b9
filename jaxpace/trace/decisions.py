"""Reads what a guard and shared work decided, of one rank: columns of a pacer's own are many, the
report needs few."""

from __future__ import annotations

import numpy as np

from jaxpace.trace.dense import StepAxis
from jaxpace.trace.table_reader import TableFiles

GUARD = ("guard_on", "guard_pair", "effect", "effect_low", "effect_high", "pairs")
"""Columns of `jaxpace.guard`, without the prefix `decision_`."""
WORK = ("work_uneven", "work_gain", "work_on", "work_effect", "work_effect_low", "work_effect_high",
        "work_pairs")
"""Those of `jaxpace.share_work`, which are the same on all ranks."""


def read_guard(table: TableFiles, axis: StepAxis, attempt: np.ndarray) -> dict[str, np.ndarray]:
  """Reads a guard's columns, and those of shared work, of the lowest rank that recorded anything.

  Args:
    table: the `steps` table.
    axis: the step numbers wanted.
    attempt: [R, K] newest attempt of each rank and step, -1 where nothing is recorded.

  Returns:
    [K] float32 by column, NaN where null; nothing if neither ran.
  """
  names = [f"decision_{name}" for name in (*GUARD, *WORK) if f"decision_{name}" in table.columns]
  recorded = np.flatnonzero((attempt >= 0).any(axis=1))
  if not {"decision_guard_on", "decision_work_uneven"}.intersection(names) or not recorded.size:
    return {}
  rank = int(recorded[0])
  columns = {name.removeprefix("decision_"): np.full(axis.size, np.nan, np.float32)
             for name in names}
  for data in table.read(["step", "rank", "attempt", *names],
                         (int(axis.steps[0]), int(axis.steps[-1]))):
    rows = np.flatnonzero(data.column("rank").to_numpy() == rank)
    if not rows.size:
      continue
    at, inside = axis.index(data.column("step").to_numpy()[rows])
    keep = np.ones(len(rows), bool) if inside is None else inside
    newest = attempt[rank, np.clip(at, 0, axis.size - 1)]
    keep &= data.column("attempt").to_numpy()[rows] == newest
    for name in names:
      if name in data.column_names:
        columns[name.removeprefix("decision_")][at[keep]] = data.column(name).to_numpy(
            zero_copy_only=False)[rows[keep]]
  return columns
