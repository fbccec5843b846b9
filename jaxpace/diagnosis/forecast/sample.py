"""What a forecast is made of: arrivals and transfers of the steps in which every rank is known."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from jaxpace.costs.fabric_file import kind_in
from jaxpace.diagnosis.accounting import busy, chunks
from jaxpace.diagnosis.codes import Note, Sentence
from jaxpace.diagnosis.floor import running_minimum
from jaxpace.diagnosis.meetings import that_all_meet
from jaxpace.diagnosis.selected_steps import count_steps
from jaxpace.diagnosis.totals import undelayed
from jaxpace.trace.meeting import groups
from jaxpace.trace.problems import list_ranks, plural
from jaxpace.trace.run import Run, RunError

MIN_STEPS = 100
_PRESENT = 0.5
"""A rank that is known in less than this share of the steps is left out."""
_TOGETHER = 0.3
"""Ranks of a process whose noise correlates at least this much, beyond what is common to all, are
one unit."""


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
  parts = that_all_meet(run)
  if parts is None:
    raise RunError(f"{run.path} has collectives in which not all ranks meet that others join: "
                   "groups of several kinds, or transfers from rank to rank. A forecast is made of "
                   "ranks that all wait for all: none here.")
  laid_out: Sequence[np.ndarray] | np.ndarray | None = groups(run.info, run.ranks)
  if laid_out is None and len(parts) == 1:
    laid_out = np.arange(run.ranks)[None]
    notes.append(Sentence(Note.MEETING_UNKNOWN,
        "run.json does not tell which ranks synchronise with each other: all of them are "
        "taken to."))
  if laid_out is None or len(laid_out) != len(parts):
    laid_out = parts
  if len(laid_out) > 1:
    notes.append(Sentence(Note.GROUPS_APART,
        f"The job has {len(laid_out)} groups of ranks that never meet: the first one is "
        "the sample."))
  ranks = laid_out[0]
  if len(ranks) < 2:
    raise RunError(f"{run.path} is of one rank: what ranks share and what each has of its own "
                   "can't be told apart. Record a run of 2 ranks or more, better 8.")
  selected = count_steps(run)
  slots, size = len(run.collectives), len(run.steps)
  arrival, wait = np.full((slots, len(ranks),
                           size), np.nan), np.full((slots, len(ranks), size), np.nan)
  step = np.full((len(ranks), size), np.nan)
  delayed = False
  for part in chunks(run):
    work = busy(run, part)
    delayed |= bool((np.nan_to_num(work.pacing) > 0).any())
    arrival[:, :, part], wait[:, :, part] = undelayed(work)[:, ranks], work.wait[:, ranks]
    step[:, part] = work.step[ranks]
  known = np.isfinite(step) & selected.mask
  often = known.sum(axis=1) >= max(1, _PRESENT * selected.size)
  if not often.all():
    left_out = ranks[~often]
    notes.append(Sentence(Note.RANKS_LEFT_OUT,
        f"Left out: {'ranks' if len(left_out) > 1 else 'rank'} {list_ranks(left_out)}, known in "
        "less than half of the steps. The forecast takes the others for all."))
  if often.sum() < 2:
    raise RunError(f"{run.path} has fewer than 2 ranks with their times recorded: no forecast.")
  use = known[often].all(axis=0)
  if use.sum() < MIN_STEPS:
    raise RunError(f"{run.path} has {plural(int(use.sum()), 'step')} in which every rank's times "
                   f"are known; a forecast needs {MIN_STEPS} at least, 2,000 to be worth much. Let "
                   "the job run on.")
  arrival, wait, step = arrival[:, often][:, :, use], wait[:, often][:, :, use], step[often][:, use]
  if delayed:
    notes.append(Sentence(Note.PACED,
        "Pacing was active: the forecast is by arrivals with each rank's own delay taken out."))
  kept = ranks[often]
  if step.mean() <= 0:
    raise RunError(
        f"{run.path} has steps that take no time at all: its clock stood still, or the times "
        "are damaged.")
  transfer = wait.min(axis=1)
  arrived = arrival.mean(axis=1).sum(axis=0)
  units, unit = _units(run, arrival, kept)
  if unit > 1:
    notes.append(Sentence(Note.LATE_TOGETHER,
        f"The {unit} ranks of a process are late together: each process counts as one, with its "
        "last rank's arrival."))
  names = {h for h in (run.host_of_rank(int(r)) for r in kept) if h}
  collectives = tuple(SampledCollective(c.name, kind_in(run, c), c.bytes) for c in run.collectives)
  blocks = _blocks(step.mean(axis=0), units)
  return Sample(
      arrival=units, busy=arrived, transfer=transfer,
      floor=np.nan_to_num(running_minimum(transfer).floor), step=step.mean(axis=0),
      collectives=collectives, ranks=len(ranks), unit=unit, hosts=max(1, len(names)), block=blocks,
      notes=tuple(notes))


def _units(run: Run, arrival: np.ndarray, ranks: np.ndarray) -> tuple[np.ndarray, int]:
  """Takes the ranks of each process together if they are late together."""
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
  if variance <= 0 or pairs / variance < _TOGETHER:
    return arrival, 1
  return np.stack([arrival[:, process == p].max(axis=1) for p in numbers], axis=1), size


def _blocks(step: np.ndarray, units: np.ndarray) -> np.ndarray:
  """Blocks of neighbouring steps, several times as long as noise remembers: 12 to 100 of them."""
  own = units.sum(axis=0)
  own = own - own.mean(axis=0)
  own = own - own.mean(axis=1, keepdims=True)
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
