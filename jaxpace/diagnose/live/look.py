"""What the live view shows, as values: made of a window of the run by the same functions that the
report uses."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from jaxpace.diagnose.floor import RUNNING_MINIMUM, above, find_floor, shares_in
from jaxpace.diagnose.inconclusive import find_inconclusive
from jaxpace.diagnose.live.alive import Alert, Liveness
from jaxpace.diagnose.pacing import GuardEstimate, last_estimate
from jaxpace.diagnose.selected_steps import (
  StepTime,
  count_steps,
  step_time_of,
  step_times,
)
from jaxpace.diagnose.totals import Totals, add_up, typical
from jaxpace.runs.run import Run


class LateRank(NamedTuple):
  """A rank of the window. Seconds."""

  rank: int
  host: str
  lateness: float  # mean undelayed arrival after the typical rank, which is the lower median
  last: float  # part of the steps in which the job waited for it
  cost: float  # share of the step that the ranks waited for it


class Numbers(NamedTuple):
  """A window of steps. K steps, seconds."""

  first: int
  last: int
  steps: int  # that count
  warmup: int  # left out as warm-up
  step_time: StepTime
  series: np.ndarray  # [K] mean over ranks, NaN where not known; the warm-up is in it
  shares: dict[str, float]
  late: tuple[LateRank, ...]  # the latest first
  silent: tuple[int, ...]  # ranks without a row in the window
  delayed: float  # part of the ranks' steps of the window with a delay
  guard: GuardEstimate
  floor: np.ndarray  # [C] lowest so far
  inconclusive: str = ""  # why nobody can say who is late, in a sentence


class Snapshot(NamedTuple):
  """Everything the screen shows at one moment."""

  path: str
  run: str
  attempt: int
  ranks: int
  processes: int
  hosts: int
  state: Liveness
  step: int  # last recorded; -1 for none
  age: float | None  # s since the newest rows were written
  numbers: Numbers | None
  alerts: tuple[Alert, ...]  # of the steps, the newest last
  events: tuple[Alert, ...]  # of watchdogs, the newest last
  notes: tuple[str, ...]


def measure(run: Run, floor: np.ndarray | None = None) -> Numbers | None:
  """Measures a window; None where no step of it counts.

  Args:
    run: the window.
    floor: [C] floors of the windows before: the lowest counts.
  """
  selected = count_steps(run)
  if not selected.size or (not run.collectives and run.end_ns is None):
    return None
  totals = add_up(run, selected)
  known = selected.mask & np.isfinite(totals.per_step["step"])
  steps = totals.per_step["step"][known]
  if not steps.size or not steps.mean() > 0:
    return None
  own = find_floor(run, None, totals).floor
  if floor is not None and floor.shape == own.shape:
    own = np.fmin(own, floor)
  present = int(totals.present.sum())
  return Numbers(
      first=int(run.steps[selected.mask][0]), last=int(run.steps[-1]), steps=selected.size,
      warmup=len(selected.warmup), step_time=step_time_of(steps),
      series=step_times(run)[run.inside],
      shares=shares_in(totals, above(totals.transfer, own, RUNNING_MINIMUM, 0), known),
      late=_late(run, totals), silent=tuple(run.silent.tolist()),
      delayed=totals.delayed / present if present else 0.0, guard=last_estimate(run),
      floor=own, inconclusive=find_inconclusive(run, selected))


def _late(run: Run, totals: Totals) -> tuple[LateRank, ...]:
  """Ranks by lateness; nobody where no collective shows it."""
  known = np.flatnonzero(totals.present > 0)
  if not run.collectives or len(known) < 2:
    return ()
  joined = totals.groups.joined[known]
  mean = totals.lateness.sum(axis=(0, 2))[known] / totals.present[known]
  lateness = mean - typical(mean, joined)
  elapsed = float(np.nansum(totals.per_step["step"]))
  rows = []
  for at in np.argsort(-lateness, kind="stable")[:64].tolist():
    rank = int(known[at])
    rows.append(LateRank(rank, run.host_of_rank(rank), float(lateness[at]),
                         float(totals.last[rank] / totals.present[rank]),
                         float(totals.blame[rank]) / elapsed))
  return tuple(rows)
