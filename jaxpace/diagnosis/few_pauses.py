"""Pauses too few to be a failure mode, and yet a good part of the run: two long checkpoints in 200 steps, say."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from jaxpace.diagnosis.diagnosis import Diagnosis
from jaxpace.diagnosis.findings import COSTLY, JITTER
from jaxpace.diagnosis.paused import CAUSES

_LONG = 0.5
"""A pause is one of the few where it takes this share of the mean step or more."""
_WORDS = {"gc": "garbage collection", "data": "waiting for data", "checkpoint": "checkpoints"}


class FewPauses(NamedTuple):
  """What one cause took beyond its usual time."""

  cause: str  # for people
  seconds: float  # in all, mean over processes
  share: float  # of all the time counted
  steps: np.ndarray  # numbers of the steps with a long one


def few_pauses(diagnosis: Diagnosis) -> list[FewPauses]:
  """Measured pauses that no finding speaks of and that hold `COSTLY` of the time, costliest first.

  A step is taken to lose to them no more than its gap, mean over ranks: what the devices' work hides costs nothing.
  """
  run, selected, step_time = diagnosis.run, diagnosis.selected, diagnosis.step_time
  if step_time is None or any(finding.mode == JITTER for finding in diagnosis.findings):
    return []
  gap = np.nan_to_num(diagnosis.totals.per_step["runtime"])
  found = []
  for cause in CAUSES:
    rows = run.host_causes.columns.get(cause)
    if rows is None or not len(rows):
      continue
    lost = np.zeros(len(run.steps))
    for row in rows:
      values = np.nan_to_num(row.astype(np.float64))
      lost += np.maximum(values - np.median(values[selected.mask]), 0.0) / len(rows)
    lost = np.where(selected.mask, np.minimum(lost, gap), 0.0)
    long = lost >= _LONG * step_time.mean
    seconds = float(lost[long].sum())
    share = seconds / (step_time.mean * selected.size)
    if share >= COSTLY:
      found.append(FewPauses(_WORDS[cause], seconds, share, run.steps[long]))
  return sorted(found, key=lambda pauses: -pauses.share)


__all__ = ["FewPauses", "few_pauses"]
