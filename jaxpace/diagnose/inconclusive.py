"""What a run can't tell: ranks that left no rows, and collectives whose timestamps say nothing of
who came late."""

from __future__ import annotations

import collections
import re
from collections.abc import Iterable, Sequence

import numpy as np

from jaxpace.core.words import Sentence, list_ranks, plural, some_ranks
from jaxpace.diagnose.limits import COSTLY, EFFECT, MIN_STEPS, MOST, SELDOM
from jaxpace.diagnose.modes.inputs import EvidenceInputs, SilentStretches
from jaxpace.diagnose.selected_steps import SelectedSteps
from jaxpace.diagnose.step_times import StepTimes, counted
from jaxpace.diagnose.totals import RunTotals, Totals
from jaxpace.diagnose.words.codes import Verdict
from jaxpace.diagnose.words.names import hosts_of, milliseconds, named
from jaxpace.diagnose.words.notes import Note
from jaxpace.runs.run import Process, Run


def find_inconclusive(run: Run, selected: SelectedSteps) -> str:
  """Says why nobody can say who is late; nothing where it can."""
  if not any(map(any, _doubted(run))):
    return ""
  return next((inconclusive_of(run, work) for _, work in counted(run, selected.mask)), "")


def _doubted(run: Run) -> tuple[list[bool], list[bool]]:
  """Collectives that can begin before their entry timestamps, and transfers of which nobody knows
  whose they are."""
  return ([c.may_begin_early for c in run.collectives],
          [c.point_to_point and (c.rank_groups is None or c.rank_groups.sources is None)
           for c in run.collectives])


def inconclusive_of(run: Run, work: StepTimes) -> str:
  """The same of some steps."""
  early, alone = _doubted(run)
  which = np.array(early) | np.array(alone)
  if not which.any():
    return ""
  before = np.where(work.valid, work.arrival, 0.0).sum(axis=(1, 2))
  # Timestamps at the begin of the wait say nothing of what was waited before: the time ahead of
  # them is in doubt.
  if before[which].sum() < MOST * before.sum():
    return ""
  collectives = len(which)
  those = (f"{which.sum()} of {plural(collectives, 'collective')}" if not which.all()
           else "the collectives" if collectives > 1 else "the collective")
  why = []
  if any(early):
    why.append(f"{those} can begin before {'its' if collectives == 1 else 'their'} entry "
               "timestamp, so that waiting may count as compute")
  if any(alone):
    why.append("it is not recorded who sends to whom")
  return ("The run does not show whether ranks wait for each other, nor for whom: "
          f"{'; and '.join(why)}.")


def unseen(case: EvidenceInputs) -> np.ndarray:
  """Ranks of the job that are not known in half of the counted steps, or never: nothing can be said
  of them.

  So are those that may be what the others wait for where they left no rows. A gap in the numbers of
  the ranks is no rank, unless the run or one of its processes says that it has it.
  """
  run, selected, totals = case.run, case.selected, case.totals
  if not selected.size:
    return np.empty(0, np.int64)
  there = run.there
  there &= totals.present < max(1.0, MOST * selected.size)
  if case.away is not None:
    there[list(case.away.suspects)] = True
  return np.flatnonzero(there)


def unrecorded(run: Run) -> Sentence | None:
  """Refuses to judge a run of which many steps are missing; None where enough are there.

  What is missing need not be like the rest: steps that another program ran, or that the writer
  could not keep up with.
  """
  worst = max(run.processes, key=_lost_share, default=None)
  if worst is None or _lost_share(worst) < MOST:
    return None
  rows = [int(worst.info.get(name) or 0) // max(1, len(worst.ranks))
          for name in ("lost_rows", "rows_written")]
  return Verdict.TOO_FEW_STEPS.say("lost", process=worst.process, recorded=rows[1], lost=rows[0],
      steps=plural(sum(rows), "step"))


def _lost_share(process: Process) -> float:
  lost, written = (process.info.get(name) for name in ("lost_rows", "rows_written"))
  if not isinstance(lost, int) or not isinstance(written, int) or lost <= 0:
    return 0.0
  return lost / (lost + max(0, written))


def missing_ranks(run_totals: RunTotals) -> SilentStretches | None:
  """Where ranks that are seen in a part of the run left no rows; None where none did.

  A stretch has as many steps as a finding needs: of fewer, those without a rank's rows hide little,
  and they may be ones that a process lost, or didn't wait for.
  """
  selected, totals = run_totals.selected, run_totals.totals
  if not selected.size:
    return None
  steps = selected.number
  lost = totals.block_steps < MOST * steps  # [R, B]
  stretch = -(-MIN_STEPS * selected.blocks // selected.size)
  away = lost & _in_stretches(lost, stretch) & ~np.asarray(lost.all(axis=1))[:, None]
  ranks = np.flatnonzero(away.any(axis=1))
  if not ranks.size:
    return None
  transfer, least = totals.transfer.sum(axis=0), COSTLY * run_totals.mean_step
  suspects = []
  for rank in ranks.tolist():
    without = selected.mask & away[rank][selected.block]
    with_it = selected.mask & ~without
    if not with_it.any() or without.sum() < COSTLY * selected.size:
      continue
    if float(np.nanmean(transfer[without]) - np.nanmean(transfer[with_it])) >= least:
      suspects.append(rank)
  return SilentStretches(ranks, selected.mask & np.asarray(away.any(axis=0))[selected.block],
                         tuple(suspects))


def may_be_waiting(run_totals: RunTotals, away: SilentStretches | None) -> np.ndarray:
  """[K] bool, steps in which longer transfers can't be told from waiting for ranks without rows:
  all, where some never left any."""
  if (run_totals.run.there & (run_totals.totals.present == 0)).any():
    return np.ones(len(run_totals.selected.mask), bool)
  return np.zeros(len(run_totals.selected.mask), bool) if away is None else away.steps


def _in_stretches(lost: np.ndarray, length: int) -> np.ndarray:
  """[R, B] bool, blocks in any stretch of so many neighbouring ones of which most are lost."""
  number = np.cumsum(np.pad(lost, ((0, 0), (1, 0))), axis=1)
  most = number[:, length:] - number[:, :-length] > length / 2
  inside = np.zeros_like(lost)
  for at in range(length):
    inside[:, at:at + most.shape[1]] |= most
  return inside


def unseen_sentence(run: Run, ranks: Sequence[int]) -> str:
  """Names the ranks that nothing is known of."""
  rows = run.attempt[list(ranks)][:, run.inside] >= 0
  hosts = hosts_of(run, ranks)
  where = f" ({named(hosts)})" if hosts else ""
  they, their = ("they", "their") if len(ranks) > 1 else ("it", "its")
  why = (f"{their} rows are missing in {'most' if rows.mean() < MOST else 'a part'} of the steps"
         if rows.any() else f"{they} left no rows")
  return (f"Nothing is known of {some_ranks(ranks)}{where}: {why}, so {they} may be what the "
          "others wait for; that would count as transfer.")


def once(notices: Iterable[str]) -> list[str]:
  """Notices that differ in the number of a collective alone, said once.

  >>> once(["Collective 0 is odd.", "Collective 2 is odd.", "So."])
  ['Collective 0 is odd. (So are 1 more: 2.)', 'So.']
  """
  said: dict[str, list[int]] = {}
  for notice in notices:
    match = re.match(r"Collective (\d{1,9}) (?=\D)", notice)
    key = notice if match is None else notice[match.end():]
    said.setdefault(("" if match is None else "\0") + key,
                    []).append(0 if match is None else int(match[1]))
  return [key if not key.startswith("\0") else f"Collective {numbers[0]} {key[1:]}"
          + (f" (So are {len(more)} more: {list_ranks(more)}.)" if (more := numbers[1:]) else "")
          for key, numbers in said.items()]


# Collectives that the step has and that were not timed: ranks meet there too, and who is late
# doesn't show.

def untimed(run: Run) -> dict[tuple[str, str], int]:
  """How many collectives were not timestamped, by name and reason; those that found no slot too."""
  entries = run.plan.get("unstamped")
  found: dict[tuple[str, str], int] = collections.Counter(
      (str(entry.get("primitive") or entry.get("name")),
       str(entry.get("reason", "no reason given")))
      for entry in (entries if isinstance(entries, list) else []) if isinstance(entry, dict))
  overflow = run.plan.get("overflow")
  if isinstance(overflow, int) and overflow > 0:
    found["collectives", NO_SLOT] = overflow
  return dict(found)


NO_SLOT = "no slot left"


# Whether a run's groups are stages that wait for each other beside the collectives, as those of a
# pipeline do.

_SAME = SELDOM * EFFECT
"""Groups that take the same step within this share of it, and are busy for times that differ by
more than `EFFECT`, wait for each other somewhere. Chosen by hand; no measurement of it is
published."""


def stages(run_totals: RunTotals) -> tuple[Sentence, ...]:
  """Says what shows that groups are stages, and what the report's figures mean then; nothing where
  nothing does."""
  run, selected, totals = run_totals.run, run_totals.selected, run_totals.totals
  alone = np.array([c.point_to_point for c in run.collectives], bool)
  apart = _keep_step(totals)
  staged = totals.groups.staged
  if not (alone.any() or apart or staged):
    return ()
  said = []
  if alone.any():
    took = totals.transfer[alone][:, selected.mask]
    transfer = float(np.nan_to_num(took).sum(axis=0).mean()) if took.size else 0.0
    are = ("are point-to-point transfers" if alone.sum() > 1
           else "is a point-to-point transfer")
    said.append(Note.POINT_TO_POINT.say(number=alone.sum(),
        collectives=plural(len(alone), "collective"), are=are, transfer=milliseconds(transfer)))
  if apart:
    shown = "; ".join(list_ranks(ranks, 4) for ranks in apart[:4])
    more = f"; and {len(apart) - 4} more groups" if len(apart) > 4 else ""
    said.append(Note.STAGES.say(ranks=shown, more=more))
  return (*said, Note.BUBBLES.say())


def _keep_step(totals: Totals) -> tuple[tuple[int, ...], ...]:
  """Groups that no timestamped collective joins, and that keep step all the same."""
  if not totals.groups.apart:
    return ()
  joined = totals.groups.joined
  some = totals.present > 0
  number = np.maximum(totals.present, 1)
  step = totals.per_rank["step"] / number
  busy = (totals.per_rank["compute"] + totals.per_rank["runtime"]) / number
  parts = [np.flatnonzero((joined == part) & some) for part in range(int(joined.max()) + 1)]
  parts = [own for own in parts if own.size]
  if len(parts) < 2:
    return ()
  steps, longest = (np.array([how(values[own]) for own in parts])
                    for how, values in ((np.mean, step), (np.max, busy)))
  if np.ptp(steps) > _SAME * steps.mean() or np.ptp(longest) <= EFFECT * steps.mean():
    return ()
  return tuple(tuple(own.tolist()) for own in parts)
