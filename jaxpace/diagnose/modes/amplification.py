"""Late ranks change from step to step, and everybody waits for each:
`synchronization_amplification`."""

from __future__ import annotations

import numpy as np

from jaxpace.core.words import Sentence, plural, some_ranks
from jaxpace.diagnose.episodes import binomial_tail
from jaxpace.diagnose.lateness import series_changes, spell
from jaxpace.diagnose.limits import CONFIDENCE, COSTLY, MOST, NEARLY_ALL, OFTEN, PART, TWICE
from jaxpace.diagnose.modes.inputs import EvidenceInputs, Finding
from jaxpace.diagnose.waiting_places import most_waited
from jaxpace.diagnose.words.codes import Verdict
from jaxpace.diagnose.words.evidence import Evidence, advise
from jaxpace.diagnose.words.names import hosts_of, percent, ranks_by_host


def find(case: EvidenceInputs, seconds: float, suspected: float) -> Finding | None:
  """Describes the waiting for intermittently late ranks; None where it costs little, throughout and
  in any stretch."""
  run, totals, lateness = case.run, case.totals, case.lateness
  by_block = (lateness.intermittent.by_block
              - (case.selected.means(totals.waiting_gap) - lateness.persistent.for_gaps))
  begin, end = _stretch(case)
  if suspected < COSTLY * case.mean_step and (begin, end) == (0, case.selected.blocks):
    return None
  whole = totals.earliness.sum(axis=0)
  whole = np.sort(whole[np.isfinite(whole)])
  worst = float(whole[-max(1, len(whole) // 10):].sum() / max(whole.sum(), 1e-12))
  stopping = _stopping(case) if worst > MOST else _mostly_last(case)
  alone = () if stopping is None else (stopping,)
  evidence = [
      _last_rank(case) if stopping is None else Evidence.LAST_RANK.say("one",
          part=percent(float(totals.blame[stopping] / totals.blame.sum())), rank=stopping),
      Evidence.WORST_TENTH.say(part=percent(worst), which="rare long pauses, not everyday jitter"
          if worst > MOST else "everyday jitter, not rare pauses")]
  at = most_waited(case)
  evidence += [at] if at else []
  first, last = series_changes(run, case.selected, _for_work(case), begin, end)
  if first is not None or last is not None:
    evidence.append(Evidence.SPELL.say(spell=spell(first, last)))
  causes = {name: float(totals.per_rank[f"waiting_{name}"].sum())
            for name in ("compute", "runtime", "pacing")}
  total = max(sum(causes.values()), 1e-12)
  of_all = {name: percent(value / total) for name, value in causes.items()}
  delays = f", {of_all['pacing']} for delays" if causes["pacing"] > 0 else ""
  evidence.append(Evidence.WAITING_FOR.say(delays=delays, **of_all))
  hosts = hosts_of(run, alone)
  by_host = _blame_by_host(case)
  if len(by_host) > 1 and not alone:
    host, part, expected = max(by_host, key=lambda entry: entry[1] / entry[2])
    if part > 2 * expected and part > 0.2:
      evidence.append(Evidence.MOSTLY_HOST.say(part=percent(part), host=host,
          expected=percent(expected)))
      hosts = (host,) if part > 0.6 and not lateness.episodes else ()
  why = (("one_varies" if worst <= MOST else "one_stops") if alone
         else "pauses" if worst > MOST else "everyday")
  return Finding(
      mode=Verdict.AMPLIFICATION, share=seconds / case.mean_step, confidence=case.sure(by_block),
      ranks=alone, hosts=hosts, evidence=tuple(evidence),
      advice=advise(Verdict.AMPLIFICATION, why), first_step=first, last_step=last)


def _stopping(case: EvidenceInputs) -> int | None:
  """The one rank that holds nearly all of the waiting, in some long stops; None: there is none."""
  totals = case.totals
  rank = int(totals.blame.argmax())
  whole = np.where(case.selected.mask, np.nan_to_num(totals.earliness.sum(axis=0)), 0.0)
  stops = int(((whole >= PART * case.mean_step) & (totals.last_rank == rank)).sum())
  alone = stops >= OFTEN and totals.blame[rank] >= NEARLY_ALL * totals.blame.sum()
  return rank if alone else None


def _mostly_last(case: EvidenceInputs) -> int | None:
  """The rank that is last in most of the steps, clearly more often than by chance, and holds most
  of the waiting; None: there is none.

  By no fixed amount, or its mean would show it: a loader that prefetches, say.
  """
  totals = case.totals
  rank, there = int(totals.blame.argmax()), int((totals.present > 0).sum())
  steps = max(1, int(totals.present[rank]))
  last = int(totals.last[rank])
  chance = there * binomial_tail(last, steps, 1 / there)
  return (rank if last >= MOST * steps and chance <= 1 - CONFIDENCE
          and 2 * totals.blame[rank] >= totals.blame.sum() and not case.lateness.episodes else None)


def _last_rank(case: EvidenceInputs) -> Sentence:
  """How the last rank changes, beside ranks that are late for good."""
  totals, late = case.totals, case.lateness.late
  last = totals.last.copy()
  last[late] = 0
  others = np.flatnonzero(last)
  waited = max(1, int(totals.last.sum()))
  if not late.size:
    often, chance = last / waited, 1 / max(1, int((totals.present > 0).sum()))
    return Evidence.LAST_RANK.say("changes", ranks=plural(len(others), "rank"),
        of_ranks=case.run.ranks, worst=int(often.argmax()), often=percent(often.max()),
        chance=percent(chance))
  beside = f"Beside {some_ranks(late)}, late as a rule,"
  if not others.size:
    return Evidence.LAST_RANK.say("none_beside", beside=beside)
  worst = int(last.argmax())
  if others.size == 1:
    return Evidence.LAST_RANK.say("one_beside", beside=beside, worst=worst,
        worst_often=percent(last[worst] / waited))
  return Evidence.LAST_RANK.say("several_beside", beside=beside, others=len(others),
      often=percent(last.sum() / waited), worst=worst, worst_often=percent(last[worst] / waited))


def everyday(case: EvidenceInputs) -> float:
  """Seconds that the median step waits for ranks that compute longer intermittently."""
  selected = case.selected
  waiting = (_for_work(case)[selected.mask]
             - case.lateness.persistent.by_block[selected.block[selected.mask]])
  waiting = waiting[np.isfinite(waiting)]
  return float(np.median(waiting)) if waiting.size else 0.0


def _for_work(case: EvidenceInputs) -> np.ndarray:
  """[K] waiting for ranks that compute longer, s."""
  return case.totals.earliness.sum(axis=0) - case.totals.waiting_gap


def _stretch(case: EvidenceInputs) -> tuple[int, int]:
  """Blocks in which the waiting is much more than in the rest of the run; all where there are none
  such."""
  selected, whole = case.selected, (0, case.selected.blocks)
  if case.lateness.episodes:
    return whole  # waiting for ranks that are late for good changes with their episodes
  by_block = case.selected.medians(_for_work(case))
  spans = [(b, e) for b, e in case.levels(by_block) if np.isfinite(by_block[b:e]).any()]
  level = np.array([float(np.nanmedian(by_block[b:e])) for b, e in spans])
  high = (level >= COSTLY * case.mean_step) & (level >= TWICE * level.min(initial=np.inf))
  at = np.flatnonzero(high)
  if not at.size or high.all():
    return whole
  begin, end = spans[at[0]][0], spans[at[-1]][1]
  return (begin, end) if selected.within(begin, end).sum() >= PART * selected.size else whole


def _blame_by_host(case: EvidenceInputs) -> list[tuple[str, float, float]]:
  """Host, its share of the waiting it caused, its share of the ranks."""
  run, blame = case.run, case.totals.blame
  whole = max(float(blame.sum()), 1e-12)
  return [(host, float(sum(blame[own])) / whole, len(own) / run.ranks)
          for host, own in ranks_by_host(run).items() if host]
