"""What costs much and is no finding: few long pauses, be they between steps or in transfers, and
waiting without a cause that shows.

No rule of a failure mode speaks of it, for want of steps, of a lasting rank or of a floor; the
notes and the verdict do.
"""

from __future__ import annotations

import numpy as np

from jaxpace.diagnose.limits import COSTLY, MIN_STEPS, MOST, SELDOM
from jaxpace.diagnose.modes.inputs import FewPauses, Reasons, Unnamed
from jaxpace.diagnose.phases import beyond_usual, pauses_in
from jaxpace.diagnose.what_if import has_gaps
from jaxpace.diagnose.words.verdicts import Verdict
from jaxpace.runs.step_causes import PAUSES

_UNMEASURED = {
    "runtime": "gaps between steps, of which no column shows the cause,",
    "compute": "long steps on all ranks, of which gaps between steps may be a part,"}
_TRANSFERS = "transfers far longer than usual, in which a whole process may have stood still,"


def few_pauses(case: Reasons) -> tuple[FewPauses, ...]:
  """Long pauses that no finding speaks of and that hold `COSTLY` of the time, costliest first.

  A step is taken to lose to them no more than its gap, mean over ranks: what the devices' work
  hides costs nothing.
  """
  run, selected = case.run, case.selected
  if not selected.size or any(finding.mode == Verdict.JITTER for finding in case.findings):
    return ()
  step_time = float(case.steps.mean())
  own = "runtime" if has_gaps(run) else "compute"  # which then holds the gaps
  gap = np.nan_to_num(case.totals.per_step[own])
  # what all ranks do alike: one that pauses alone makes the others wait
  alone = np.nan_to_num(case.totals.earliness.sum(axis=0))
  unmeasured = np.maximum(gap - np.median(gap[selected.mask]) - alone, 0.0)
  causes: list[tuple[str, np.ndarray]] = []
  for name, paused in pauses_in(run).items():
    if len(paused):
      lost = np.minimum(beyond_usual(paused, selected).mean(axis=0), gap)
      unmeasured = np.maximum(unmeasured - lost, 0.0)
      causes.append((PAUSES[name].label, lost))
  found = []
  for label, lost in [*causes, (_UNMEASURED[own], unmeasured), (_TRANSFERS, _long_transfers(case))]:
    long = selected.mask & (lost >= MOST * step_time)
    seconds = float(lost[long].sum())
    share = seconds / (step_time * selected.size)
    if share >= COSTLY:
      found.append(FewPauses(label, seconds, share, run.steps[long]))
  return tuple(sorted(found, key=lambda pauses: -pauses.share))


def _long_transfers(case: Reasons) -> np.ndarray:
  """[K] seconds by which transfers took longer than usual; 0 where that is so in more than
  `SELDOM` of the steps, or a finding speaks of it."""
  mask = case.selected.mask
  lost = np.nan_to_num(case.floor.contention).sum(axis=0)
  lost = np.maximum(lost - np.median(lost[mask]), 0.0)
  often = (lost[mask] >= MOST * float(case.steps.mean())).mean() > SELDOM
  known = any(finding.mode == Verdict.CONTENTION for finding in case.findings)
  return np.zeros_like(lost) if often or known else lost


def unnamed_waiting(case: Reasons) -> Unnamed | None:
  """Returns where the waiting is; None where it is little, a finding speaks of it, or nothing can
  be judged."""
  run, selected, earliness = case.run, case.selected, case.lateness.earliness
  if (case.findings or not run.collectives or run.ranks < 2 or selected.size < MIN_STEPS
      or earliness < COSTLY * float(case.steps.mean())):
    return None
  whole = np.where(selected.mask, np.nan_to_num(case.totals.earliness.sum(axis=0)), 0.0)
  order = np.argsort(-whole, kind="stable")
  number = int(np.searchsorted(np.cumsum(whole[order]), whole.sum() / 2)) + 1
  totals = case.totals
  few = number <= SELDOM * selected.size
  rank = int(totals.blame.argmax())
  often = float(totals.last[rank]) / max(1, int(totals.present[rank]))
  most = (few or often >= MOST) and totals.blame[rank] >= MOST * totals.blame.sum()
  return Unnamed(earliness / float(case.steps.mean()), np.sort(run.steps[order[:number]]), few,
                 rank if most else None, often)
