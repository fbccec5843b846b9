"""How long each phase takes, per rank."""

from __future__ import annotations

import numpy as np

from jaxpace.diagnosis.selected_steps import SelectedSteps
from jaxpace.trace.run import Run

_SAMPLED_STEPS = 4096
ORDER = ("forward", "backward", "compute", "held", "sync", "update", "gap")


def phase_medians(run: Run, mask: np.ndarray) -> dict[str, np.ndarray]:
  """Median of every phase on every rank, from at most 4,096 evenly spread steps.

  Args:
    run: the recorded run.
    mask: [K] steps that count.

  Returns:
    [R] seconds by phase, NaN where a rank never recorded it; phases nobody recorded are absent.
    Built-in phases first, then the user's by name.
  """
  steps = np.flatnonzero(mask)
  steps = steps[::max(1, -(-len(steps) // _SAMPLED_STEPS))]
  own = sorted(name for name in run.durations if name.startswith("phase_"))
  medians = {}
  for name in (*ORDER, *own):
    if name not in run.durations or not steps.size:
      continue
    values = run.durations[name][:, steps].astype(np.float64)
    if name == "sync" and "held" in run.durations:
      # As recorded it begins before what was held, which is told by itself.
      values -= np.nan_to_num(run.durations["held"][:, steps], nan=0.0)
    known = np.isfinite(values).any(axis=1)
    if known.any():
      median = np.full(run.ranks, np.nan)
      median[known] = np.nanmedian(values[known], axis=1)
      medians[name.removeprefix("phase_")] = median
  return medians


# What a step waits for data, in every step alike or now and then, on all ranks.

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
