"""What a lab's run says of itself: when each step of a job ended, and how long it was held back.

Ends of two jobs are compared: all hosts of a lab are one machine and share its monotonic clock.
Nothing outside of experiments may do that.
"""

from __future__ import annotations

import pathlib
from typing import NamedTuple

import numpy as np

from jaxpace.trace.reader import read_run
from jaxpace.trace.run import MISSING

_FIRST = 2  # steps at the start that don't count: the jobs begin out of rest


class Timeline(NamedTuple):
  """One job's steps, those recorded on rank 0, in order."""

  steps: np.ndarray  # [K] int64, step numbers
  ends: np.ndarray  # [K] float64 s, rank 0's exit from the last collective
  delays: np.ndarray  # [K] float64 s, applied or held before collectives, the largest of all ranks
  transfers: np.ndarray  # [K, B] float64 s, each collective's own time


def read(directory: str | pathlib.Path) -> Timeline:
  """Reads the timeline of a recorded run."""
  run = read_run(directory)
  ends = run.collectives[-1].exit_ns[0]
  known = np.all([(c.exit_ns != MISSING) & (c.enter_ns != MISSING) for c in run.collectives],
                 axis=(0, 1))
  delays = sum(np.nan_to_num(run.durations[name].astype(np.float64), nan=0.0).max(axis=0)
               for name in ("delay_applied", "held") if name in run.durations)
  waits = np.stack([1e-9 * (c.exit_ns - c.enter_ns)[:, known].astype(np.float64)
                    for c in run.collectives])
  # As pacers see it: the first is waited for by the rank that is early, the others begin together.
  transfers = np.vstack([waits[:1].min(axis=1), waits[1:].mean(axis=1)])
  return Timeline(run.steps[known], 1e-9 * ends[known].astype(np.float64), delays[known],
                  transfers.T)


def together(lines: list[Timeline]) -> list[Timeline]:
  """The steps of each job that ended while all jobs ran, without the first of all."""
  first = max(line.ends[min(_FIRST, len(line.ends) - 1)] for line in lines)
  last = min(line.ends[-1] for line in lines)
  return [cut(line, first, last) for line in lines]


def cut(line: Timeline, first: float, last: float = np.inf) -> Timeline:
  """The steps that ended from `first` to `last`, s."""
  use = (line.ends >= first) & (line.ends <= last)
  return Timeline(*(values[use] for values in line))


def periods(line: Timeline) -> np.ndarray:
  """[K - 1] s from one step's end to the next one's; steps with a gap before them are left out."""
  return np.diff(line.ends)[np.diff(line.steps) == 1]
