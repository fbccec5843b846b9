"""From when to when a late rank is late, looked at a second time, step by step: what others' noise
hides.

Stretches come from means over blocks of steps. Where the other ranks are slow as well for a while,
a job's start say, a rank that is late in every step looks in time by its mean, and its fault would
be dated too late.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from jaxpace.diagnosis.accounting import busy, chunks
from jaxpace.diagnosis.changes import change_points
from jaxpace.diagnosis.episodes import FEWEST_STEPS, Blocks, Episode
from jaxpace.diagnosis.selected_steps import SelectedSteps
from jaxpace.diagnosis.totals import undelayed
from jaxpace.trace.run import Run

# Set looking at the fault lab's runs of seeds 0 to 3; measurements/fault_lab_seed4 is what they are
# worth on others.
_CELLS = 1 << 20
"""Ranks times steps, at most, of a run that is looked at as a whole."""
_WIDEST = 4096
"""Steps next to an episode that are looked at."""
_PART = 0.5
_SURE = 2.0
"""Standard deviations of a sign test (one in 40) by which a rank must be late by less than half of
the episode's lateness in more steps than not, before it is said to have been in time."""


def whole_stretches(run: Run, selected: SelectedSteps, episodes: Sequence[Episode],
                    blocks: Blocks) -> list[Episode]:
  """Joins episodes with the stretches next to them in which the rank can't be told to have been in
  time.

  Args:
    run: the recorded run.
    selected: its steps that count.
    episodes: who is late when, by means of blocks.
    blocks: arrivals.
  """
  found: list[Episode] = []
  for rank in sorted({e.rank for e in episodes}):
    own = sorted((e for e in episodes if e.rank == rank), key=lambda e: e.begin)
    if (own[0].begin, own[0].end) == (0, selected.blocks):
      found += _parts(run, selected, blocks, own[0])
      continue
    edges = [0, *(edge for e in own for edge in (e.begin, e.end)), selected.blocks]
    gaps = [(edges[i], edges[i + 1]) for i in range(0, len(edges), 2)]
    joins = [begin < end and _still_late(run, selected, blocks,
                                         min(beside, key=lambda e: e.lateness), begin, end)
             for (begin, end), beside in zip(gaps, _beside(own), strict=True)]
    if not any(joins):
      found += own
      continue
    spans: list[list[int]] = []
    for i, e in enumerate(own):
      begin = gaps[i][0] if joins[i] else e.begin
      if spans and joins[i]:
        spans[-1][1] = e.end
      else:
        spans.append([begin, e.end])
    if joins[-1]:
      spans[-1][1] = selected.blocks
    for begin, end in spans:
      test = blocks.test([rank], begin, end, len(blocks.eligible))[0]
      inside = [e for e in own if begin <= e.begin and e.end <= end]
      # What the others' noise hides makes it no less sure that the rank is late at all.
      sure = max(test.confidence, max(e.confidence for e in inside))
      lateness = max(test.lateness, sum(e.lateness * e.steps for e in inside) / max(
          1, int(blocks.steps[rank, begin:end].sum())))
      found.append(Episode(rank, begin, end, int(blocks.steps[rank, begin:end].sum()),
                           lateness, sure, test.persistence))
  return found


def _beside(own: Sequence[Episode]) -> list[tuple[Episode, ...]]:
  """For each gap the episodes next to it: one at the ends, two in between."""
  return [(own[0],), *zip(own[:-1], own[1:], strict=True), (own[-1],)]


def _still_late(run: Run, selected: SelectedSteps, blocks: Blocks, episode: Episode, begin: int,
                end: int) -> bool:
  """Whether a rank is as good as late in a gap: by its median, and not in time in significantly
  more steps than not."""
  steps = np.flatnonzero(selected.within(begin, end))
  if not steps.size or steps[-1] - steps[0] > _WIDEST:
    return False
  late = _after_typical(run, episode.rank,
                        slice(int(steps[0]), int(steps[-1]) + 1))[steps - steps[0]]
  late = late[np.isfinite(late)]
  if not late.size:
    return False
  below = int((late < _PART * episode.lateness).sum())
  return 2 * below - len(late) < _SURE * math.sqrt(len(late))


def _after_typical(run: Run, rank: int, part: slice) -> np.ndarray:
  """[k] seconds by which a rank arrives after the lower median of the others in each step; NaN
  where not known."""
  arrival = undelayed(busy(run, part)).sum(axis=0)
  others = np.delete(arrival, rank, axis=0)
  known = np.isfinite(others)
  order = np.sort(np.where(known, others, np.inf), axis=0)
  typical = np.take_along_axis(order, (np.maximum(known.sum(axis=0) - 1, 0) // 2)[None], axis=0)[0]
  return np.where(np.isfinite(typical), arrival[rank] - typical, np.nan)


def _parts(run: Run, selected: SelectedSteps, blocks: Blocks, episode: Episode) -> list[Episode]:
  """The stretches of the run in which a rank that is late over the whole of it really is: by each
  step's share of its lateness, cut at nothing and at twice as much, so that few long steps hide no
  change.
  """
  if run.ranks * len(run.steps) > _CELLS:
    return [episode]
  late = np.concatenate([_after_typical(run, episode.rank, part) for part in chunks(run)])
  share = np.clip(late / max(episode.lateness, 1e-12), 0.0, 2.0)
  edges = [0, *change_points(selected.means(np.where(selected.mask, share, np.nan))[None])[0],
           selected.blocks]
  spans = list(zip(edges[:-1], edges[1:], strict=True))
  level = [float(np.nanmedian(late[selected.within(*span)])) for span in spans]
  # What is usual for it is its level where that costs most: it may be later still for a short
  # while.
  usual = max(zip(spans, level, strict=True),
              key=lambda own: own[1] * selected.within(*own[0]).sum())[1]
  high = [span for span, value in zip(spans, level, strict=True) if value >= _PART * usual]
  if len(high) == len(spans):
    return [episode]
  joined: list[list[int]] = []
  for begin, end in high:
    if joined and joined[-1][1] == begin:
      joined[-1][1] = end
    else:
      joined.append([begin, end])
  found = []
  for begin, end in joined:
    number = int(blocks.steps[episode.rank, begin:end].sum())
    test = blocks.test([episode.rank], begin, end, len(blocks.eligible))[0]
    if number >= FEWEST_STEPS and test.late(blocks.step_time):
      found.append(Episode(episode.rank, begin, end, number, *test))
  return found or [episode]
