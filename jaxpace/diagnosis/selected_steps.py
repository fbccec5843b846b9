"""Which steps count: those in the window whose times are known, without the warm-up."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import numpy as np

from jaxpace.trace.run import MISSING, Run

# Chosen by hand; no measurement of them is published.
WARMUP_STEPS = 20
WARMUP_FACTOR = 3.0
MAX_BLOCKS = 256
"""Blocks of neighbouring steps, at most, that say when something began and ended."""
MAX_COARSE = 32
"""Blocks of neighbouring steps, at most, that statistics are made of."""
_LONGEST = 1e6
"""Seconds from one exit to the next, at most: no step takes eleven days. Nor does one take no time,
or less."""
_UNFINISHED = 10.0
"""Seconds of steps at the end that some ranks' rows are missing from: a recorder copies its stamps
each second and writes them each other one, on a slow disk later."""
_AT_THE_END = 1 << 14
"""Steps at the end that are looked at for that."""
MIN_STEPS = 20
"""Fewer counted steps than these carry no finding."""


class SelectedSteps(NamedTuple):
  """The steps statistics are made of."""

  mask: np.ndarray  # [K] bool
  warmup: np.ndarray  # step numbers left out as warm-up
  # [K] int32, block of neighbouring counted steps, -1 for a step that doesn't count
  block: np.ndarray
  blocks: int
  impossible: int = 0  # steps left out because no clock can have read their times

  @property
  def size(self) -> int:
    return int(self.mask.sum())

  def first_step(self, run: Run, block: int) -> int:
    """Number of the first step of a block."""
    return int(run.steps[int(np.flatnonzero(self.block == block)[0])])

  def last_step(self, run: Run, block: int) -> int:
    """Number of the last step of a block."""
    return int(run.steps[int(np.flatnonzero(self.block == block)[-1])])

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
    return np.divide(self.sums(values), number, out=np.full(self.blocks, np.nan), where=number > 0)

  def medians(self, values: np.ndarray) -> np.ndarray:
    """Medians of the known values of each block: [K] -> [B]; NaN where nothing is known."""
    use = np.flatnonzero(self._use(values))
    order = np.lexsort((values[use], self.block[use]))
    block, ordered = self.block[use][order], values[use][order]
    first = np.searchsorted(block, np.arange(self.blocks))
    number = np.append(first[1:], len(block)) - first
    found = np.full(self.blocks, np.nan)
    some = np.flatnonzero(number)
    found[some] = (
        (ordered[first[some] + (number[some] - 1) // 2] + ordered[first[some] + number[some] // 2])
        / 2)
    return found

  def _use(self, values: np.ndarray) -> np.ndarray:
    return np.isfinite(values) & (self.block >= 0)


def merged(values: np.ndarray, weights: np.ndarray, most: int = MAX_COARSE) -> np.ndarray:
  """Means over groups of neighbouring blocks, at most `most` of them; NaN where nothing is known.

  Args:
    values: [..., B] means of blocks, NaN where not known.
    weights: [..., B] steps behind each.
    most: groups.
  """
  blocks = values.shape[-1]
  groups = min(blocks, most)
  begin = -(-np.arange(groups) * blocks // groups)
  weights = np.where(np.isfinite(values), weights, 0)
  total = np.add.reduceat(np.where(weights > 0, values, 0.0) * weights, begin, axis=-1)
  number = np.add.reduceat(weights, begin, axis=-1)
  return np.divide(total, number, out=np.full(total.shape, np.nan), where=number > 0)


def step_times(run: Run) -> np.ndarray:
  """[K] mean over ranks of the time from exit to exit, seconds; NaN where no rank's is known."""
  last: np.ndarray | None
  if run.collectives:
    attempt = run.collectives[0].attempt
    last = run.collectives[0].exit_ns
    for collective in run.collectives[1:]:
      last = np.maximum(last, collective.exit_ns)
  else:
    attempt, last = run.attempt, run.end_ns
  if run.previous_exit is not None and last is not None:
    known = (run.previous_exit != MISSING) & (last != MISSING)
    known &= run.attempt == run.attempt.max(axis=0)
    total = np.where(known, last - np.where(known, run.previous_exit, 0), 0).sum(axis=0)
    number = known.sum(axis=0)
    return np.divide(total * 1e-9, number, out=np.full(len(number), np.nan), where=number > 0)
  times = np.full(len(run.steps), np.nan)
  if last is None or len(run.steps) < 2:
    return times
  width = 1 << 14
  adjacent = np.diff(run.steps) == 1
  for begin in range(1, len(run.steps), width):
    now, then = (slice(begin, begin + width),
                 slice(begin - 1, min(begin - 1 + width, len(run.steps) - 1)))
    newest = attempt[:, now].max(axis=0)
    known = ((last[:, now] != MISSING) & (last[:, then] != MISSING)
             & (attempt[:, now] == attempt[:, then])
             & (attempt[:, now] == newest) & adjacent[then])
    count = known.sum(axis=0)
    total = np.where(known, last[:, now] - last[:, then], 0).sum(axis=0)
    times[now] = np.divide(total * 1e-9, count, out=np.full(len(count), np.nan), where=count > 0)
  return times


def count_steps(run: Run) -> SelectedSteps:
  """Chooses the steps that count.

  The first step of an attempt never does: its arrival has no exit to start from. Nor does the
  warm-up, when programs compile and caches fill: of the first 20 steps of each attempt (a fifth of
  a shorter run), those up to the last one that took more than 3 times the median step. Of a run of
  which only some steps are written in full, those among them count that do among all.
  """
  times = step_times(run)
  known = np.isfinite(times) & run.inside
  mask = known & is_possible(times)
  impossible = int((known & ~mask).sum())
  warmup = np.zeros_like(mask)
  left_out = None
  if run.whole is not None:
    whole = count_steps(run.whole)
    mask &= whole.mask[np.searchsorted(run.whole.steps, run.steps)]
    left_out, impossible = whole.warmup, whole.impossible
  elif mask.any():
    slow = mask & (np.nan_to_num(times) > WARMUP_FACTOR * np.median(times[mask]))
    newest = run.attempt.max(axis=0)
    length = min(WARMUP_STEPS, int(mask.sum()) // 5)
    # Steps that were not recorded end no attempt: a sampled run has more of those than others.
    recorded = np.flatnonzero(newest >= 0)
    for first in np.flatnonzero(np.diff(newest[recorded], prepend=-2) != 0):
      begin = int(recorded[first])
      # A window that opens in the middle of the run has no warm-up.
      if (run.window[0] is not None and begin <= 1 and run.steps[begin] > 0
          and run.steps[begin] == run.window[0] - 1):
        continue
      own = recorded[first:first + length]
      late = own[slow[own]]
      if late.size:
        warmup[begin:late[-1] + 1] = True
  left_out = run.steps[mask & warmup] if left_out is None else left_out
  mask &= ~warmup
  blocks = int(np.clip(mask.sum() // 5, 1, MAX_BLOCKS))
  block = np.full(len(mask), -1, np.int32)
  block[mask] = np.arange(int(mask.sum())) * blocks // max(1, int(mask.sum()))
  return SelectedSteps(mask, left_out, block, blocks, impossible)


def is_possible(times: np.ndarray) -> np.ndarray:
  """Which times of steps, in seconds, a clock can have read; False for NaN."""
  return (times > 0) & (times < _LONGEST)


def without_unfinished(run: Run) -> tuple[Run, np.ndarray]:
  """Leaves out the last steps, where ranks that were recorded until then are not.

  Lateness is told from the ranks that are there: of two processes, one's ranks would be in time
  where the other's are missing. A rank that stops recording for good, while the others go on for
  long, is another matter: those steps count.

  Args:
    run: the recorded run.

  Returns:
    The run with its window ending before them, and their numbers.
  """
  if run.whole is not None:
    whole, numbers = without_unfinished(run.whole)
    return dataclasses.replace(run, whole=whole, window=whole.window), numbers
  begin = max(0, len(run.steps) - _AT_THE_END)
  attempt, inside = run.attempt[:, begin:], run.inside[begin:]
  some = np.flatnonzero((attempt >= 0).any(axis=0) & inside)
  if not some.size:
    return run, np.empty(0, np.int64)
  current = (attempt == attempt[:, some[-1]].max()) & inside
  there = current[current.any(axis=1)]
  last = int((there.shape[1] - 1 - there[:, ::-1].argmax(axis=1)).min())
  left_out = begin + some[some > last]
  if (not left_out.size or np.nansum(step_times(run)[left_out]) > _UNFINISHED
      or int(run.inside[:begin + last + 1].sum()) <= MIN_STEPS):
    return run, np.empty(0, np.int64)
  return (dataclasses.replace(run, window=(run.window[0], int(run.steps[begin + last]) + 1)),
          run.steps[left_out])
