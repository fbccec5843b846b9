"""Who is late when, by the sums of all steps of an observed run, of which only some are written in
full.

A rank's busy time of a step is the step less its time in collectives: the sum of its arrivals. What
a rank does for longer than the others shows there as it does in the collectives one by one; who it
made wait, and where, does not.
"""

from __future__ import annotations

import numpy as np

from jaxpace.diagnosis.accounting import busy, chunks
from jaxpace.diagnosis.meetings import Grouped
from jaxpace.diagnosis.selected_steps import SelectedSteps, count_steps
from jaxpace.trace.run import Run


def late_by_block(run: Run, selected: SelectedSteps, joined: np.ndarray | None) -> np.ndarray:
  """[R, B] mean busy time of all counted steps, less the mean over the ranks that are joined; NaN
  where not known.

  Args:
    run: of which some steps are written in full.
    selected: these; a block of them stands for all steps up to the next block's first.
    joined: [R] number of the ranks that each meets, None where all do.
  """
  whole = run.all_steps
  mask = count_steps(whole).mask
  first = np.array([selected.first_step(run, block) for block in range(selected.blocks)])
  block = np.maximum(np.searchsorted(first, whole.steps, side="right") - 1, 0)
  groups = Grouped(np.zeros(run.ranks, np.int64) if joined is None else joined)
  total, number = (np.zeros((run.ranks, selected.blocks)),
                   np.zeros((run.ranks, selected.blocks), np.int64))
  for part in chunks(whole):
    late, valid = _late(whole, part, groups)
    valid &= mask[part]
    edges = np.flatnonzero(np.diff(block[part], prepend=-1))
    own = block[part][edges]
    total[:, own] += np.add.reduceat(np.where(valid, late, 0.0), edges, axis=1)
    number[:, own] += np.add.reduceat(valid.astype(np.int64), edges, axis=1)
  return np.divide(total, number, out=np.full(total.shape, np.nan), where=number > 0)


def late_in(run: Run, rank: int, first: int, last: int,
            joined: np.ndarray | None) -> tuple[np.ndarray, np.ndarray]:
  """Numbers of the steps from `first` to `last`, and by how many seconds a rank is busy for longer
  in each.

  NaN where that is not known.
  """
  whole = run.all_steps
  part = slice(int(np.searchsorted(whole.steps, first)),
               int(np.searchsorted(whole.steps, last, side="right")))
  late, valid = _late(whole, part,
                      Grouped(np.zeros(run.ranks, np.int64) if joined is None else joined))
  return whole.steps[part], np.where(valid[rank], late[rank], np.nan)


def _late(whole: Run, part: slice, groups: Grouped) -> tuple[np.ndarray, np.ndarray]:
  """[R, k] busy time less the mean of the joined ranks, and where it is known."""
  work = busy(whole, part)
  waited = whole.durations.get("sync")
  if waited is None:
    return np.zeros(work.valid.shape), np.zeros(work.valid.shape, bool)
  own = work.step - waited[:, part] - work.pacing
  valid = work.valid & np.isfinite(own)
  own = np.where(valid, own, 0.0)
  return own - groups.mean(own, valid), valid
