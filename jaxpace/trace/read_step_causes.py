"""Reads what the host did in each step: the columns of `jaxpace.trace.host_causes`, once a process,
not once a rank."""

from __future__ import annotations

import numpy as np
import pyarrow as pa

from jaxpace.trace.dense import StepAxis
from jaxpace.trace.host_causes import HOST_CAUSES
from jaxpace.trace.run import HostCauses
from jaxpace.trace.table_reader import TableFiles


def read_host_causes(table: TableFiles, axis: StepAxis, attempt: np.ndarray,
                     process_of_rank: np.ndarray) -> HostCauses:
  """Reads the columns of each process's lowest rank.

  Args:
    table: the `steps` table.
    axis: the step numbers wanted.
    attempt: [R, K] newest attempt of each rank and step, -1 where nothing is recorded.
    process_of_rank: [R] int32, -1 where no row says.
  """
  causes = {cause.column: cause for cause in HOST_CAUSES if cause.column in table.columns}
  recorded = np.flatnonzero((attempt >= 0).any(axis=1) & (process_of_rank >= 0))
  processes, first = np.unique(process_of_rank[recorded], return_index=True)
  if not causes or not recorded.size:
    return HostCauses()
  row_of_rank = np.full(len(process_of_rank), -1, np.int64)
  row_of_rank[recorded[first]] = np.arange(len(processes))
  columns = {name: np.full((len(processes), axis.size), np.nan, np.float32) for name in causes}
  for data in table.read(["step", "rank", "attempt", *causes],
                         (int(axis.steps[0]), int(axis.steps[-1]))):
    ranks = data.column("rank").to_numpy()
    inside = (ranks >= 0) & (ranks < len(row_of_rank))
    rows = np.flatnonzero(inside & (row_of_rank[np.where(inside, ranks, 0)] >= 0))
    if not rows.size:
      continue
    at, on_axis = axis.index(data.column("step").to_numpy()[rows])
    keep = np.ones(len(rows), bool) if on_axis is None else on_axis
    ranks = ranks[rows]
    keep &= data.column("attempt").to_numpy()[rows] == attempt[ranks, np.clip(at, 0, axis.size - 1)]
    rows, at, row = rows[keep], at[keep], row_of_rank[ranks[keep]]
    for name, cause in causes.items():
      if name in data.column_names and pa.types.is_integer(data.schema.field(name).type):
        values = data.column(name).to_numpy(zero_copy_only=False)[rows].astype(np.float64)
        columns[name][row, at] = values * cause.scale
  known = {causes[name].name: values for name, values in columns.items()
           if np.isfinite(values).any()}
  return HostCauses(processes.astype(np.int64), known)
