"""What costs much and is no finding: few long pauses, waiting by turns or in few steps, data that
queue on the way.

No rule of a failure mode speaks of it, for want of steps, of a lasting rank or of a floor; the
notes and the verdict do.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from jaxpace.diagnosis.diagnosis import Facts
from jaxpace.diagnosis.findings import COSTLY, JITTER
from jaxpace.diagnosis.selected_steps import MIN_STEPS
from jaxpace.diagnosis.what_if import has_gaps
from jaxpace.trace.step_causes import PAUSES

# Set looking at the fault lab's runs of seeds 0 to 3; measurements/fault_lab_seed4 is what they are
# worth on others.
_LONG_PAUSE = 0.5
"""A pause is one of the few where it takes this share of the mean step or more."""


_UNMEASURED = {
    "runtime": "gaps between steps, of which no column shows the cause,",
    "compute": "long steps on all ranks, of which gaps between steps may be a part,"}


class FewPauses(NamedTuple):
  """What one cause took beyond its usual time."""

  cause: str  # for people
  seconds: float  # in all, mean over processes
  share: float  # of all the time counted
  steps: np.ndarray  # numbers of the steps with a long one


def few_pauses(facts: Facts) -> list[FewPauses]:
  """Long pauses that no finding speaks of and that hold `COSTLY` of the time, costliest first.

  A step is taken to lose to them no more than its gap, mean over ranks: what the devices' work
  hides costs nothing.
  """
  run, selected, step_time = facts.run, facts.selected, facts.step_time
  if step_time is None or any(finding.mode == JITTER for finding in facts.findings):
    return []
  own = "runtime" if has_gaps(run) else "compute"  # which then holds the gaps
  gap = np.nan_to_num(facts.totals.per_step[own])
  # what all ranks do alike: one that pauses alone makes the others wait
  alone = np.nan_to_num(facts.totals.earliness.sum(axis=0))
  unmeasured = np.maximum(gap - np.median(gap[selected.mask]) - alone, 0.0)
  causes: list[tuple[str, np.ndarray]] = []
  for name, cause in PAUSES.items():
    rows = run.host_causes.columns.get(name)
    if rows is None or not len(rows):
      continue
    lost = np.zeros(len(run.steps))
    for row in rows:
      values = np.nan_to_num(row.astype(np.float64))
      lost += np.maximum(values - np.median(values[selected.mask]), 0.0) / len(rows)
    lost = np.minimum(lost, gap)
    unmeasured = np.maximum(unmeasured - lost, 0.0)
    causes.append((cause.label, lost))
  found = []
  for label, lost in [*causes, (_UNMEASURED[own], unmeasured)]:
    long = selected.mask & (lost >= _LONG_PAUSE * step_time.mean)
    seconds = float(lost[long].sum())
    share = seconds / (step_time.mean * selected.size)
    if share >= COSTLY:
      found.append(FewPauses(label, seconds, share, run.steps[long]))
  return sorted(found, key=lambda pauses: -pauses.share)


_FEW_STEPS = 0.1
"""Steps that hold half of the waiting are few up to this share; of exponential jitter, 19 % of the
steps hold half."""
_MOST_OF_IT = 0.6
"""One rank holds this part of the waiting, and where that isn't in few steps is last in this part
of them, if that is said of it."""


class Unnamed(NamedTuple):
  """Waiting without a finding."""

  share: float  # of the step
  steps: np.ndarray  # numbers of the steps that hold half of it, as few as do
  few: bool  # whether these are few
  rank: int | None = None  # that most of the waiting is for
  often: float = 0.0  # share of the steps in which it is last


def unnamed_waiting(facts: Facts) -> Unnamed | None:
  """Returns where the waiting is; None where it is little, a finding speaks of it, or nothing can
  be judged."""
  run, selected, step_time = facts.run, facts.selected, facts.step_time
  if (step_time is None or facts.findings or not run.collectives or run.ranks < 2
      or selected.size < MIN_STEPS
      or facts.earliness < COSTLY * step_time.mean):
    return None
  whole = np.where(selected.mask, np.nan_to_num(facts.totals.earliness.sum(axis=0)), 0.0)
  order = np.argsort(-whole, kind="stable")
  number = int(np.searchsorted(np.cumsum(whole[order]), whole.sum() / 2)) + 1
  totals = facts.totals
  few = number <= _FEW_STEPS * selected.size
  rank = int(totals.blame.argmax())
  often = float(totals.last[rank]) / max(1, int(totals.present[rank]))
  most = (few or often >= _MOST_OF_IT) and totals.blame[rank] >= _MOST_OF_IT * totals.blame.sum()
  return Unnamed(facts.earliness / step_time.mean, np.sort(run.steps[order[:number]]), few,
                 rank if most else None, often)
