"""What every failure mode is looked for in, and what is found."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any, NamedTuple

import numpy as np

from jaxpace.core.words import Sentence
from jaxpace.diagnose.episodes import change_points, confidence
from jaxpace.diagnose.floor import Floor
from jaxpace.diagnose.lateness import Lateness
from jaxpace.diagnose.links import ProbedLinks
from jaxpace.diagnose.selected_steps import merged
from jaxpace.diagnose.totals import RunTotals
from jaxpace.diagnose.words.codes import Verdict, codes


@dataclasses.dataclass(frozen=True)
class Finding:
  """One failure mode. Shares of a run's findings are disjoint parts of its step time."""

  mode: Verdict
  share: float
  confidence: float
  ranks: tuple[int, ...]
  hosts: tuple[str, ...]
  evidence: tuple[Sentence, ...]
  advice: str
  causes: tuple[str, ...] = ()
  """Mechanisms that the hosts' columns show: "gc", "data", "checkpoint", "preempted", ...; empty:
  left open."""
  first_step: int | None = None
  """From which step on; None: throughout."""
  last_step: int | None = None
  """To which step; None: to the end."""

  def also(self, said: Sentence) -> Finding:
    """The same with one more sentence of evidence."""
    return dataclasses.replace(self, evidence=(*self.evidence, said))

  def to_json(self) -> dict[str, Any]:
    """Returns plain lists and scalars; `evidence_codes` are those of the sentences of `evidence`,
    in their order."""
    return {**dataclasses.asdict(self), "mode": str(self.mode),
            "evidence": [str(s) for s in self.evidence], "evidence_codes": codes(self.evidence)}


class SilentStretches(NamedTuple):
  """Stretches in which ranks that are seen elsewhere in the run left no rows."""

  ranks: np.ndarray
  # [K] bool, those in which what others wait for one of these ranks would look like transfer
  steps: np.ndarray
  # those of them without whose rows transfers are longer: they may be what is waited for
  suspects: tuple[int, ...]


class FewPauses(NamedTuple):
  """What one cause took beyond its usual time."""

  cause: str  # for people
  seconds: float  # in all, mean over processes, with the waiting for one that alone pauses
  share: float  # of all the time counted
  steps: np.ndarray  # numbers of the steps with a long one
  longest: float  # seconds, mean over processes
  most_in: int | None  # step that holds most of the seconds by itself, of several
  why: str = ""  # how that is known, where it isn't measured


class Unnamed(NamedTuple):
  """Waiting without a finding."""

  share: float  # of the step
  steps: np.ndarray  # numbers of the steps that hold half of it, as few as do
  few: bool  # whether these are few
  rank: int | None = None  # that most of the waiting is for
  often: float = 0.0  # share of the steps in which it is last


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class EvidenceInputs(RunTotals):
  """A run that was added up, with who is late, the phases and the quiet fabric; and, once failure
  modes were looked for, what is wrong, and why: `lateness` then names whom the findings blame."""

  lateness: Lateness
  phases: dict[str, np.ndarray]  # [R] medians by phase
  floor: Floor
  links: ProbedLinks | None = None  # what a link probe measured
  away: SilentStretches | None = None  # where others may wait for a rank without rows
  hidden: np.ndarray  # [K] bool, steps in which longer transfers may be waiting for such a rank

  findings: tuple[Finding, ...] = ()
  doubt: str = ""  # why what was found in a sampled run is no finding, in a few words
  on_sampling: tuple[Sentence, ...] = ()  # notes on what such a run can't tell
  inconclusive: str = ""  # why nobody can say who is late; empty where it can
  # ranks of the job that nothing can be said of: too few of their rows are there
  unseen: tuple[int, ...] = ()
  # what costs much and is no finding
  few_pauses: tuple[FewPauses, ...] = ()
  unnamed: Unnamed | None = None

  @property
  def transfer(self) -> np.ndarray:
    """[K] all collectives' own time in each step, s; NaN where not known, or where it may be
    waiting."""
    transfer: np.ndarray = self.totals.transfer.sum(axis=0)
    return np.where(self.hidden, np.nan, transfer)

  def levels(self, by_block: np.ndarray) -> list[tuple[int, int]]:
    """Stretches of blocks, (first, one past the last), between which a [B] series changes its
    level."""
    edges = [0, *change_points(by_block[None])[0], self.selected.blocks]
    return list(itertools.pairwise(edges))

  def sure(self, by_block: np.ndarray) -> float:
    """Confidence that a [B] series is above 0."""
    return confidence(merged(by_block, self.totals.block_steps.sum(axis=0)))

  @property
  def beyond_arrival(self) -> np.ndarray:
    """[K] what a step takes beyond its last rank's busy time, s: transfers, and ranks that leave
    them apart."""
    return self.transfer + self.totals.per_step["spread"]
