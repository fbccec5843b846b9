"""Which process was stopped while ranks were in collectives: by the samples of itself that it did
not take.

Inside of a collective all ranks wait for each other, and timestamps name nobody. Each process
samples its host from a thread of its own, about once a second, whatever its devices do: one that
is stopped takes no samples.
"""

from __future__ import annotations

import numpy as np

from jaxpace.diagnose.limits import LISTED, MOST, PART, TWICE
from jaxpace.runs.run import MISSING, Run


def stopped_in(run: Run, lost: np.ndarray, least: float
               ) -> dict[int, list[tuple[int, float, float]]]:
  """When processes stood still, taking no samples while the others did: in the longest steps, as
  far as shows.

  Args:
    run: the run.
    lost: [K] seconds by which each step took longer in its collectives.
    least: seconds of a long one.

  Returns:
    By process: places of steps, seconds without a sample, and usually from one of its samples to
    the next.
  """
  found: dict[int, list[tuple[int, float, float]]] = {}
  longest = np.argsort(-lost, kind="stable")[:LISTED]
  for step in longest[lost[longest] >= least].tolist():
    for process, (seconds, usual) in _stopped(run, step, float(lost[step])).items():
      found.setdefault(process, []).append((step, seconds, usual))
  return found


def _stopped(run: Run, step: int, lost: float) -> dict[int, tuple[float, float]]:
  """Processes that stood still in a step, if others with samples went on; see `_longest`.

  Args:
    run: the run.
    step: place of the step, which took longer in its collectives.
    lost: by so many seconds.
  """
  silent: dict[int, tuple[float, float]] = {}
  for process in np.unique(run.process_of_rank[run.process_of_rank >= 0]).tolist():
    found = _longest(run, process, step)
    if found is not None and lost >= TWICE * found[1]:
      silent[process] = found
  beyond = {process: seconds - usual for process, (seconds, usual) in silent.items()}
  still = [process for process, seconds in beyond.items() if seconds >= MOST * lost]
  on = [process for process, seconds in beyond.items() if seconds < PART * lost]
  if not on or len(still) + len(on) < len(silent):
    return {}
  return {process: silent[process] for process in still}


def _longest(run: Run, process: int, step: int) -> tuple[float, float] | None:
  """Longest time between two samples of a process, of which the step is a part, and its usual one;
  None where that is not known."""
  if run.host_samples is None or step < 1:
    return None
  ranks, last = np.flatnonzero(run.process_of_rank == process), run.collectives[-1]
  ends, begins = last.exit_ns[ranks, step], last.exit_ns[ranks, step - 1]
  own = run.host_samples.of(process)
  times = own.time_ns[own.attempt == last.attempt[ranks, step].max()]
  if (ends == MISSING).any() or (begins == MISSING).any() or len(times) < 4:
    return None
  between = np.diff(times)
  during = (times[1:] > begins.min()) & (times[:-1] < ends.max())
  return (1e-9 * float(between[during].max()), 1e-9 * float(np.median(between))) if (
      during.any()) else None
