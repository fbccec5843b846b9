"""Processes pause between steps now and then: `runtime_jitter`."""

from __future__ import annotations

import math

import numpy as np

from jaxpace.core.words import Sentence, some_ranks
from jaxpace.diagnose.episodes import binomial_tail, confidence
from jaxpace.diagnose.limits import (
  CONFIDENCE,
  COSTLY,
  MOST,
  NEARLY_ALL,
  OFTEN,
  PART,
  SELDOM,
  SHOWS,
  UNEXPLAINED,
)
from jaxpace.diagnose.mechanism import crowded_processors, held_by_causes, kinds, of_pauses, strikes
from jaxpace.diagnose.modes.inputs import EvidenceInputs, Finding
from jaxpace.diagnose.phases import beyond_usual, on_purpose, paused
from jaxpace.diagnose.selected_steps import mean_known, merged
from jaxpace.diagnose.words.codes import Verdict
from jaxpace.diagnose.words.evidence import Evidence, against_pauses
from jaxpace.diagnose.words.names import hosts_of, milliseconds, percent


def _beyond_usual(case: EvidenceInputs) -> tuple[np.ndarray, float, np.ndarray]:
  """Gaps beyond each rank's usual one but what all processes do in them on purpose, s per step,
  [R]; the mean over ranks; and by block that with the waiting for them, [B]."""
  totals, selected = case.totals, case.selected
  meant = beyond_usual(on_purpose(case.run)[None], selected)[0]
  mean = (totals.per_rank["runtime"] / np.maximum(totals.present, 1)
          - float(meant[selected.mask].mean() if selected.size else 0.0))
  usual = np.nan_to_num(case.phases.get("gap", np.zeros(len(mean))))
  present = totals.present / max(1, int(totals.present.sum()))
  own = totals.per_step["runtime"] - float((usual * present).sum()) - meant
  return (np.where(totals.present > 0, np.clip(mean - usual, 0.0, None), 0.0),
          max(float(np.nanmean(own[selected.mask])), 0.0) if selected.size else 0.0,
          selected.means(np.where(np.isfinite(own), own, 0.0) + totals.waiting_gap))


def _confidence(case: EvidenceInputs, by_block: np.ndarray) -> float:
  """That pauses are not the work of a few blocks: without the worst of them, and with the others
  cut to the next."""
  beyond = merged(by_block - case.lateness.persistent.for_gaps,
                  case.totals.block_steps.sum(axis=0))
  beyond = beyond[np.isfinite(beyond)]
  return confidence(np.minimum(beyond, np.quantile(beyond, 1 - SELDOM))) if beyond.size else 0.0


def who_pauses(case: EvidenceInputs, beyond: np.ndarray, alone: int | None) -> list[int]:
  """The ranks that hold most of the pauses, worst first; none where everybody pauses alike.

  By what the hosts' columns show where they show something: gaps are ragged everywhere, causes are
  not.

  Args:
    beyond: [R] s per step of gaps beyond the usual.
    alone: the process that stands out, see `standing_out`.
  """
  shown = held_by_causes(case)
  if shown is None and alone is not None:
    return np.flatnonzero(case.run.process_of_rank == alone).tolist()
  excess = beyond if shown is None else shown
  total = float(excess.sum())
  order = np.lexsort((np.arange(len(excess)), -excess))
  own = [int(r) for r in order if excess[r] >= MOST * excess[order[0]] and excess[r] > 0]
  if not own or 2 * len(own) > len(excess) or excess[own].sum() < MOST * total:
    return []
  if shown is not None and _by_chance(case, own):
    return []
  # The columns are a process's; where only some of its ranks have the long gaps, it is these.
  some = [r for r in own if beyond[r] >= MOST * beyond[own].max()]
  return some if 2 * len(some) <= len(own) else own


def standing_out(case: EvidenceInputs) -> int | None:
  """The process that pauses long and often by itself, while the others next to never do; None where
  there is none.

  Then it is that process, whatever its columns show. Load on the hosts that strikes all alike is
  none of theirs.
  """
  run, usual = case.run, np.nan_to_num(case.phases.get("gap", np.zeros(case.run.ranks)))
  if "gap" not in run.durations:
    return None
  number: dict[int, int] = {}
  mask = case.selected.mask
  meant = on_purpose(run)[mask]
  for rank in range(run.ranks):
    gaps = run.durations["gap"][rank, mask] - meant
    long = int(np.count_nonzero(np.nan_to_num(gaps) - usual[rank] >= PART * case.mean_step))
    process = int(run.process_of_rank[rank])
    number[process] = max(number.get(process, 0), long)
  most = max(number, key=lambda process: number[process])
  alone = (len(number) > 1 and number[most] >= OFTEN
           and number[most] >= NEARLY_ALL * sum(number.values()))
  return most if alone else None


def _by_chance(case: EvidenceInputs, ranks: list[int]) -> bool:
  """Whether some processes would as easily hold so many of the pauses, did each strike all of them
  alike."""
  struck = strikes(case)
  own = {int(case.run.process_of_rank[r]) for r in ranks}
  total, held, part = (sum(struck.values()), sum(struck.get(p, 0) for p in own),
                       len(own) / max(1, len(struck)))
  if len(struck) < 2:
    return False
  return binomial_tail(held, total, part) * math.comb(len(struck), len(own)) > 1 - CONFIDENCE


def _whose(case: EvidenceInputs, ranks: list[int], excess: np.ndarray) -> Sentence:
  """Which ranks the pauses are on; of so few that nobody is named for them, too."""
  whole = max(float(excess.sum()), 1e-12)
  if ranks:
    return Evidence.PAUSES_HELD.say(part=percent(float(excess[ranks].sum()) / whole),
        those="this rank" if len(ranks) == 1 else "these ranks")
  most = np.flatnonzero(excess >= MOST * excess.max())
  part = float(excess[most].sum()) / whole
  if part >= NEARLY_ALL and 2 * len(most) <= int((case.totals.present > 0).sum()):
    return Evidence.PAUSES_FEW.say(part=percent(part), ranks=some_ranks(most))
  return Evidence.PAUSE_ALIKE.say()


def find(case: EvidenceInputs) -> Finding | None:
  """Describes the pauses; None where they cost little, or have no cause that shows and don't cost
  much."""
  run, waiting, alone = case.run, case.lateness.intermittent.for_gaps, standing_out(case)
  excess, own, by_block = _beyond_usual(case)
  ranks, sure = who_pauses(case, excess, alone), _confidence(case, by_block)
  struck = ranks or np.flatnonzero(case.totals.present > 0).tolist()
  mean = float(excess[struck].mean())
  processes = {int(run.process_of_rank[r]) for r in struck if run.process_of_rank[r] >= 0}
  mechanisms = of_pauses(case, sorted(processes), mean)
  # Of pauses with a known cause the finding is what that cause holds.
  shown = paused(run, case.selected) if mechanisms else None
  seconds = shown[0] + min(shown[1], waiting) if shown else own + waiting
  # That a loop stands still for something is less than what for: other programs make gaps ragged.
  named = any(said.code is not Evidence.BETWEEN for said in mechanisms)
  least = (SHOWS if named else COSTLY if mechanisms or alone is not None
           else UNEXPLAINED)
  if (not named and crowded_processors(case)
      or seconds < least * case.mean_step or sure < CONFIDENCE):
    return None
  hosts = hosts_of(run, ranks)
  gap = case.phases.get("gap")
  usual = 0.0 if gap is None else float(np.nan_to_num(mean_known(gap[struck])))
  who = some_ranks(ranks).capitalize() if ranks else "Ranks"
  evidence = [
      Evidence.PAUSES.say(who=who, s="s" if len(ranks) == 1 else "", usual=milliseconds(usual),
          mean=milliseconds(usual + mean)),
      Evidence.PAUSES_COST.say(own=milliseconds(own), waiting=milliseconds(waiting))]
  evidence += [_whose(case, ranks, excess), *mechanisms]
  if not mechanisms and run.host_causes.columns:
    evidence.append(Evidence.NO_CAUSE.say())
  causes = kinds(mechanisms)
  return Finding(
      mode=Verdict.JITTER, share=seconds / case.mean_step, confidence=sure,
      ranks=tuple(ranks), hosts=hosts, evidence=tuple(evidence), advice=against_pauses(causes),
      causes=causes)
