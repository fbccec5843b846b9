"""What pauses that the processes measure themselves cost a step: themselves, and the waiting for them."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from jaxpace.diagnosis.accounting import busy, chunks
from jaxpace.diagnosis.counted import Counted
from jaxpace.diagnosis.totals import undelayed
from jaxpace.trace.run import Run

CAUSES = ("gc", "data", "checkpoint")


class Paused(NamedTuple):
  """Seconds a step, mean over ranks."""

  own: float  # in the pauses
  waiting: float  # for a rank that paused longer


def paused(run: Run, counted: Counted) -> Paused:
  """Adds up the pauses beyond each process's usual ones and the waiting for them.

  The earliness of a rank, max A - A, is split by the positive differences (last rank - this one) between pauses and all
  else, as docs/accounting.md has it.

  Args:
    run: with columns of causes.
    counted: the steps that count.
  """
  pause = beyond_usual(run, counted)
  rows = {int(process): row for row, process in enumerate(run.host_causes.processes)}
  of_rank = np.array([rows.get(int(process), -1) for process in run.process_of_rank])
  gaps = "gap" in run.durations
  own = waiting = 0.0
  for part in chunks(run):
    work = busy(run, part)
    valid = work.valid & counted.mask[part]
    some = np.flatnonzero(valid.any(axis=0))
    if not some.size:
      continue
    valid, arrival = valid[:, some], undelayed(work)[0][:, some]
    paused_now = np.where(valid & (of_rank >= 0)[:, None], pause[of_rank][:, part][:, some], 0.0)
    # The columns are the process's: a rank of it pauses no longer than its own gap.
    paused_now = np.minimum(paused_now, np.where(valid, work.runtime[:, some] if gaps else arrival, 0.0))
    rest = arrival - paused_now
    last = np.where(valid, arrival, -np.inf).argmax(axis=0)[None]
    early, more, other = (np.where(valid, np.maximum(np.take_along_axis(x, last, axis=0) - x, 0.0), 0.0)
                          for x in (arrival, paused_now, rest))
    split = np.divide(more, more + other, out=np.zeros_like(more), where=more + other > 0)
    number = valid.sum(axis=0)
    own += float((paused_now.sum(axis=0) / number).sum())
    waiting += float(((early * split).sum(axis=0) / number).sum())
  size = max(1, counted.size)
  return Paused(own / size, waiting / size)


def beyond_usual(run: Run, counted: Counted) -> np.ndarray:
  """[P, K] seconds of garbage collection, data and checkpoints, less what is usual in the process."""
  columns = run.host_causes.columns
  whole = np.zeros((len(run.host_causes.processes), len(run.steps)))
  for name in CAUSES:
    if name in columns:
      values = np.nan_to_num(columns[name].astype(np.float64))
      whole += np.maximum(values - np.median(values[:, counted.mask], axis=1, keepdims=True), 0.0)
  return whole
