"""What the job would gain: recorded steps replayed with something taken out.

A step is the max-plus recurrence t[k, c] = max over ranks of (t[k, c-1] + A[r, k, c]) + C[k, c]
through all its collectives c, with undelayed arrivals A, the maximum being that of each group of
ranks that meets. Played with other arrivals A*, and all else (transfers, spread, what pacing cost)
as recorded, a step is shorter by the sum over c of max A - max A* where all ranks meet.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from jaxpace.diagnose.floor import Floor, running_minimum
from jaxpace.diagnose.groups import RunGroups, run_groups, step_through
from jaxpace.diagnose.ledger import evened, leave
from jaxpace.diagnose.limits import CELLS, KEPT, MIN_STEPS, SAME
from jaxpace.diagnose.phases import beyond_usual, on_purpose, pauses_by_rank
from jaxpace.diagnose.selected_steps import SelectedSteps
from jaxpace.diagnose.step_times import StepTimes, chunks, counted
from jaxpace.diagnose.totals import typical
from jaxpace.runs.run import MISSING, Run


class Alternative(NamedTuple):
  """A step that might have been."""

  step_time: float  # seconds
  speedup: float  # recorded step time over this one

  @property
  def saving(self) -> float:
    """Part of the step that is saved."""
    return 1 - 1 / self.speedup if self.speedup > 0 else 0.0


class Without(NamedTuple):
  """What is taken out of a run, all of it at once."""

  ranks: tuple[int, ...] = ()
  """Ranks that are as quick as the typical one, and vary as much."""
  skew: bool = False
  """All ranks arrive at the step's mean arrival."""
  contention: bool = False
  """Every transfer takes at most its floor, and lets the ranks of a process go together."""
  together: bool = False
  """A collective lets the ranks of a process go together: none stands in a gap, since the process's
  loop does, until another one is through, for longer than when the run is quiet. Part of
  `contention`."""
  runtime_jitter: bool = False
  """Every rank's gap between steps takes that rank's median gap, or its mean one where that is
  shorter, in every step."""
  pauses: bool = False
  """No process collects garbage, waits for data or writes checkpoints for longer than it usually
  does."""
  uneven: bool = False
  """Every rank has as much of the work as its mean speed over the steps allows: what it does
  between gaps takes all ranks equally long on average. The same work in all; parts of any size.
  Where all ranks meet."""
  pacing: bool = False
  """No delay costs anything: L = max(A + d) - max(A) is taken out."""


def alternative(step_time: float, saved: float, scale: float = 1.0) -> Alternative:
  """The step with `saved` seconds of `step_time` taken out: speedup 1 / (1 - saved / step_time); of
  steps that take `scale` times as long, and would be as many times as quick."""
  left = max(step_time - saved, 0.0)
  return Alternative(left * scale, step_time / left if left > 0 else float("inf"))


def saved(run: Run, selected: SelectedSteps, floor: Floor,
          scenarios: Sequence[Without]) -> list[float]:
  """Mean seconds by which a step would be shorter in each scenario, 0 or more.

  Exact in the model above where all ranks leave a collective together. A rank that was not recorded
  in a step is not there in either; a step in which nobody else was recorded stays as it was.
  """
  if not run.collectives or not scenarios:
    return [0.0] * len(scenarios)
  gaps = (_typical_gaps(run, selected.mask) if any(s.runtime_jitter for s in scenarios)
          else np.zeros(run.ranks))
  meant = beyond_usual(on_purpose(run)[None], selected)[0]
  pauses = pauses_by_rank(run, selected) if any(s.pauses for s in scenarios) else None
  quiet = (_usual_standing(run, selected.mask)
           if any(s.contention or s.together for s in scenarios) else None)
  found = run_groups(run)
  parts = (_parts_by_speed(run, selected)
           if found.all_meet and any(s.uneven for s in scenarios) else None)
  late = sorted({rank for scenario in scenarios for rank in scenario.ranks})
  mended = repair(run, selected.mask, found, late) if late else None

  def change(scenario: Without, work: StepTimes, arrival: np.ndarray, part: slice) -> np.ndarray:
    """[C, R, k] arrivals without the gaps, pauses, slow ranks and uneven work that the scenario is
    without."""
    changed, left = arrival.copy(), work.runtime
    if quiet is not None and (scenario.contention or scenario.together):
      left = left - np.clip(_standing(run, part) - quiet[:, None], 0.0, left)
    if pauses is not None and scenario.pauses:
      left = left - np.minimum(pauses[:, part], left)
    if scenario.runtime_jitter:
      # what all processes run in them on purpose would still be run
      steady = gaps[:, None] + np.minimum(meant[part], np.maximum(left - gaps[:, None], 0.0))
      left = (np.minimum(steady, left)
              if scenario.pauses or scenario.contention or scenario.together else steady)
    changed[0] += left - work.runtime
    if mended is not None:
      changed = mended(changed, left, scenario.ranks)
    if parts is not None and scenario.uneven:  # all but the gaps, times each rank's part
      changed *= parts[:, None]
      changed[0] += work.runtime * (1 - parts[:, None])
    return evened(found, changed, work.valid) if scenario.skew else changed

  played: list[Change] = [lambda work, arrival, part: arrival]
  if any(s.pacing for s in scenarios):
    played.append(lambda work, arrival, part: work.arrival)
  played += [functools.partial(change, scenario) for scenario in scenarios]
  at_once = (len(played) if found.levels.all()
             else max(1, KEPT // max(1, len(run.collectives) * run.ranks * selected.size)))
  times = [float(value) for begin in range(0, len(played), at_once)
           for value in mean_steps(run, found, selected.mask, played[begin:begin + at_once])]
  recorded = times[0]
  contention = np.nan_to_num(floor.contention).sum(axis=0)
  lost = float(contention[selected.mask].sum()) / max(1, selected.size)
  return [max(recorded - time + (times[1] - recorded if scenario.pacing else 0.0)
              + (lost if scenario.contention else 0.0), 0.0)
          for time, scenario in zip(times[-len(scenarios):], scenarios, strict=True)]


def _parts_by_speed(run: Run, selected: SelectedSteps) -> np.ndarray:
  """[R] what a rank would have of the work, 1 being an even part: one over its mean busy time
  without gaps, scaled so that the parts of the ranks that are known add up to as many; 1 where
  nothing is known."""
  total, number = np.zeros(run.ranks), np.zeros(run.ranks)
  for _, work in counted(run, selected.mask):
    own = work.undelayed.sum(axis=0) - work.runtime
    total += np.where(work.valid, own, 0.0).sum(axis=1)
    number += work.valid.sum(axis=1)
  known = (number > 0) & (total > 0)
  parts = np.ones(run.ranks)
  parts[known] = number[known] / total[known]
  if known.any():
    parts[known] /= parts[known].mean()
  return parts


def has_gaps(run: Run) -> bool:
  """Whether the gaps between steps were recorded: without them runtime jitter is part of
  compute."""
  return "gap" in run.durations and bool(np.isfinite(run.durations["gap"]).any())


def _standing(run: Run, part: slice) -> np.ndarray:
  """[R, k] seconds that each rank's process was not through with the step before on another rank
  when it was on this one; 0 where that is not known.

  Its loop goes on once all its ranks are through. A transfer's own time is that of the rank that it
  lets go first: until the last one is through is the transfer's, too, and looks like a gap.
  """
  before = slice(max(part.start - 1, 0), part.stop - 1)
  ends = np.maximum.reduce([one.exit_ns[:, before] for one in run.collectives])
  stood = np.zeros((run.ranks, part.stop - part.start))
  for process in np.unique(run.process_of_rank):
    own = np.flatnonzero(run.process_of_rank == process)
    there = (ends[own] != MISSING).all(axis=0) & (np.diff(run.steps[before.start:part.stop]) == 1)
    there &= (run.attempt[own, before] == run.attempt[own[0], before]).all(axis=0)
    stood[own, len(stood[0]) - len(there):] = np.where(
        there, 1e-9 * (ends[own].max(axis=0) - ends[own]), 0.0)
  return stood


def _usual_standing(run: Run, mask: np.ndarray) -> np.ndarray:
  """[R] how long each rank stands so when the run is quiet, s."""
  some = sampled(run, mask)
  seen = [_standing(run, part)[:, some[part]] for part in chunks(run) if some[part].any()]
  return running_minimum(np.concatenate(seen, axis=1)).floor if seen else np.zeros(run.ranks)


def _typical_gaps(run: Run, mask: np.ndarray) -> np.ndarray:
  """[R] median gap of every rank over the counted steps, or their mean where that is shorter; 0
  where none is known, as in the account of a step."""
  medians = np.zeros(run.ranks)
  if "gap" in run.durations:
    for rank, row in enumerate(run.durations["gap"]):
      known = row[mask]
      known = known[np.isfinite(known)]
      if known.size:
        medians[rank] = min(np.median(known), known.mean())
  return medians


# Recorded steps replayed.
#
# Each rank has a time of its own, t. A collective lets the ranks of a group out together, t = max
# over the group of (t + A) + C; a point-to-point transfer lets a rank out when it and its source
# are there. Times run on from step to step, so that one rank's lateness reaches others through
# whatever collectives join them, and ranks that nothing joins never meet. Where all that are joined
# meet in each collective, they begin every step together: it is played by itself.

_LEAST = 512
"""Steps at least of the stretches that are played side by side, each from a common beginning."""

_MOST_PLAYED = 8 * CELLS
"""Entries of collectives that are played, of a run of which some steps are written in detail: of
more, evenly spread ones."""

Change = Callable[[StepTimes, np.ndarray, slice], np.ndarray]
"""From the steps of a chunk, their [C, R, k] undelayed arrivals and their slice to the arrivals
that are played."""


def mean_steps(run: Run, found: RunGroups, mask: np.ndarray,
               changes: Sequence[Change]) -> np.ndarray:
  """[changes] mean over ranks and counted steps of the time a step takes, seconds."""
  steps = np.flatnonzero(mask)
  if found.levels.all():
    # What transfers take is left out: where all meet it is the same in each scenario.
    total = sum((np.array([_play(found, arrival[:, None])[mask[part]].sum() for arrival in changed])
                 for part, _, changed in _changed(run, mask, changes)), np.zeros(len(changes)))
    return np.asarray(total) / max(1, len(steps))
  lanes = max(1, len(steps) // _LEAST)
  # what lies between detailed steps isn't known: each by itself
  if run.aggregated is not None:
    most = max(2 * MIN_STEPS, _MOST_PLAYED // max(1, len(run.collectives) * run.ranks))
    steps = steps[np.linspace(0, len(steps) - 1, min(len(steps), most)).round().astype(int)]
    lanes = max(1, len(steps))
  edges = np.linspace(0, len(steps), lanes + 1).astype(int)
  longest = int(np.diff(edges).max(initial=0))
  lane = np.searchsorted(edges, np.arange(len(steps)), side="right") - 1
  place = np.arange(len(steps)) - edges[lane]
  shape = len(run.collectives), longest, run.ranks, lanes
  arrivals = np.full((len(changes), *shape), -np.inf, np.float32)
  transfers = np.zeros(shape, np.float32)
  for part, work, changed in _changed(run, mask, changes):
    own = np.flatnonzero((steps >= part.start) & (steps < part.stop))
    if not own.size:
      continue
    at = steps[own] - part.start
    for c, waited in enumerate(step_through(found, work.arrival, work.wait, work.valid)):
      transfers[c, place[own], :, lane[own]] = np.nan_to_num(
          np.where(waited.takes, waited.transfer, 0.0))[:, at].T
    for played, arrival in zip(arrivals, changed, strict=True):
      played[:, place[own], :, lane[own]] = np.moveaxis(arrival[:, :, at], 2, 0)
  return np.array([_play(found, of, transfers).sum() for of in arrivals]) / max(1, len(steps))


def _changed(run: Run, mask: np.ndarray, changes: Sequence[Change]
             ) -> Iterator[tuple[slice, StepTimes, Iterator[np.ndarray]]]:
  """Chunks of steps, and the [C, R, k] arrivals of each scenario in them, one at a time."""
  for part, work in counted(run, mask):
    arrival = work.undelayed
    yield part, work, (np.where(work.valid, change(work, arrival, part), -np.inf)
                       for change in changes)


def _play(found: RunGroups, arrivals: np.ndarray, transfers: np.ndarray | None = None
          ) -> np.ndarray:
  """[W] the ranks' mean time at the end of each lane.

  Args:
    arrivals: [C, L, R, W] s; minus infinity for a rank that is not there.
    transfers: [C, L, R, W] s; None: 0.
  """
  slots, longest, *shape = arrivals.shape
  time = np.zeros(shape)
  for k in range(longest):
    for c in range(slots):
      time = leave(found, c, time, time + arrivals[c, k])
      if transfers is not None:
        time = time + transfers[c, k]
  return np.asarray(time.mean(axis=0))


# Ranks as quick as the typical one: what they would be busy for, were what is wrong mended.
#
# A rank that is gone makes a step shorter than a mended one does: of fewer ranks that vary the last
# one comes earlier. So a mended rank keeps a time of its own in each step: where it was as late as
# in one of ten of its own steps, it is now as late as the typical rank in one of ten.

_SAMPLED_STEPS = 256
"""Steps that quantiles are taken of at least, if there are as many."""
_QUANTILES = 129

Mend = Callable[[np.ndarray, np.ndarray, Sequence[int]], np.ndarray]
"""From [C, R, K] s busy, [R, K] s of that between two steps, and ranks to what all would be busy
for with those mended: never longer than they are."""


def repair(run: Run, mask: np.ndarray, found: RunGroups, ranks: Sequence[int]) -> Mend:
  """Looks at how long ranks are busy, of which some may then be mended.

  The typical rank is the lower median, at each quantile, of those that take the same part in a
  step, and of a gap of all those that are joined. What a rank still does longer in a step than the
  typical of all those it is joined with is left out as well: all that take its part may be slow, a
  stage of a pipeline.
  """
  joined, roles = found.joined, found.roles
  times = _sampled(run, mask)
  known = np.isfinite(times[0])
  there = known.any(axis=1)
  at = np.linspace(0, 1, _QUANTILES)
  quantiles = np.full((*times.shape[:2], _QUANTILES), np.nan)
  for rank in np.flatnonzero(there).tolist():
    quantiles[:, rank] = np.quantile(times[:, rank, known[rank]], at, axis=1,
                                     method="inverted_cdf").T
  usual = np.concatenate([_typical(quantiles[:1], joined), _typical(quantiles[1:], roles)])
  whole = np.full(run.ranks, np.nan)
  whole[there] = np.nanmean(times[1:, there].sum(axis=0), axis=1)
  typical_whole, rest = typical(whole, joined), dict[int, float]()
  for rank in (rank for rank in ranks if there[rank]):
    left = float(_mended(times[:, rank, known[rank]], quantiles[:, rank], usual[:, rank]
                         )[1:].sum(axis=0).mean())
    rest[rank] = min(1.0, typical_whole[rank] / left) if left > 0 else 1.0

  def mend(arrival: np.ndarray, gap: np.ndarray, chosen: Sequence[int]) -> np.ndarray:
    result = arrival.copy()
    for rank in set(chosen) & rest.keys():
      rows = _mended(_rows(arrival[:, [rank]], gap[[rank]])[:, 0], quantiles[:, rank],
                     usual[:, rank])
      result[:, rank] = rows[1:] * rest[rank]
      result[0, rank] += rows[0]
    return result

  return mend


def sampled(run: Run, mask: np.ndarray) -> np.ndarray:
  """[K] bool, counted steps evenly spread over the run, of which quantiles are taken."""
  steps = np.flatnonzero(mask)
  most = max(_SAMPLED_STEPS, CELLS // max(1, run.ranks * len(run.collectives)))
  some = np.zeros(len(mask), bool)
  some[steps[::max(1, -(-len(steps) // most))]] = True
  return some


def _sampled(run: Run, mask: np.ndarray) -> np.ndarray:
  """[1 + C, R, K] gaps and busy times, s, of counted steps evenly spread over the run; NaN where
  not known."""
  some = sampled(run, mask)
  return np.concatenate([
      np.where(work.valid, _rows(work.undelayed, work.runtime), np.nan)[..., some[part]]
      for part, work in counted(run, some)], axis=2)


def _rows(arrival: np.ndarray, gap: np.ndarray) -> np.ndarray:
  """[1 + C, R, K] gaps, and what else is done before each collective."""
  rows = np.concatenate([gap[None], arrival])
  rows[1] -= gap
  return rows


def _typical(values: np.ndarray, group: np.ndarray) -> np.ndarray:
  """[1 + C, R, Q] of the typical rank of each one's group."""
  return np.moveaxis(typical(np.moveaxis(values, 1, 0), group), 0, 1)


def _mended(rows: np.ndarray, own: np.ndarray, typical: np.ndarray) -> np.ndarray:
  """[1 + C, K] rows of a rank, none longer than it is."""
  return np.stack([np.minimum(*of) for of in
                   zip(rows, map(_mapped, rows, own, typical), strict=True)])


def _mapped(values: np.ndarray, own: np.ndarray, typical: np.ndarray) -> np.ndarray:
  """[K] typical values at the quantiles that values have among the own ones, both [Q]; where many
  own ones are the same, at the middle of these."""
  low = np.searchsorted(own, values - SAME, side="left")
  high = np.searchsorted(own, values + SAME, side="right")
  return np.where(high - low > 1, typical[np.minimum((low + high) // 2, len(own) - 1)],
                  np.interp(values, own, typical))
