"""What a recorded run says, as values."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np

from jaxpace.diagnosis.by_rank import SHARES
from jaxpace.diagnosis.codes import Sentence
from jaxpace.diagnosis.findings import Finding
from jaxpace.diagnosis.floor import Floor
from jaxpace.diagnosis.lateness import Lateness
from jaxpace.diagnosis.overlap import Overlap
from jaxpace.diagnosis.pacing import PacingEffect, WorkMoved
from jaxpace.diagnosis.selected_steps import SelectedSteps
from jaxpace.diagnosis.stages import Stages
from jaxpace.diagnosis.totals import Totals
from jaxpace.diagnosis.untold import Untold
from jaxpace.diagnosis.waiting_places import CollectiveWaits
from jaxpace.diagnosis.worth import Worth
from jaxpace.trace.links import ProbedLinks
from jaxpace.trace.run import Run

__all__ = ["SHARES", "Diagnosis", "Facts", "StepTime"]


@dataclasses.dataclass(frozen=True)
class StepTime:
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


@dataclasses.dataclass(frozen=True, kw_only=True)
class Facts(Worth):
  """What a recorded run says, but for the words on it as a whole.

  Arrays are [R] over ranks unless noted; NaN where a rank has no data.
  """

  run: Run
  selected: SelectedSteps
  recorded: int  # step numbers of the window with a row of any rank
  step_time: StepTime | None  # None where no step counts
  shares: dict[str, float] | None  # by name in `SHARES`, sum 1
  waiting: dict[str, float]  # mean seconds a step waited, by the cause of the last rank's lateness
  # mean seconds by which ranks leave collectives apart from each other; in `shares` under transfer
  spread: float
  floor: Floor
  totals: Totals
  lateness: Lateness
  phases: dict[str, np.ndarray]
  findings: tuple[Finding, ...]
  measured: PacingEffect | None  # what a guard measured of pacing; None where none ran
  # involuntary switches a step of the process that has most; 0 where they are not known
  preempted: float
  links: ProbedLinks | None = None  # what a link probe measured
  events: tuple[Mapping[str, Any], ...] = ()  # what watchdogs found
  doubt: str = ""  # why what was found in a sampled run is no finding, in a few words
  # ranks of the job that nothing can be said of: too few of their rows are there
  unseen: tuple[int, ...] = ()
  untold: Untold | None = None  # why it can't be told who is late
  # what sharing work by speed did; None where no work was shared
  work_moved: WorkMoved | None = None
  # signs that groups wait for each other as the stages of a pipeline do
  stages: Stages | None = None
  # of an observed step, by collective, those with most waiting first
  waits: tuple[CollectiveWaits, ...] = ()
  # what of the collectives is waited for, and what computing hides; None without any
  overlap: Overlap | None = None
  counted_in_all: int | None = None
  """Steps that count, those included that are not written in full; None where all are. `step_time`
  is of them."""

  @property
  def counted(self) -> int:
    """Steps that count."""
    return self.selected.size if self.counted_in_all is None else self.counted_in_all

  @property
  def earliness(self) -> float:
    """Mean seconds a step waits for its last ranks, by undelayed arrival."""
    return float(self.lateness.persistent.sum() + self.lateness.random.sum())


@dataclasses.dataclass(frozen=True, kw_only=True)
class Diagnosis(Facts):
  """What a recorded run says, with the verdict on it and notes for its reader, both made of the
  facts."""

  verdict: Sentence
  notes: tuple[Sentence, ...]
