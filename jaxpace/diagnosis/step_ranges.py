"""When something began and ended, to the step, and how to say so."""

from __future__ import annotations

import numpy as np

from jaxpace.diagnosis.accounting import busy
from jaxpace.diagnosis.meetings import joined_ranks_of
from jaxpace.diagnosis.selected_steps import SelectedSteps
from jaxpace.diagnosis.totals import late_in, undelayed
from jaxpace.trace.run import Run

_WIDEST = 4096


def rank_change(run: Run, selected: SelectedSteps, rank: int, block: int) -> int:
  """Number of the step at which a rank's arrival changed its level, near the beginning of `block`.

  The best of all splits of the neighbouring blocks' steps, by least squares.
  """
  if run.whole is not None:
    first = selected.first_step(run, max(block - 1, 0))
    last = selected.last_step(run, min(block, selected.blocks - 1))
    if last - first <= _WIDEST:
      numbers, values = late_in(run, rank, first, last, joined_ranks_of(run))
      return _split(values, numbers, selected.first_step(run, block))
  steps = np.flatnonzero(selected.within(block - 1, block + 1))
  if not steps.size or steps[-1] - steps[0] > _WIDEST:
    return selected.first_step(run, block)
  part = slice(int(steps[0]), int(steps[-1]) + 1)
  work = busy(run, part)
  arrival, valid = undelayed(work).sum(axis=0), work.valid
  if work.meetings is not None and work.meetings.apart:
    valid = valid & (work.meetings.joined == work.meetings.joined[rank])[:, None]
  others = np.where(valid, arrival, 0.0).sum(axis=0) / np.maximum(valid.sum(axis=0), 1)
  values = (arrival[rank] - others)[steps - part.start]
  return _split(values, run.steps[steps], selected.first_step(run, block))


def series_change(run: Run, selected: SelectedSteps, values: np.ndarray, block: int) -> int:
  """The same for a [K] series of the job."""
  steps = np.flatnonzero(selected.within(block - 1, block + 1))
  return _split(values[steps], run.steps[steps], selected.first_step(run, block))


def _split(values: np.ndarray, numbers: np.ndarray, otherwise: int) -> int:
  known = np.isfinite(values)
  values, numbers = values[known], numbers[known]
  if len(values) < 4:
    return otherwise
  # One pause is no change, however few the steps: it is cut to the next value, not to something
  # between the two.
  low, high = np.quantile(values, 0.05, method="higher"), np.quantile(values, 0.95, method="lower")
  total = np.cumsum(np.clip(values, low, high))
  at = np.arange(1, len(values))
  gain = total[:-1]**2 / at + (total[-1] - total[:-1])**2 / (len(values) - at)
  return int(numbers[1 + int(gain.argmax())])


def spell(first: int | None, last: int | None) -> str:
  """How a stretch of steps reads.

  >>> spell(None, None), spell(120, None), spell(120, 180), spell(None, 99)
  ('throughout', 'from step 120 on', 'from step 120 to 180 only', 'up to step 99')
  """
  if first is None and last is None:
    return "throughout"
  if last is None:
    return f"from step {first} on"
  if first is None:
    return f"up to step {last}"
  return f"from step {first} to {last} only"
