"""Who is late, persistently or intermittently, since when, and how sure that is.

Lateness shows in undelayed arrivals: how long a rank was busy since it left the last collective
itself. Entry against a common exit would blame the neighbour that a slow host lets out late.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from jaxpace.diagnose.episodes import (
  SHORTEST,
  Blocks,
  Episode,
  find_episodes,
  without_outages,
)
from jaxpace.diagnose.groups import Grouped
from jaxpace.diagnose.limits import KEPT, MOST, SAMPLED
from jaxpace.diagnose.selected_steps import SelectedSteps, mean_known, ratio
from jaxpace.diagnose.step_times import busy
from jaxpace.diagnose.totals import RunTotals, Totals, late_in
from jaxpace.runs.run import Run


@dataclasses.dataclass(frozen=True, eq=False)
class WaitedFor:
  """A part of the waiting for late ranks. Seconds per step."""

  by_collective: np.ndarray  # [C]
  for_gaps: float  # of it, for longer gaps
  by_block: np.ndarray  # [B]

  @property
  def seconds(self) -> float:
    """Of all collectives together."""
    return float(self.by_collective.sum())

  def __add__(self, other: WaitedFor) -> WaitedFor:
    return WaitedFor(self.by_collective + other.by_collective, self.for_gaps + other.for_gaps,
                     self.by_block + other.by_block)

  def __sub__(self, other: WaitedFor) -> WaitedFor:
    return self + other * -1.0

  def __mul__(self, factor: float) -> WaitedFor:
    return WaitedFor(self.by_collective * factor, self.for_gaps * factor, self.by_block * factor)


class Lateness(NamedTuple):
  """How late each rank is. R ranks, C collectives, B blocks; seconds; NaN for a rank that is not
  judged."""

  mean: np.ndarray  # [R] mean arrival less the typical rank's
  # [R] that the rank is later than the typical one at all, all ranks tested together
  confidence: np.ndarray
  episodes: tuple[Episode, ...]  # when ranks that are persistently late were late
  # max over ranks of mean A, less mean A, while such a rank is late
  persistent: WaitedFor
  intermittent: WaitedFor  # what is left of mean max A - mean A
  blocks: Blocks

  @property
  def late(self) -> np.ndarray:
    """Ranks that are persistently late, costliest first."""
    return np.array(costliest_first(self.episodes), np.int64)

  @property
  def earliness(self) -> float:
    """Mean seconds per step waits for its last ranks, by undelayed arrival."""
    return self.persistent.seconds + self.intermittent.seconds

  def of_nobody(self) -> Lateness:
    """The same with no rank to blame: all waiting is for intermittently late ranks."""
    return self._replace(episodes=(), persistent=self.persistent * 0.0,
                         intermittent=self.intermittent + self.persistent)


def find_late(run_totals: RunTotals) -> Lateness:
  """Tests every rank against the typical one, between the changes of its own level.

  Returns:
    The lateness of every rank. `persistent` + `intermittent` is the mean earliness of each
    collective, exactly.
  """
  selected, totals, step_time = run_totals.selected, run_totals.totals, run_totals.mean_step
  ranks, size = len(totals.present), max(1, selected.size)
  eligible = totals.present >= max(1, selected.size / 2)
  arrival = ratio(totals.lateness.sum(axis=0), totals.block_steps)
  if totals.late_in_all is not None:  # of all steps, not only of those that are detailed
    arrival = np.where(np.isfinite(arrival) & np.isfinite(totals.late_in_all), totals.late_in_all,
                       arrival)
  blocks = Blocks(arrival, totals.block_steps, eligible, step_time, without_outages(arrival),
                  totals.groups.joined)
  earliness = np.nan_to_num(mean_known(totals.earliness))
  waiting = selected.means(totals.earliness.sum(axis=0))
  if eligible.sum() < 2 or not step_time > 0:
    every = WaitedFor(earliness, 0.0, waiting)
    return Lateness(
        mean=np.where(eligible, 0.0, np.nan), confidence=np.full(ranks, np.nan), episodes=(),
        persistent=every * 0.0, intermittent=every, blocks=blocks)
  tested = blocks.test(range(ranks), 0, selected.blocks, ranks)
  whole = ratio(np.nansum(arrival * totals.block_steps, axis=1), totals.block_steps.sum(axis=1))
  mean = np.where(eligible, whole - _typical_level(blocks, whole, selected.blocks), np.nan)
  # a rank later than the others on average for a few long gaps is not late
  episodes = tuple(e for e in find_episodes(blocks, selected.size)
                   if not _pauses(run_totals, blocks, e))
  held = attributed_wait(totals, selected, episodes)
  gaps = max(float(totals.waiting_gap[selected.mask].sum()) / size - held.for_gaps, 0.0)
  left = earliness - held.by_collective
  return Lateness(
      mean=mean, confidence=np.where(eligible, [t.confidence for t in tested], np.nan),
      episodes=episodes, persistent=held,
      intermittent=WaitedFor(left, min(gaps, float(left.sum())), waiting - held.by_block),
      blocks=blocks)


def _typical_level(blocks: Blocks, mean: np.ndarray, size: int) -> np.ndarray:
  """[R] mean arrival of the typical ranks of those that each rank meets."""
  level = np.full(len(mean), np.nan)
  for number in np.unique(blocks.joined):
    own = np.flatnonzero(blocks.joined == number)
    typical = blocks.typical(0, size, int(own[0]))
    if typical.size:
      level[own] = mean[typical].mean()
  return level


def costliest_first(episodes: Sequence[Episode]) -> list[int]:
  """The ranks of the episodes, by what their lateness adds up to over its steps."""
  cost: dict[int, float] = {}
  for e in episodes:
    cost[e.rank] = cost.get(e.rank, 0.0) + e.lateness * e.steps
  return sorted(cost, key=lambda rank: -cost[rank])


def attributed_wait(totals: Totals, selected: SelectedSteps,
                    episodes: Sequence[Episode]) -> WaitedFor:
  """The waiting that is for the ranks of `episodes` while they are late: highest of their mean A,
  less mean A.

  Between two edges of episodes the mean over steps of max A - mean A splits exactly into this and
  the rest.
  """
  slots = len(totals.lateness)
  by_collective, each_block, for_gaps = np.zeros(slots), np.zeros(selected.blocks), 0.0
  edges = sorted({edge for e in episodes for edge in (e.begin, e.end)})
  earliness = np.stack([selected.sums(row) for row in totals.earliness])
  steps = selected.number
  for begin, end in zip(edges[:-1], edges[1:], strict=True):
    own = sorted({e.rank for e in episodes if e.begin <= begin and e.end >= end})
    number = int(steps[begin:end].sum())
    present = totals.block_steps[own, begin:end].sum(axis=1)
    if not own or not number or not present.any():
      continue
    present = np.maximum(present, 1)
    mean = totals.lateness[:, own, begin:end].sum(axis=2) / present  # [C, own]
    seconds = _held_by_group(totals, mean, own, slice(begin, end), number)
    seconds = np.clip(seconds, 0.0, earliness[:, begin:end].sum(axis=1) / number)
    by_collective += seconds * number / max(1, selected.size)
    each_block[begin:end] += seconds.sum()
    worst = int(mean[0].argmax())
    gap = float(totals.lateness_runtime[own[worst], begin:end].sum() / present[worst])
    # in whatever collectives others wait for that
    if gap > 0:
      of_rank = max(float(mean[:, worst].sum()), gap)
      for_gaps += float(seconds.sum()) * gap / of_rank * number / max(1, selected.size)
  return WaitedFor(by_collective, float(for_gaps), each_block)


def _held_by_group(totals: Totals, mean: np.ndarray, own: Sequence[int], span: slice,
                   number: int) -> np.ndarray:
  """[C] seconds that the job waits for some ranks, of which each holds up those of its own group,
  and who wait for it."""
  seconds = np.zeros(len(mean))
  ranks = totals.group_of.shape[1]
  for c, direct in enumerate(totals.groups.direct):
    rows = totals.group_of[c, list(own)]
    if (direct & totals.groups.levels[c])[totals.group_of[c] < len(totals.collective_of)].all():
      for row in np.unique(rows[rows < len(totals.collective_of)]):
        seconds[c] += mean[c, rows == row].max() * (totals.group_of[c] == row).sum() / ranks
    else:  # what is waited on their account
      seconds[c] = totals.charged[c][list(own), span].sum() / number
  return seconds


def beyond_typical(totals: Totals, blocks: Blocks, episode: Episode, sums: np.ndarray
                   ) -> np.ndarray:
  """[...] by which a late rank's mean of [..., R, B] sums is more than the typical rank's, while it
  is late."""
  span = slice(episode.begin, episode.end)
  mean = sums[..., span].sum(axis=-1) / np.maximum(totals.block_steps[:, span].sum(axis=1), 1)
  typical = blocks.typical(episode.begin, episode.end, episode.rank)
  return np.asarray(mean[..., episode.rank]
                    - (mean[..., typical].mean(axis=-1) if typical.size else 0.0))


def longer_gap(totals: Totals, blocks: Blocks, episode: Episode) -> float:
  """Seconds by which a late rank's mean gap is longer than the typical rank's, while it is late."""
  return float(beyond_typical(totals, blocks, episode, totals.lateness_runtime))


def _pauses(run_totals: RunTotals, blocks: Blocks, episode: Episode) -> bool:
  """Whether the rank is late for a few long gaps: beyond the typical rank's its mean gap is long,
  its median gap is not. Gaps that are long on all ranks make none late."""
  run = run_totals.run
  if "gap" not in run.durations:
    return False
  steps = np.flatnonzero(run_totals.selected.within(episode.begin, episode.end))
  steps = steps[::max(1, len(steps) // SAMPLED)]
  typical = blocks.typical(episode.begin, episode.end, episode.rank)
  every = run.durations["gap"][:, steps].astype(np.float64)
  gaps = every[episode.rank] - (mean_known(every[typical], axis=0) if typical.size else 0.0)
  gaps = gaps[np.isfinite(gaps)]
  if not gaps.size:
    return False
  now_and_then = min(longer_gap(run_totals.totals, blocks, episode),
                     float(gaps.mean() - np.median(gaps)))
  return now_and_then >= MOST * episode.lateness


# When something began and ended, to the step, and how to say so.

def rank_change(run: Run, selected: SelectedSteps, rank: int, block: int) -> int:
  """Number of the step at which a rank's arrival changed its level, near the beginning of `block`.

  The best of all splits of the neighbouring blocks' steps.
  """
  began = selected.first_step(run, block)
  steps = _around(selected, block, KEPT // (run.ranks * max(1, len(run.collectives))))
  first, last = run.steps[steps[[0, -1]]].tolist()
  if run.aggregated is not None and last - first <= SAMPLED:
    numbers, values = late_in(run, rank, first, last)
    return split_series(values, numbers, began)
  if steps[-1] - steps[0] > SAMPLED:
    return began
  part = slice(int(steps[0]), int(steps[-1]) + 1)
  work = busy(run, part)
  arrival = work.undelayed.sum(axis=0)
  late = arrival - Grouped(work.meetings.joined).mean(arrival, work.valid)
  return split_series(late[rank, steps - part.start], run.steps[steps], began)


def series_changes(run: Run, selected: SelectedSteps, values: np.ndarray, begin: int, end: int
                   ) -> tuple[int | None, int | None]:
  """First and last step of a stretch of blocks in which a [K] series of the job has another level;
  None where the stretch reaches the run's beginning or end."""

  def change(block: int) -> int:
    steps = _around(selected, block)
    return split_series(values[steps], run.steps[steps], selected.first_step(run, block))

  return change(begin) if begin else None, change(end) - 1 if end < selected.blocks else None


def _around(selected: SelectedSteps, block: int, most: int = SAMPLED) -> np.ndarray:
  """Places of the steps of the blocks around the beginning of one: as many blocks as a level has at
  least, fewer where they are long."""
  width = int(np.clip(min(most, SAMPLED) * selected.blocks // (2 * selected.size), 1, SHORTEST))
  return np.flatnonzero(selected.within(block - width, block + width))


_AS_GOOD = 0.1
"""Of a step of the new level, by which two dates of a change are equally good. Set on made-up
series: it errs less often where steps pause, and no more where they don't."""


def split_series(values: np.ndarray, numbers: np.ndarray, about: int) -> int:
  """Number of the step at which a series changes from one level to another.

  The levels are the medians before and after `about`, and no value counts for more than lies
  between them: a pause, however long, is no change.

  Args:
    values: [K] NaN where not known.
    numbers: [K] of the steps, rising.
    about: number of a step near the change.
  """
  known = np.isfinite(values)
  values, numbers = values[known], numbers[known]
  after = numbers >= about
  if after.all() or not after.any():
    return about
  old, new = np.median(values[~after]), np.median(values[after])
  if old == new:
    return about
  part = np.clip((values - old) / (new - old), 0.0, 1.0)  # of the way from one to the other
  rest = np.cumsum((part - 0.5)[:0:-1])[::-1]  # beyond the middle, from each step on
  # a pause shortly before a change makes an earlier one look as good
  return int(numbers[1 + np.flatnonzero(rest >= rest.max() - _AS_GOOD)[-1]])


def spell(first: int | None, last: int | None) -> str:
  """How a stretch of steps reads.

  >>> spell(None, None), spell(120, None), spell(120, 180), spell(None, 99)
  ('throughout', 'from step 120 on', 'from step 120 to 180 only', 'up to step 99')
  """
  if first is None and last is None:
    return "throughout"
  if last is None:
    return f"from step {first} on"
  if first is None:
    return f"up to step {last}"
  return f"from step {first} to {last} only"
