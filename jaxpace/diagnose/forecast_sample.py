"""What a forecast is made of: arrivals and transfers of the steps in which every rank is known."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from jaxpace.core.words import Sentence, list_ranks, plural
from jaxpace.costs.alpha_beta import RING, TREE, coefficients, seconds
from jaxpace.costs.fabric_file import ALGORITHMS, Level, MeasuredFabric, kind_in
from jaxpace.diagnose.floor import running_minimum
from jaxpace.diagnose.groups import fully_grouped
from jaxpace.diagnose.limits import MOST, PART
from jaxpace.diagnose.selected_steps import count_steps
from jaxpace.diagnose.step_times import busy, chunks
from jaxpace.diagnose.words.codes import Silence
from jaxpace.diagnose.words.names import hosts_of
from jaxpace.diagnose.words.notes import Note
from jaxpace.runs.groups import groups
from jaxpace.runs.run import Run, RunError

MIN_STEPS = 100


class SampledCollective(NamedTuple):
  """One collective of the step."""

  name: str
  kind: str
  size: int | None  # bytes


class Sample(NamedTuple):
  """The run as the forecast sees it. C collectives, U units, K steps; seconds."""

  arrival: np.ndarray  # [C, U, K] undelayed; of a unit of several ranks, its last one's
  busy: np.ndarray  # [K] sum over collectives of the mean arrival of all ranks
  transfer: np.ndarray  # [C, K]
  floor: np.ndarray  # [C] transfer on a quiet fabric
  step: np.ndarray  # [K] mean over ranks of the recorded step
  collectives: tuple[SampledCollective, ...]
  ranks: int  # ranks of the job
  unit: int  # ranks of a unit
  hosts: int
  block: np.ndarray  # [K] number of the block of neighbouring steps
  notes: tuple[Sentence, ...]

  @property
  def units(self) -> int:
    """U, ranks or processes whose noise is independent."""
    return self.arrival.shape[1]

  @property
  def steps(self) -> int:
    """K."""
    return self.arrival.shape[2]

  @property
  def blocks(self) -> int:
    """B."""
    return int(self.block[-1]) + 1


def take_sample(run: Run) -> Sample:
  """Gathers what a forecast needs.

  Raises:
    RunError: there is too little: no collective, one rank, or fewer than 100 steps in which all
      ranks are known.
  """
  notes: list[Sentence] = []
  if not run.collectives:
    raise RunError(
        f"{run.path} holds no collective with timestamps, so nobody knows who waits for whom: no "
        "forecast.")
  parts = fully_grouped(run)
  if parts is None:
    raise RunError(f"{run.path} has collectives in which not all ranks meet that others join: "
                   "groups of several kinds, or transfers from rank to rank. A forecast is made of "
                   "ranks that all wait for all: none here.")
  laid_out: Sequence[np.ndarray] | np.ndarray | None = groups(run.info, run.ranks)
  if laid_out is None and len(parts) == 1:
    laid_out = np.arange(run.ranks)[None]
    notes.append(Note.MEETING_UNKNOWN.say("forecast"))
  if laid_out is None or len(laid_out) != len(parts):
    laid_out = parts
  if len(laid_out) > 1:
    notes.append(Note.GROUPS_APART.say("forecast", groups=len(laid_out)))
  ranks = laid_out[0]
  if len(ranks) < 2:
    raise RunError(f"{run.path} is of one rank: what ranks share and what each has of its own "
                   "can't be separated. Record a run of 2 ranks or more, better 8.")
  selected = count_steps(run)
  arrival, wait, step, pacing = (np.concatenate(values, axis=-1) for values in zip(*(
      (work.undelayed[:, ranks], work.wait[:, ranks], work.step[ranks], work.pacing)
      for work in (busy(run, part) for part in chunks(run))), strict=True))
  known = np.isfinite(step) & selected.mask
  often = known.sum(axis=1) >= max(1, MOST * selected.size)
  if not often.all():
    left_out = ranks[~often]
    notes.append(Note.RANKS_LEFT_OUT.say(rank="ranks" if len(left_out) > 1 else "rank",
        numbers=list_ranks(left_out)))
  if often.sum() < 2:
    raise RunError(f"{run.path} has fewer than 2 ranks with their times recorded: no forecast.")
  use = known[often].all(axis=0)
  if use.sum() < MIN_STEPS:
    raise RunError(f"{run.path} has {plural(int(use.sum()), 'step')} in which every rank's times "
                   f"are known; a forecast needs {MIN_STEPS} at least, 2,000 to be worth much. Let "
                   "the job run on.")
  arrival, wait, step = arrival[:, often][:, :, use], wait[:, often][:, :, use], step[often][:, use]
  if (pacing > 0).any():
    notes.append(Note.PACED.say("forecast"))
  kept = ranks[often]
  if step.mean() <= 0:
    raise RunError(
        f"{run.path} has steps that take no time at all: its clock stood still, or the times "
        "are damaged.")
  transfer = wait.min(axis=1)
  arrived = arrival.mean(axis=1).sum(axis=0)
  units, unit = _units(run, arrival, kept)
  if unit > 1:
    notes.append(Note.LATE_TOGETHER.say(unit=unit))
  collectives = tuple(SampledCollective(c.name, kind_in(run, c), c.bytes) for c in run.collectives)
  blocks = _blocks(step.mean(axis=0), units)
  return Sample(
      arrival=units, busy=arrived, transfer=transfer,
      floor=np.nan_to_num(running_minimum(transfer).floor), step=step.mean(axis=0),
      collectives=collectives, ranks=len(ranks), unit=unit,
      hosts=max(1, len(hosts_of(run, kept))), block=blocks, notes=tuple(notes))


def _units(run: Run, arrival: np.ndarray, ranks: np.ndarray) -> tuple[np.ndarray, int]:
  """Takes the ranks of each process together if their noise correlates beyond what is common to
  all."""
  process = run.process_of_rank[ranks]
  numbers, counts = np.unique(process, return_counts=True)
  if len(numbers) < 2 or counts.min() != counts.max() or counts[0] < 2 or numbers[0] < 0:
    return arrival, 1
  own = arrival.sum(axis=0)
  own = own - own.mean(axis=1, keepdims=True)
  by_process = np.stack([own[process == p] for p in numbers])  # [processes, ranks of one, K]
  centre = by_process.mean(axis=(0, 1), keepdims=True)
  within = by_process - centre
  variance = float((within**2).mean())
  size = int(counts[0])
  pairs = (within.sum(axis=1)**2 - (within**2).sum(axis=1)).mean() / (size * (size - 1))
  if variance <= 0 or pairs / variance < PART:
    return arrival, 1
  return np.stack([arrival[:, process == p].max(axis=1) for p in numbers], axis=1), size


def _blocks(step: np.ndarray, units: np.ndarray) -> np.ndarray:
  """Blocks of neighbouring steps, several times as long as noise remembers: 12 to 100 of them."""
  own = units.sum(axis=0)
  own = own - own.mean(axis=0)
  memory = max(correlation_time(step[None]), correlation_time(own))
  size = len(step)
  count = int(np.clip(size / math.ceil(4 * memory), 12, 100))
  return np.arange(size) * count // size


def correlation_time(values: np.ndarray) -> float:
  """Integrated autocorrelation time, 1 for white noise, of rows [R, K] that share it: sum of 1 +
  2·rho over lags.

  Summed as long as neighbouring pairs of lags add up to more than nothing (Geyer 1992, initial
  positive sequence).
  """
  values = values - values.mean(axis=1, keepdims=True)
  size = values.shape[1]
  spectrum = np.abs(np.fft.rfft(values, 2 * size, axis=1))**2
  covariance = np.fft.irfft(spectrum, axis=1)[:, :size].sum(axis=0)
  if covariance[0] <= 0:
    return 1.0
  rho = covariance / covariance[0]
  pairs = rho[:size // 2 * 2].reshape(-1, 2).sum(axis=1)
  # a pair that noise alone could give ends the sum
  quiet = np.flatnonzero(pairs < 4 / math.sqrt(size * len(values)))
  end = max(1, int(quiet[0])) if quiet.size else len(pairs)
  return float(max(1.0, 2 * pairs[:end].sum() - 1))


# What the collectives of another number of ranks take.

FITTED, ONE_SIZE, GIVEN = "fitted to the run", "one size: bounds", "fabric"


def new_tier(sample: Sample, ranks: int, per_host: int | None,
             fabric: MeasuredFabric | None) -> Sentence | None:
  """Says why transfers at `ranks` ranks can't be known, or None where they can."""
  if fabric is not None:
    here, there = fabric.level(sample.ranks), fabric.level(ranks)
    if here is None or there is None:
      top = fabric.levels[-1]
      return Silence.BEYOND_FABRIC.say(source=fabric.source, ranks=plural(top.ranks or 0, "rank"),
          level=top.name)
    kinds = {c.kind for c in sample.collectives}
    lacking = [level.name for level in (here, there) if not kinds <= set(level.costs)]
    if lacking:
      return Silence.NO_COST.say(source=fabric.source, kinds=", ".join(sorted(kinds)),
          level=lacking[0])
    return None
  own = math.ceil(sample.ranks / sample.hosts)
  hosts = math.ceil(ranks / (per_host or own))
  if sample.hosts == 1 and hosts > 1:
    return Silence.NEW_TIER.say(per_host=plural(per_host or own, "rank"), ranks=ranks, hosts=hosts)
  return None


def transfers(sample: Sample, ranks: int, fabric: MeasuredFabric | None, algorithm: str | None,
              draws: int, random: np.random.Generator) -> tuple[np.ndarray, str]:
  """Scales the recorded transfers to another number of ranks.

  What a transfer takes above its floor, contention, stays as it was recorded. The floor grows as α
  and β say: of a fabric that was measured or described; else fitted to the run's own collectives,
  if they differ in size; else, from one size alone, only bounds are known: from all of it bandwidth
  to all of it latency, in a tree or a ring.

  Args:
    ranks: ranks of the forecast job.
    fabric: from `jaxpace bench`, or described.
    algorithm: "ring", "tree" or "doubling"; None leaves it open where nothing says.
    draws: draws of what is not known for sure.
    random: where they come from.

  Returns:
    [1 + D] s of all collectives together, first as it is most likely, and by what that is known.
  """
  recorded = sample.transfer.mean(axis=1)
  contention = np.maximum(recorded - sample.floor, 0.0)
  floor = np.minimum(sample.floor, recorded)
  if ranks < 2:
    return np.zeros(1 + draws), "no other rank"
  if ranks == sample.ranks:
    return np.full(1 + draws, recorded.sum()), "as recorded"
  if fabric is not None:
    here, there = fabric.level(sample.ranks), fabric.level(ranks)
    assert here is not None and there is not None
    return _given(sample, recorded, ranks, here, there, draws, random), GIVEN
  fitted = _fit(sample, floor, algorithm or RING)
  if fitted is not None:
    then, now = (np.array([seconds(c.kind, algorithm or RING, number, c.size or 0, *fitted)
                           for c in sample.collectives]) for number in (ranks, sample.ranks))
    ratio = then / np.maximum(now, 1e-30)
    return np.full(1 + draws, (contention + floor * ratio).sum()), FITTED
  latency = random.random((draws, 1))
  algorithms = [algorithm] if algorithm in ALGORITHMS else [TREE, RING]
  chosen = random.integers(0, len(algorithms), (draws, 1))
  growth = np.array(
      [[[coefficients(c.kind, name, ranks)[i] / coefficients(c.kind, name, sample.ranks)[i]
         # [algorithms, C, 2]
         for i in (0, 1)] for c in sample.collectives] for name in algorithms])
  drawn = growth[chosen[:, 0]]  # [D, C, 2]
  ratio = latency * drawn[..., 0] + (1 - latency) * drawn[..., 1]
  point = 0.5 * growth[0, :, 0] + 0.5 * growth[0, :, 1]
  return (contention + floor * np.concatenate([point[None], ratio])).sum(axis=1), ONE_SIZE


def _given(sample: Sample, recorded: np.ndarray, ranks: int, here: Level, there: Level, draws: int,
           random: np.random.Generator) -> np.ndarray:
  """As recorded, and what the fabric takes more at the new size than at the old one."""
  total = np.zeros(1 + draws)
  for c, collective in enumerate(sample.collectives):
    # One error for both where they are of one level: α off by a tenth is off at both sizes.
    normal = random.standard_normal((2, draws))
    other = normal if here is there else random.standard_normal((2, draws))
    old = _drawn(here, collective, sample.ranks, normal)
    total += np.maximum(recorded[c] + _drawn(there, collective, ranks, other) - old, 0.0)
  return total


def _drawn(level: Level, collective: SampledCollective, ranks: int, normal: np.ndarray
           ) -> np.ndarray:
  """[1 + D] s of a collective, first as it is most likely; [2, D] normal errors of α and β."""
  cost = level.costs[collective.kind]
  drawn = (np.append(value.estimate, np.maximum(value.estimate + value.deviation * error, 0.0))
           for value, error in zip((cost.alpha, cost.beta), normal, strict=True))
  return seconds(collective.kind, cost.algorithm, ranks, float(collective.size or 0), *drawn)


def _fit(sample: Sample, floor: np.ndarray, algorithm: str) -> tuple[float, float] | None:
  """α and β of the run's own collectives; None unless there are sizes of which one is 4 times
  another."""
  known = [(c, floor[i]) for i, c in enumerate(sample.collectives) if c.size and floor[i] > 0]
  sizes = [c.size or 0 for c, _ in known]
  if len(known) < 2 or max(sizes) < 4 * min(sizes):
    return None
  rows = (np.array([coefficients(c.kind, algorithm, sample.ranks) for c, _ in known])
          * np.array([[1, s] for s in sizes]))
  took = np.array([s for _, s in known])
  solution, *_ = np.linalg.lstsq(rows / took[:, None], np.ones(len(known)), rcond=None)
  if solution.min() < 0:  # one of the two alone, the better
    alone = [(float(((rows[:, i] / took).sum()) / ((rows[:, i] / took)**2).sum()), i)
             for i in (0, 1)]
    errors = [float(((x * rows[:, i] / took - 1)**2).sum()) for x, i in alone]
    value, i = alone[int(np.argmin(errors))]
    solution = np.array([value, 0.0] if i == 0 else [0.0, value])
  return float(solution[0]), float(solution[1])
