"""Which steps count: those in the window whose times are known, without the warm-up."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

import numpy as np

from jaxpace.diagnose.limits import CELLS, MIN_STEPS
from jaxpace.runs.run import MISSING, AllSteps, Run

# Chosen by hand; no measurement of them is published.
WARMUP_STEPS = 20
WARMUP_FACTOR = 3.0
MAX_BLOCKS = 256
"""Blocks of neighbouring steps, at most, that say when something began and ended."""
MAX_COARSE = 32
"""Blocks of neighbouring steps, at most, that statistics are made of."""
LONGEST = 1e6
"""Seconds from one exit to the next, at most: no step takes eleven days. Nor does one take no time,
or less."""
_UNFINISHED = 10.0
"""Seconds of steps at the end that some ranks' rows are missing from: a recorder copies its
timestamps each second and writes them each other one, on a slow disk later."""


class SelectedSteps(NamedTuple):
  """The steps statistics are made of."""

  mask: np.ndarray  # [K] bool
  warmup: np.ndarray  # step numbers left out as warm-up
  # [K] int32, block of neighbouring counted steps, -1 for a step that doesn't count
  block: np.ndarray
  blocks: int
  unfinished: np.ndarray  # numbers of the last steps, of which rows of some ranks are missing
  recorded: int = 0  # step numbers of the window with a row of any rank
  impossible: int = 0  # steps left out because no clock can have read their times
  # Where only some steps are detailed, else None: which of all the run's steps count, bool, and
  # [n] s, how long these take, mean over ranks.
  mask_of_all: np.ndarray | None = None
  times_in_all: np.ndarray | None = None
  # [n] s, how long those take that are left out since the step was compiled for them anew
  of_others: np.ndarray = np.empty(0)
  # [R] s, mean gap before these, NaN where not known
  gap_of_others: np.ndarray = np.empty(0)

  @property
  def size(self) -> int:
    return int(self.mask.sum())

  @property
  def number(self) -> np.ndarray:
    """[B] steps of each block."""
    return np.bincount(self.block[self.mask], minlength=self.blocks)

  def divided(self, most: int) -> SelectedSteps:
    """The same in so many blocks, or one for each step where there are no more of them."""
    blocks = min(self.size, most)
    return self._replace(block=_even_blocks(self.mask, blocks), blocks=blocks)

  def spans(self, run: Run) -> tuple[np.ndarray, np.ndarray]:
    """[B] numbers of the first and the last step of each block."""
    steps, end = run.steps[self.mask], np.cumsum(self.number)
    return steps[end - self.number], steps[end - 1]

  def first_step(self, run: Run, block: int) -> int:
    """Number of the first step of a block."""
    return int(run.steps[int(np.flatnonzero(self.block == block)[0])])

  def within(self, begin: int, end: int) -> np.ndarray:
    """[K] bool, the counted steps of the blocks from `begin` to before `end`."""
    return (self.block >= begin) & (self.block < end)

  def sums(self, values: np.ndarray) -> np.ndarray:
    """Sums of the known values of each block: [K] -> [B]; what is not finite is left out."""
    use = self._use(values)
    return np.bincount(self.block[use], values[use], self.blocks)

  def means(self, values: np.ndarray) -> np.ndarray:
    """Means of the known values of each block: [K] -> [B]; NaN where nothing is known."""
    number = np.bincount(self.block[self._use(values)], minlength=self.blocks)
    return ratio(self.sums(values), number)

  def medians(self, values: np.ndarray) -> np.ndarray:
    """Medians of the known values of each block: [K] -> [B]; NaN where nothing is known."""
    use = np.flatnonzero(self._use(values))
    begin = np.searchsorted(self.block[use], np.arange(1, self.blocks))
    return medians_known(np.split(values[use], begin))

  def _use(self, values: np.ndarray) -> np.ndarray:
    return np.isfinite(values) & (self.block >= 0)


class StepTime(NamedTuple):
  """Statistics of the job's step time: the mean over ranks of exit to exit. Seconds."""

  mean: float
  median: float
  p99: float
  cv: float  # standard deviation over mean


def step_time_of(steps: np.ndarray) -> StepTime:
  """The statistics of some steps, seconds."""
  mean = float(steps.mean())
  return StepTime(mean, float(np.median(steps)), float(np.quantile(steps, 0.99)),
                  float(steps.std()) / mean if mean > 0 else 0.0)


def ratio(total: np.ndarray | float, number: np.ndarray,
          otherwise: float = float("nan")) -> np.ndarray:
  """Total over number, element by element; `otherwise` where the number isn't above 0."""
  shape = np.broadcast_shapes(np.shape(total), number.shape)
  return np.divide(total, number, out=np.full(shape, otherwise), where=number > 0)


def into_blocks(block: np.ndarray) -> Callable[..., None]:
  """What adds [..., k] values of neighbouring steps to [..., B] sums of their blocks, [k]; or takes
  their maximum, np.maximum.

  Steps that don't count, of block -1, lie between or inside blocks: they hold 0, or nothing larger.
  """
  selected = np.flatnonzero(block >= 0)
  first = selected[np.flatnonzero(np.diff(block[selected], prepend=-1))]

  def into(total: np.ndarray, values: np.ndarray, how: np.ufunc = np.add) -> None:
    own = (..., block[first])
    total[own] = how(total[own], how.reduceat(values, first, axis=-1, dtype=total.dtype))

  return into


def slices(size: int, each: int) -> Iterator[slice]:
  """Slices of `size` things, of `each` values, that are quick to work on."""
  width = max(1, CELLS // max(1, each))
  for begin in range(0, size, width):
    yield slice(begin, min(begin + width, size))


def mean_known(values: np.ndarray, axis: int = -1) -> np.ndarray:
  """Mean along an axis over what is known; NaN where nothing is."""
  known = np.isfinite(values)
  return ratio(np.where(known, values, 0.0).sum(axis=axis, dtype=np.float64), known.sum(axis=axis))


def medians_known(rows: Iterable[np.ndarray]) -> np.ndarray:
  """Median of what is known of each row; NaN where nothing is."""
  known = [row[np.isfinite(row)] for row in rows]
  return np.array([np.median(row) if row.size else np.nan for row in known], np.float64)


def merged(values: np.ndarray, weights: np.ndarray) -> np.ndarray:
  """Means over `MAX_COARSE` groups of neighbouring blocks; NaN where nothing is known.

  Args:
    values: [..., B] means of blocks, NaN where not known.
    weights: [..., B] steps behind each.
  """
  blocks = values.shape[-1]
  groups = min(blocks, MAX_COARSE)
  begin = -(-np.arange(groups) * blocks // groups)
  weights = np.where(np.isfinite(values), weights, 0)
  total = np.add.reduceat(np.where(weights > 0, values, 0.0) * weights, begin, axis=-1)
  return ratio(total, np.add.reduceat(weights, begin, axis=-1))


def rank_steps(every: AllSteps, part: slice) -> np.ndarray:
  """[R, k] seconds from a rank's exit to its next one, of the steps in `part`; NaN where one of
  both is missing, or the rank has no row of the newest attempt."""
  begin = max(part.start, 1)
  times = np.full((len(every.attempt), part.stop - part.start), np.nan)
  now, then = slice(begin, part.stop), slice(begin - 1, part.stop - 1)
  attempt, last = every.attempt, every.end_ns
  known = ((last[:, now] != MISSING) & (last[:, then] != MISSING)
           & (attempt[:, now] == attempt[:, then])
           & (attempt[:, now] == attempt[:, now].max(axis=0))
           & (np.diff(every.steps[begin - 1:part.stop]) == 1))
  times[:, begin - part.start:][known] = (last[:, now] - last[:, then])[known] * 1e-9
  return times


def step_times(run: Run) -> np.ndarray:
  """[K] mean over ranks of the time from exit to exit, seconds; NaN where no rank's is known."""
  times = _all_times(run.all_steps)
  return times if run.aggregated is None else times[_places(run)]


def _places(run: Run) -> np.ndarray:
  """[D] place of each detailed step among all."""
  return np.searchsorted(run.all_steps.steps, run.steps)


def _all_times(every: AllSteps) -> np.ndarray:
  return np.concatenate([np.empty(0), *(mean_known(rank_steps(every, part), axis=0) for part in
                                        slices(len(every.steps), len(every.attempt)))])


def count_steps(run: Run) -> SelectedSteps:
  """Chooses the steps that count.

  The first step of an attempt never does: its arrival has no exit to start from. Nor does the
  warm-up, when programs compile and caches fill: of the first 20 steps of each attempt (a fifth of
  a shorter run), those up to the last one that took more than 3 times the median step. Of a run of
  which only some steps are detailed, those among them count that do among all; and none of another
  shape of the step, which may be the very ones in which the job does something else as well.
  """
  every = run.all_steps
  times = _all_times(every)
  known = np.isfinite(times) & run.asked(every.steps)
  mask = known & is_possible(times)
  warmup = _warmup(run, every, times, mask)
  left_out, impossible = every.steps[mask & warmup], int((known & ~mask).sum())
  mask &= ~warmup
  others = np.zeros_like(mask) if every.others is None else every.others
  of_others = times[mask & others]
  gaps = (np.empty(0) if every.gap_of_others is None or not of_others.size
          else mean_known(every.gap_of_others[:, mask[others]], axis=1))
  mask &= ~others
  counted = times[mask]
  of_all = None, None
  if run.aggregated is not None:
    of_all = mask, counted
    mask = mask[_places(run)]
  blocks = int(np.clip(mask.sum() // 5, 1, MAX_BLOCKS))
  return SelectedSteps(mask, left_out, _even_blocks(mask, blocks), blocks, left_out[:0], 0,
                       impossible, *of_all, of_others, gaps)


def _even_blocks(mask: np.ndarray, blocks: int) -> np.ndarray:
  """[K] int32, blocks of as many counted steps each as the others, by one at most; -1 for a step
  that doesn't count."""
  size = int(mask.sum())
  block = np.full(len(mask), -1, np.int32)
  block[mask] = np.arange(size) * blocks // max(1, size)
  return block


def _warmup(run: Run, every: AllSteps, times: np.ndarray, known: np.ndarray) -> np.ndarray:
  """[K] bool, the steps from each attempt's first to the last slow one of its beginning."""
  warmup = np.zeros(len(times), bool)
  if not known.any():
    return warmup
  slow = known & (np.nan_to_num(times) > WARMUP_FACTOR * np.median(times[known]))
  newest = every.attempt.max(axis=0)
  length = min(WARMUP_STEPS, int(known.sum()) // 5)
  # Steps that were not recorded end no attempt: a sampled run has more of those than others.
  recorded = np.flatnonzero(newest >= 0)
  for first in np.flatnonzero(np.diff(newest[recorded], prepend=-2) != 0):
    begin = int(recorded[first])
    # A window that opens in the middle of the run has no warm-up.
    if (run.window[0] is not None and begin <= 1 and every.steps[begin] > 0
        and every.steps[begin] == run.window[0] - 1):
      continue
    own = recorded[first:first + length]
    late = own[slow[own]]
    if late.size:
      warmup[begin:late[-1] + 1] = True
  return warmup


def is_possible(times: np.ndarray) -> np.ndarray:
  """Which times of steps, in seconds, a clock can have read; False for NaN."""
  return (times > 0) & (times < LONGEST)


def without_unfinished(run: Run) -> tuple[Run, np.ndarray]:
  """Leaves out the last steps, where ranks that were recorded until then are not.

  Lateness is known of the ranks that are there: of two processes, one's ranks would be in time
  where the other's are missing. A rank that stops recording for good, while the others go on for
  long, is another matter: those steps count.

  Returns:
    The run with its window ending before them, and their numbers.
  """
  every = run.all_steps
  asked = run.asked(every.steps)
  begin = max(0, len(asked) - max(MIN_STEPS, CELLS // max(1, run.ranks)))
  attempt, inside = every.attempt[:, begin:], asked[begin:]
  some = np.flatnonzero((attempt >= 0).any(axis=0) & inside)
  if not some.size:
    return run, np.empty(0, np.int64)
  current = (attempt == attempt[:, some[-1]].max()) & inside
  there = current[current.any(axis=1)]
  last = int((there.shape[1] - 1 - there[:, ::-1].argmax(axis=1)).min())
  left_out = begin + some[some > last]
  if (not left_out.size or np.nansum(_all_times(every)[left_out]) > _UNFINISHED
      or int(asked[:begin + last + 1].sum()) <= MIN_STEPS):
    return run, np.empty(0, np.int64)
  return (dataclasses.replace(run, window=(run.window[0], int(every.steps[begin + last]) + 1)),
          every.steps[left_out])
