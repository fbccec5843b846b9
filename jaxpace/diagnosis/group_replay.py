"""Recorded steps played again where not all ranks meet in all collectives.

Each rank has a time of its own, t. A collective lets the ranks of a group out together, t = max
over the group of (t + A) + C; a point-to-point transfer lets a rank out when it and its source are
there. Times run on from step to step, so that one rank's lateness reaches others through whatever
collectives join them, and ranks that nothing joins never meet.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from jaxpace.diagnosis.accounting import BusyTimes, busy, chunks
from jaxpace.diagnosis.grouped_waits import step_through
from jaxpace.diagnosis.meetings import Meetings
from jaxpace.diagnosis.staged import leave
from jaxpace.diagnosis.totals import undelayed
from jaxpace.trace.run import Run

_LANES, _LEAST = 64, 512
"""Stretches of steps that are played side by side, each from a common beginning, and steps of one
at least."""

_MOST_CELLS, _ENOUGH = 1 << 23, 40
"""Entries of collectives that are played, of a run of which some steps are written in full, and
steps at least: of more, evenly spread ones."""

Change = Callable[[BusyTimes, np.ndarray, slice, int], np.ndarray]
"""From the steps of a chunk, their [C, R, k] arrivals, their slice and a scenario's number to its
arrivals; minus infinity for a rank that is not there."""


def mean_steps(run: Run, found: Meetings, mask: np.ndarray, scenarios: Sequence[int],
               change: Change) -> np.ndarray:
  """[scenarios] mean over ranks and counted steps of the time a step takes, seconds.

  Args:
    run: the recorded run.
    found: who meets.
    mask: [K] counted steps.
    scenarios: their numbers.
    change: makes a scenario's arrivals.
  """
  steps = np.flatnonzero(mask)
  lanes = int(np.clip(len(steps) // _LEAST, 1, _LANES))
  # what lies between steps that are written in full isn't known: each by itself
  if run.whole is not None:
    most = max(_ENOUGH, _MOST_CELLS // max(1, len(run.collectives) * run.ranks))
    steps = steps[np.linspace(0, len(steps) - 1, min(len(steps), most)).round().astype(int)]
    lanes = max(1, len(steps))
  edges = np.linspace(0, len(steps), lanes + 1).astype(int)
  longest = int(np.diff(edges).max(initial=0))
  lane = np.searchsorted(edges, np.arange(len(steps)), side="right") - 1
  place = np.arange(len(steps)) - edges[lane]
  shape = len(run.collectives), longest, lanes, run.ranks
  arrivals = np.full((len(scenarios), *shape), -np.inf, np.float32)
  transfers = np.zeros(shape, np.float32)
  for part in chunks(run):
    own = np.flatnonzero((steps >= part.start) & (steps < part.stop))
    if not own.size:
      continue
    work = busy(run, part)
    work = work._replace(valid=work.valid & mask[part])
    arrival = undelayed(work)
    at = steps[own] - part.start
    for c, waited in enumerate(step_through(found, work.arrival, work.wait, work.valid)):
      transfers[c, place[own], lane[own]] = np.nan_to_num(
          np.where(waited.takes, waited.transfer, 0.0))[:, at].T
    for i, number in enumerate(scenarios):
      changed = np.where(work.valid, change(work, arrival, part, number), -np.inf)
      arrivals[i][:, place[own], lane[own]] = np.moveaxis(changed[:, :, at], 1, 2)
  return _play(found, arrivals, transfers) / max(1, len(steps))


def _play(found: Meetings, arrivals: np.ndarray, transfers: np.ndarray) -> np.ndarray:
  """[scenarios] sum over lanes of the ranks' mean time at the end.

  Args:
    found: who meets.
    arrivals: [S, C, L, W, R]; minus infinity for a rank that is not there.
    transfers: [C, L, W, R].
  """
  scenarios, slots, longest, lanes, ranks = arrivals.shape
  time = np.zeros((scenarios, lanes, ranks))
  for k in range(longest):
    for c in range(slots):
      time = leave(found, c, time, time + arrivals[:, c, k]) + transfers[c, k]
  return np.asarray(time.mean(axis=2).sum(axis=1))
