"""Adds the account of every step up: per step over ranks, per rank over steps."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np

from jaxpace.diagnose.accounting import Account, account, overlap_of
from jaxpace.diagnose.groups import Grouped, RunGroups, run_groups
from jaxpace.diagnose.selected_steps import (
  SelectedSteps,
  into_blocks,
  rank_steps,
  ratio,
  slices,
)
from jaxpace.diagnose.step_times import StepTimes, busy, chunks
from jaxpace.runs.run import Run

PARTS = ("step", "compute", "runtime", "pacing", "waiting_compute", "waiting_runtime",
         "waiting_pacing", "spread")


@dataclasses.dataclass
class Totals:
  """Sums over counted steps. C collectives, T groups of ranks that meet in any, R ranks, K steps, B
  blocks of neighbouring steps; seconds."""

  per_step: dict[str, np.ndarray]  # [K] mean over the ranks present, by name in `PARTS`
  per_rank: dict[str, np.ndarray]  # [R] sum over steps, by name in `PARTS`
  transfer: np.ndarray  # [C, K]
  present: np.ndarray  # [R] counted steps in which the rank's whole step is known
  known: np.ndarray  # [R, K] bool, counted steps in which the rank's whole step is known
  earliness: np.ndarray  # [C, K] mean over ranks of undelayed earliness: max A - mean A
  # [K] the part of all collectives' earliness that is for the last rank's longer gap
  waiting_gap: np.ndarray
  lateness: np.ndarray  # [C, R, B] sum of A - mean over ranks of A, undelayed
  lateness_runtime: np.ndarray  # [R, B] sum of own gap - mean over ranks
  block_steps: np.ndarray  # [R, B] steps in which the rank is present, by block
  # [R] sum of the job's mean earliness in the steps and collectives this rank was last at
  blame: np.ndarray
  last: np.ndarray  # [R] steps in which the job waited for this rank
  last_rank: np.ndarray  # [K] the rank the job waited for longest in that step, -1 for none
  delayed: int  # rank-steps with an applied delay
  jumped: np.ndarray  # [R] steps left out because the rank's clock jumped
  overlap: np.ndarray  # [3, C] of collectives under way: exposed, hidden, behind others
  groups: RunGroups
  collective_of: np.ndarray  # [T] collective of each group
  # [C, R] group of each rank, T where it is in none, or nothing is transferred to it
  group_of: np.ndarray
  group_transfer: np.ndarray  # [T, K] NaN where not known
  # [T, K] summed over ranks, waited elsewhere because this transfer was slower than the others
  slow: np.ndarray
  receivers: np.ndarray  # [T, K] ranks to which something is transferred
  charged: np.ndarray  # [C, R, B] sum of the job's mean wait on account of the rank
  held_up: np.ndarray  # [R] waited because of other groups' slow transfers
  computing: float = 0.0  # while any is under way, at least
  late_in_all: np.ndarray | None = None
  """[R, B] busy time of all steps less its mean over ranks, where only some steps are detailed."""


@dataclasses.dataclass(frozen=True, eq=False)
class RunTotals:
  """A run, and what its selected steps add up to: all that comes before a diagnosis is described by
  it."""

  run: Run
  selected: SelectedSteps
  totals: Totals
  mean_step: float  # of the detailed steps, s; NaN where no step is selected

  @property
  def steps(self) -> np.ndarray:
    """[n] s that the steps that count take, those included of which only totals are known."""
    times: np.ndarray = self.totals.per_step["step"][self.selected.mask]
    every = self.selected.times_in_all
    return times if every is None or not times.size or not every.size else every

  @property
  def counted(self) -> int:
    """Steps that count."""
    return len(self.steps)


def lower_median(values: np.ndarray) -> np.ndarray:
  """[...] median of what is known of [R, ...] rows, the lower one of two, so that half of the ranks
  may be late; NaN where nothing is."""
  number = np.isfinite(values).sum(axis=0)
  if number.size and (number == len(values)).all():
    middle = (len(values) - 1) // 2
    return np.asarray(np.partition(values, middle, axis=0)[middle])
  order = np.sort(values, axis=0)  # those not known come last
  return np.take_along_axis(order, np.maximum(number - 1, 0)[None] // 2, axis=0)[0]


def typical(values: np.ndarray, group: np.ndarray) -> np.ndarray:
  """[R, ...] lower median of the ranks of each one's group."""
  found = np.empty(values.shape)
  for number in np.unique(group):
    found[group == number] = lower_median(values[group == number])
  return found


def add_up(run: Run, selected: SelectedSteps,
           progress: Callable[[int, int], None] | None = None) -> Totals:
  """Goes through the run once, a chunk of steps at a time."""
  size, ranks, slots = len(run.steps), run.ranks, max(1, len(run.collectives))
  groups = run_groups(run)
  collective_of, group_of = _numbered(groups)
  number = len(collective_of)
  totals = Totals(
      per_step={name: np.full(size, np.nan) for name in PARTS},
      per_rank={name: np.zeros(ranks) for name in PARTS}, transfer=np.full((slots, size), np.nan),
      present=np.zeros(ranks, np.int64), known=np.zeros((ranks, size), bool),
      earliness=np.full((slots, size), np.nan), waiting_gap=np.zeros(size),
      lateness=np.zeros((slots, ranks, selected.blocks)),
      lateness_runtime=np.zeros((ranks, selected.blocks)),
      block_steps=np.zeros((ranks, selected.blocks), np.int64), blame=np.zeros(ranks),
      last=np.zeros(ranks, np.int64), last_rank=np.full(size, -1, np.int64),
      delayed=0, jumped=np.zeros(ranks, np.int64), overlap=np.zeros((3, slots)),
      groups=groups, collective_of=collective_of, group_of=group_of,
      group_transfer=np.full((number, size), np.nan), slow=np.zeros((number, size)),
      receivers=np.zeros((number, size), np.int32),
      charged=np.zeros((len(group_of), ranks, selected.blocks)), held_up=np.zeros(ranks))
  for part in chunks(run):
    if selected.mask[part].any():
      _add_chunk(totals, run, selected, part)
    if progress:
      progress(part.stop, size)
  if run.aggregated is not None and selected.mask.any():
    totals.late_in_all = late_by_block(run, selected)
  return totals


def _numbered(groups: RunGroups) -> tuple[np.ndarray, np.ndarray]:
  """[T] collective of each group, and [C, R] each rank's group in each, T for none."""
  sizes = [grouped.size for grouped in groups.grouped]
  begin = np.cumsum(sizes) - sizes
  return np.repeat(np.arange(len(sizes)), sizes), np.array([
      np.where((grouped.of_rank < grouped.size) & groups.receives(c), grouped.of_rank + begin[c],
               sum(sizes)) for c, grouped in enumerate(groups.grouped)])


def _add_chunk(totals: Totals, run: Run, selected: SelectedSteps, part: slice) -> None:
  work = busy(run, part)
  valid = work.valid & selected.mask[part]
  work = work._replace(valid=valid)
  split = account(work)
  overlap, computing = overlap_of(work)
  totals.overlap += overlap
  totals.computing += computing
  number = valid.sum(axis=0)
  for name in PARTS:
    values = np.where(valid, getattr(split, name), 0.0)
    totals.per_rank[name] += values.sum(axis=1)
    totals.per_step[name][part] = ratio(values.sum(axis=0), number)
  totals.transfer[:, part] = split.transfer
  totals.present += valid.sum(axis=1)
  totals.known[:, part] = valid
  if work.jumped is not None:
    totals.jumped += (work.jumped & selected.mask[part]).sum(axis=1)
  totals.delayed += int(np.count_nonzero(valid & (work.pacing > 0)))
  into = into_blocks(selected.block[part])
  into(totals.block_steps, valid)
  mean_gap = ratio(np.where(valid, split.runtime, 0.0).sum(axis=0), number)
  into(totals.lateness_runtime, np.where(valid, split.runtime - mean_gap, 0.0))
  alone = split
  if (valid & (work.pacing > 0)).any():
    alone = account(work._replace(arrival=work.undelayed, pacing=np.zeros_like(work.pacing)))
  _add_groups(totals, part, alone)
  if work.synchronised:
    _add_lateness(totals, part, work, alone, number, into)
    waiting = alone.waiting_runtime
    totals.waiting_gap[part] = ratio(np.where(valid, waiting, 0.0).sum(axis=0), number, 0.0)


def _add_lateness(totals: Totals, part: slice, work: StepTimes, alone: Account,
                  number: np.ndarray, into: Callable[..., None]) -> None:
  """Adds who was late and what it cost, by undelayed arrival."""
  groups = totals.groups
  ranks, size = work.valid.shape
  weight = ratio(1.0, number, 0.0)
  charged = np.zeros((ranks, size))
  joined = Grouped(groups.joined)
  for c, (waited, arrival, for_whom) in enumerate(zip(alone.waits, work.undelayed, alone.for_whom,
                                                      strict=True)):
    if not groups.grouped[c].size:
      continue
    # Ranks that are joined by whatever collectives are judged together, by all they do in a step.
    into(totals.lateness[c],
         np.where(work.valid, arrival - joined.mean(arrival, work.valid), 0.0))
    totals.earliness[c, part] = np.where(number > 0, waited.early.sum(axis=0) * weight, np.nan)
    into(totals.charged[c], for_whom)
    charged += for_whom
  totals.blame += charged.sum(axis=1)
  # Ranks that are joined wait for one rank at a time.
  worst = np.full(size, 0.0)
  for part_of_job in range(int(groups.joined.max(initial=0)) + 1):
    own = np.flatnonzero(groups.joined == part_of_job)
    at = charged[own].argmax(axis=0)
    most, last = charged[own].max(axis=0), own[at]
    np.add.at(totals.last, last[most > 0], 1)
    more = most > worst
    worst[more] = most[more]
    totals.last_rank[part][more] = last[more]


def _add_groups(totals: Totals, part: slice, alone: Account) -> None:
  """Adds the transfers of each group, and what they made others wait."""
  totals.held_up += alone.slow.sum(axis=1)
  for c, waited in enumerate(alone.waits):
    grouped = totals.groups.grouped[c]
    if not grouped.size:
      continue
    rows, first = np.unique(totals.group_of[c], return_index=True)
    inside = rows < len(totals.collective_of)
    rows, first = rows[inside], first[inside]
    present = grouped.reduce(np.add, waited.takes.astype(np.int32))
    totals.receivers[rows, part] = present
    totals.group_transfer[rows, part] = np.where(present > 0, waited.transfer[first], np.nan)
    totals.slow[rows, part] = alone.slow_groups[c, first]


# Who is late when, by all steps of an observed run, of which only some are detailed.
#
# A rank's busy time of a step is the step less its time in collectives: the sum of its arrivals.
# What a rank does for longer than the others shows there as it does in the collectives one by one;
# who it made wait, and where, does not.

def late_by_block(run: Run, selected: SelectedSteps) -> np.ndarray:
  """[R, B] mean busy time of all counted steps, less the mean over the ranks that are joined; NaN
  where not known.

  Args:
    run: of which some steps are detailed.
    selected: these; a block of them stands for all steps up to the next block's first.
  """
  assert run.aggregated is not None and selected.mask_of_all is not None
  first, _ = selected.spans(run)
  block = np.maximum(np.searchsorted(first, run.aggregated.steps, side="right") - 1, 0)
  total, number = (np.zeros((run.ranks, selected.blocks)),
                   np.zeros((run.ranks, selected.blocks), np.int64))
  for part in slices(len(block), run.ranks):
    late = _late(run, part)
    valid = np.isfinite(late) & selected.mask_of_all[part]
    into = into_blocks(block[part])
    into(total, np.where(valid, late, 0.0))
    into(number, valid)
  return ratio(total, number)


def late_in(run: Run, rank: int, first: int, last: int) -> tuple[np.ndarray, np.ndarray]:
  """Numbers of the steps from `first` to `last`, and by how many seconds a rank is busy for longer
  in each.

  NaN where that is not known.
  """
  assert run.aggregated is not None
  part = slice(*np.searchsorted(run.aggregated.steps, [first, last + 1]).tolist())
  return run.aggregated.steps[part], _late(run, part)[rank]


def _late(run: Run, part: slice) -> np.ndarray:
  """[R, k] busy time less the mean of the joined ranks; NaN where it is not known."""
  every = run.all_steps
  own = rank_steps(every, part)
  if every.waited is None:
    return np.full(own.shape, np.nan)
  own -= every.waited[:, part]
  if every.delay is not None:
    own -= np.nan_to_num(every.delay[:, part])
  valid = np.isfinite(own)
  groups = Grouped(run_groups(run).joined)
  return np.where(valid, own - groups.mean(np.where(valid, own, 0.0), valid), np.nan)
