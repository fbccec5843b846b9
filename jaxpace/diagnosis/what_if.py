"""What the job would gain: recorded steps played again with something taken out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from jaxpace.diagnosis.accounting import busy, chunks
from jaxpace.diagnosis.counted import Counted
from jaxpace.diagnosis.totals import undelayed
from jaxpace.trace.run import Run


class Alternative(NamedTuple):
  """A step that might have been."""

  step_time: float  # seconds
  speedup: float  # recorded step time over this one

  def to_json(self) -> dict[str, float]:
    return self._asdict()


def alternative(step_time: float, saved: float) -> Alternative:
  """The step with `saved` seconds of `step_time` taken out: speedup 1 / (1 - saved / step_time)."""
  left = max(step_time - saved, 0.0)
  return Alternative(left, step_time / left if left > 0 else float("inf"))


def saved_without(run: Run, counted: Counted, ranks: Sequence[int]) -> float:
  """Mean seconds a step loses because of `ranks`, over the counted steps.

  With those ranks as quick as the median of the others, or not there at all, each collective would start when the last
  of the others arrives: max over all ranks of A, less max over the others, by undelayed arrival.
  (A median is never above the maximum, so both questions have this one answer.)

  Args:
    run: the recorded run.
    counted: the steps that count.
    ranks: ranks taken out.
  """
  total, others = 0.0, np.ones(run.ranks, bool)
  others[list(ranks)] = False
  for part in chunks(run):
    if not counted.mask[part].any():
      continue
    work = busy(run, part)
    valid = work.valid & counted.mask[part]
    both = valid[others].any(axis=0) & valid.any(axis=0)
    for arrival in undelayed(work):
      reach = np.where(valid, arrival, -np.inf)[:, both]
      total += float((reach.max(axis=0) - reach[others].max(axis=0)).sum())
  return total / max(1, counted.size)
