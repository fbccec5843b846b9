"""The end of a record to which rows of some ranks are still to come, or never will: the job runs, or one was killed."""

from __future__ import annotations

import dataclasses

import numpy as np

from jaxpace.diagnosis.selected_steps import MIN_STEPS, step_times
from jaxpace.trace.run import Run

_LONGEST = 10.0
"""Seconds of steps: a recorder copies its stamps each second and writes them each other one, on a slow disk later."""
_WIDEST = 1 << 14
"""Steps at the end that are looked at."""


def without_unfinished(run: Run) -> tuple[Run, np.ndarray]:
  """Leaves out the last steps, where ranks that were recorded until then are not.

  Lateness is told from the ranks that are there: of two processes, one's ranks would be in time where the other's are
  missing. A rank that stops recording for good, while the others go on for long, is another matter: those steps count.

  Args:
    run: the recorded run.

  Returns:
    The run with its window ending before them, and their numbers.
  """
  begin = max(0, len(run.steps) - _WIDEST)
  attempt, inside = run.attempt[:, begin:], run.inside[begin:]
  some = np.flatnonzero((attempt >= 0).any(axis=0) & inside)
  if not some.size:
    return run, np.empty(0, np.int64)
  current = (attempt == attempt[:, some[-1]].max()) & inside
  there = current[current.any(axis=1)]
  last = int((there.shape[1] - 1 - there[:, ::-1].argmax(axis=1)).min())
  left_out = begin + some[some > last]
  if (not left_out.size or np.nansum(step_times(run)[left_out]) > _LONGEST
      or int(run.inside[:begin + last + 1].sum()) <= MIN_STEPS):
    return run, np.empty(0, np.int64)
  return (dataclasses.replace(run, window=(run.window[0], int(run.steps[begin + last]) + 1)),
          run.steps[left_out])


__all__ = ["without_unfinished"]
