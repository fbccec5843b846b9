"""What the live view shows, as values: made of a window of the run by the same functions that the
report uses."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from jaxpace.diagnose.floor import find_floor, shares_of
from jaxpace.diagnose.inconclusive import find_inconclusive
from jaxpace.diagnose.live.alive import Event, Liveness
from jaxpace.diagnose.pacing import last_estimate
from jaxpace.diagnose.selected_steps import count_steps, step_times
from jaxpace.diagnose.totals import PARTS, Totals, add_up, lower_median
from jaxpace.runs.run import Run


class LateRank(NamedTuple):
  """A rank of the window. Seconds."""

  rank: int
  host: str
  lateness: float  # mean undelayed arrival after the typical rank, which is the lower median
  last: float  # part of the steps in which the job waited for it
  cost: float  # share of the step that the ranks waited for it


class Pacing(NamedTuple):
  """What pacing does now."""

  active: float  # part of the ranks' steps of the window with a delay
  on: bool | None  # whether the guard lets it act; None where no guard runs
  # (on - off) / off of the mean step, the guard's own estimate; None until known
  effect: float | None
  interval: tuple[float, float] | None
  pairs: int


class Numbers(NamedTuple):
  """A window of steps. K steps, seconds."""

  first: int
  last: int
  steps: int  # that count
  warmup: int  # left out as warm-up
  mean: float
  median: float
  p99: float
  cv: float
  series: np.ndarray  # [K] mean over ranks, NaN where not known; the warm-up is in it
  shares: dict[str, float] | None
  late: tuple[LateRank, ...]  # the latest first
  silent: tuple[int, ...]  # ranks without a row in the window
  pacing: Pacing
  floor: np.ndarray  # [C] lowest so far
  inconclusive: str = ""  # why nobody can say who is late, in a sentence


class Alert(NamedTuple):
  """Something that began or was over."""

  sentence: str
  over: bool


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
  alerts: tuple[Alert, ...]  # the newest last
  events: tuple[Event, ...]  # the newest last
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
  steps = totals.per_step["step"][selected.mask]
  steps = steps[np.isfinite(steps)]
  if not steps.size or not steps.mean() > 0:
    return None
  own = find_floor(run, totals.transfer, None, totals.groups).floor
  if floor is not None and floor.shape == own.shape:
    own = np.fmin(own, floor)
  mean = float(steps.mean())
  return Numbers(
      first=int(run.steps[selected.mask][0]), last=int(run.steps[-1]), steps=selected.size,
      warmup=len(selected.warmup), mean=mean, median=float(np.median(steps)),
      p99=float(np.quantile(steps, 0.99)), cv=float(steps.std()) / mean,
      series=step_times(run)[run.inside], shares=_shares(totals, selected.mask, own),
      late=_late(run, totals), silent=tuple(run.silent.tolist()), pacing=_pacing(run, totals),
      floor=own, inconclusive=find_inconclusive(run, selected))


def _shares(totals: Totals, mask: np.ndarray, floor: np.ndarray) -> dict[str, float] | None:
  parts = {name: float(np.nanmean(totals.per_step[name][mask])) for name in PARTS}
  transfer = totals.transfer[:, mask]
  quiet = np.minimum(transfer, floor[:, None])
  whole, below = (float(np.nan_to_num(values).sum(axis=0).mean()) for values in (transfer, quiet))
  if not np.isfinite(list(parts.values())).all():
    return None
  return shares_of(parts, below, whole - below)


def _late(run: Run, totals: Totals) -> tuple[LateRank, ...]:
  """Ranks by lateness; nobody where no collective shows it."""
  known = np.flatnonzero(totals.present > 0)
  if not run.collectives or len(known) < 2:
    return ()
  lateness = totals.lateness.sum(axis=(0, 2))[known] / totals.present[known]
  joined = np.zeros(run.ranks) if totals.groups is None else totals.groups.found.joined
  for number in np.unique(joined[known]):
    own = joined[known] == number
    lateness[own] -= lower_median(lateness[own, None])
  elapsed = float(np.nansum(totals.per_step["step"]))
  rows = []
  for at in np.argsort(-lateness, kind="stable").tolist():
    rank = int(known[at])
    rows.append(LateRank(rank, run.host_of_rank(rank), float(lateness[at]),
                         float(totals.last[rank] / totals.present[rank]),
                         float(totals.blame[rank]) / elapsed))
    if len(rows) == 64:
      break
  return tuple(rows)


def _pacing(run: Run, totals: Totals) -> Pacing:
  present = int(totals.present.sum())
  return Pacing(totals.delayed / present if present else 0.0, *last_estimate(run))
