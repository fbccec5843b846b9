"""How long each phase takes, per rank."""

from __future__ import annotations

import numpy as np

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
