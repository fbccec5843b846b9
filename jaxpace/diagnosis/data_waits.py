"""What a step waits for data, in every step alike or now and then, on all ranks."""

from __future__ import annotations

import numpy as np

from jaxpace.diagnosis.selected_steps import SelectedSteps
from jaxpace.trace.run import Run

_AT_A_TIME = 1 << 14


def waiting_for_data(run: Run, selected: SelectedSteps) -> float | None:
  """Seconds a step, mean over ranks, that processes wait for data; None where that was not
  measured.

  No more than the rank's gap: what the devices' work hides costs nothing.
  """
  rows = run.host_causes.columns.get("data")
  gaps = run.durations.get("gap")
  if rows is None or gaps is None or not selected.size:
    return None
  of_process = {int(process): row for row, process in enumerate(run.host_causes.processes)}
  total, number = 0.0, 0
  for rank in range(run.ranks):
    row = of_process.get(int(run.process_of_rank[rank]))
    if row is None:
      continue
    for begin in range(0, len(run.steps), _AT_A_TIME):
      part = slice(begin, begin + _AT_A_TIME)
      waits = np.minimum(rows[row, part].astype(np.float64), gaps[rank, part])
      known = selected.mask[part] & np.isfinite(waits)
      total, number = total + float(waits[known].sum()), number + int(known.sum())
  return total / number if number else None


__all__ = ["waiting_for_data"]
