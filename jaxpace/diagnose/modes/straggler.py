"""The same ranks are late in step after step: `persistent_straggler`."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from jaxpace.diagnose.episodes import Episode
from jaxpace.diagnose.lateness import WaitedFor, costliest_first, longer_gap, rank_change, spell
from jaxpace.diagnose.limits import LEAST, MOST
from jaxpace.diagnose.mechanism import kinds, of_lateness
from jaxpace.diagnose.modes.contention import SlowTransfers
from jaxpace.diagnose.modes.inputs import EvidenceInputs, Finding
from jaxpace.diagnose.selected_steps import MAX_COARSE
from jaxpace.diagnose.waiting_places import late_at
from jaxpace.diagnose.words.advice import ADVICE, advise
from jaxpace.diagnose.words.codes import Sentence, Verdict
from jaxpace.diagnose.words.evidence import Evidence
from jaxpace.diagnose.words.names import (
  NAMED,
  hosts_of,
  joined,
  milliseconds,
  more,
  name_rank,
  named,
  percent,
  ranks_by_host,
  some_ranks,
)
from jaxpace.hosts.locality.job import WARNING, Concern, find_concerns
from jaxpace.runs.problems import list_ranks
from jaxpace.runs.run import Run


def find(case: EvidenceInputs, episodes: Sequence[Episode], held: WaitedFor) -> Finding | None:
  """Describes ranks that are late for good or for a long while.

  Args:
    case: the run.
    episodes: when they are late.
    held: what the job waits for them.
  """
  share = held.seconds / case.mean_step
  if not episodes or share < LEAST:
    return None
  run, late = case.run, costliest_first(episodes)
  evidence, mechanisms = describe(case, episodes)
  hosts = hosts_of(run, late)
  whole = [h for h in hosts if _whole_host_late(case, h, set(late))]
  if whole:
    evidence.append(Evidence.WHOLE_HOST.say(hosts=named(whole),
        host="hosts" if len(whole) > 1 else "host"))
  elsewhere = [h for h in hosts if h not in whole]
  if whole and elsewhere:
    evidence.append(Evidence.ELSEWHERE.say(hosts=named(elsewhere)))
  cost = max(e.lateness * e.steps for e in episodes)
  first, last = spell_of(case, [e for e in episodes if e.lateness * e.steps >= MOST * cost])
  causes = kinds(mechanisms)
  return Finding(
      mode=Verdict.PERSISTENT, share=share, confidence=min(e.confidence for e in episodes),
      ranks=tuple(late), hosts=hosts, evidence=tuple(evidence),
      advice=_advice(case, episodes, causes), causes=causes, first_step=first, last_step=last)


def spell_of(case: EvidenceInputs, episodes: Sequence[Episode]) -> tuple[int | None, int | None]:
  """First and last step of all the episodes together; None where they reach the run's beginning or
  end."""
  begin, end = min(e.begin for e in episodes), max(e.end for e in episodes)
  earliest = next(e for e in episodes if e.begin == begin)
  first = (None if begin == 0
           else rank_change(case.run, case.selected, earliest.rank, begin))
  latest = next(e for e in episodes if e.end == end)
  last = (None if end == case.selected.blocks
          else rank_change(case.run, case.selected, latest.rank, end) - 1)
  return first, last


def describe(case: EvidenceInputs, episodes: Sequence[Episode]
             ) -> tuple[list[Sentence], list[Sentence]]:
  """How late each of the costliest ranks is, when, where in the step, and what its host shows of
  it; and this last by itself."""
  run, totals = case.run, case.totals
  evidence: list[Sentence] = []
  mechanisms: list[Sentence] = []
  late = costliest_first(episodes)
  explained: set[int] = set()
  for rank in late[:NAMED]:
    own = [e for e in episodes if e.rank == rank]
    often = int(totals.last[rank]) / max(1, int(totals.present[rank]))
    longest = max(own, key=lambda e: e.steps)
    # of the blocks that its persistence is counted in
    steps = max(1, round(longest.steps / min(MAX_COARSE, longest.end - longest.begin)))
    spells = [spell_of(case, [e]) for e in own[:3]]
    times = joined([spell(*found) for found in spells])
    chronic = " (chronic)" if spells[0] == (None, None) else ", and was in time otherwise"
    evidence.append(Evidence.LATE.say(rank=name_rank(run, rank),
        lateness=milliseconds(longest.lateness), times=times, chronic=chronic,
        persistence=percent(longest.persistence), steps=steps, often=percent(often)))
    if rank == late[0] or len(late) < NAMED:
      evidence.append(Sentence(Evidence.WHERE, _where(case, longest)))
      compute, gap = excess(case, longest)
      at = late_at(case, longest) if compute > gap else None
      evidence += [at] if at else []
    process = int(run.process_of_rank[rank])
    if process >= 0 and process not in explained:
      explained.add(process)
      compute, gap = excess(case, longest)
      mechanisms += of_lateness(case, process, longest.begin, longest.end,
                                max(compute + gap, 0.0), gap)
  if len(late) > NAMED:
    evidence.append(Evidence.LATE_AND_LESS.say(late=list_ranks(late[NAMED:])))
  return [*evidence, *mechanisms], mechanisms


def excess(case: EvidenceInputs, episode: Episode) -> tuple[float, float]:
  """Seconds by which a late rank's compute and gap are longer than the typical rank's, while it is
  late."""
  gap = longer_gap(case.totals, case.lateness.blocks, episode)
  return episode.lateness - gap, gap


def _where(case: EvidenceInputs, episode: Episode) -> str:
  """Which part of the step makes a rank late."""
  compute, gap = excess(case, episode)
  said = (f"Against the typical rank, its compute is {more(compute)} and its gap between steps "
          f"{more(gap)}.")
  typical_ranks = case.lateness.blocks.typical(0, case.selected.blocks, episode.rank)
  longer = []
  for name, medians in case.phases.items():
    typical = medians[typical_ranks]
    if name in ("held", "sync"):  # waiting, for other ranks or for another job
      continue
    if not np.isfinite(medians[episode.rank]) or not np.isfinite(typical).any():
      continue
    difference = float(medians[episode.rank] - np.nanmean(typical))
    if difference > 0.2 * episode.lateness:
      longer.append((difference, f"{name} takes {milliseconds(float(medians[episode.rank]))}, "
                                 f"{milliseconds(float(np.nanmean(typical)))} on the typical rank"))
  if longer:
    said += f" Its {'; its '.join(text for _, text in sorted(longer, reverse=True))}."
  return said


def _advice(case: EvidenceInputs, episodes: Sequence[Episode], causes: tuple[str, ...]) -> str:
  compute, gap = np.array([excess(case, e) for e in episodes]).sum(axis=0)
  late = costliest_first(episodes)
  hosts = hosts_of(case.run, late)
  subject = some_ranks(late) + (f" on {named(hosts)}" if hosts else "")
  for kind in ADVICE[Verdict.PERSISTENT]:
    # CPU time that a process takes between its steps is Python's, not that of longer sequences.
    if kind in causes and not (kind == "work" and gap > compute):
      return advise(Verdict.PERSISTENT, kind, subject=subject)
  measured = "data" in case.run.host_causes.columns
  return advise(Verdict.PERSISTENT, "compute" if gap <= compute else "gap" if measured
                else "gap_unmeasured", subject=subject)


def _whole_host_late(case: EvidenceInputs, host: str, late: set[int]) -> bool:
  ranks = ranks_by_host(case.run)[host]
  return 1 < len(ranks) < case.run.ranks and late.issuperset(ranks)


# The slow ranks are those that sit in a bad place: `locality`.

_NETWORK = ("far_nic", "shared_nic", "link_width", "link_speed", "far_socket")
"""Concerns that can make what a host sends slow."""
_SAYS = {
    "far_nic": "whose GPU sits across the socket from its NIC",
    "shared_nic": "that share a NIC with others",
    "far_socket": "whose process runs on the far socket",
    "link_width": "whose PCIe link has fewer lanes than its slot offers",
    "link_speed": "whose PCIe link is slower than its slot offers",
    "cpu_limit": "whose control group is granted too few CPUs",
    "clock_source": "whose host reads a slow clock",
}


class Bad(NamedTuple):
  """A concern, and the ranks that it is about: some, not all."""

  kind: str
  ranks: frozenset[int]
  sentence: str


def bad_places(run: Run) -> list[Bad]:
  """Concerns that set some ranks apart from others, the most particular first."""
  ranks: dict[str, set[int]] = {}
  sentence: dict[str, str] = {}
  placed: set[int] = set()
  for place in run.locality:
    own = [r for r in range(run.ranks) if int(run.process_of_rank[r]) == place.process]
    placed.update(own)
    one_each = len(place.devices) == len(own)
    for i, rank in enumerate(own):
      # Seen with this rank's device alone, a process's place has the concerns of this rank.
      seen = (place.replace(devices=place.devices[i:i + 1]) if one_each
              and place.devices[i].gpu else place)
      for concern in _warnings(find_concerns(seen)):
        ranks.setdefault(concern.kind, set()).add(rank)
        sentence.setdefault(concern.kind, concern.sentence)
    for concern in _warnings(find_concerns(place)):
      if concern.kind not in ranks:
        ranks[concern.kind] = set(own)
        sentence[concern.kind] = concern.sentence
  return sorted((Bad(kind, frozenset(own), sentence[kind]) for kind, own in ranks.items()
                 if own < placed),
                key=lambda bad: (list(_SAYS).index(bad.kind) if bad.kind in _SAYS else len(_SAYS),
                                 bad.kind))


def _warnings(concerns: Sequence[Concern]) -> list[Concern]:
  return [c for c in concerns if c.level == WARNING]


def late_in_place(case: EvidenceInputs, places: Sequence[Bad]) -> tuple[Bad, list[Episode]] | None:
  """The concern whose ranks are late, all of them and alike, and their episodes."""
  run = case.run
  everyone = [*case.lateness.episodes]
  for bad in places:
    own = [e for e in everyone if e.rank in bad.ranks]
    named = {e.rank for e in own}
    if named != bad.ranks or not own:
      continue
    others = {e.rank for e in everyone} - named
    # One late rank of many in a bad place may be chance; all those in it, and more of them than
    # others, is not.
    if len(others) <= len(named) and len(others) + len(named) < run.ranks:
      return bad, own
  return None


def slow_in_place(case: EvidenceInputs, places: Sequence[Bad], slow: SlowTransfers) -> Bad | None:
  """The concern whose ranks' processes have the slow links."""
  processes = set(slow.links.slow)
  for bad in places:
    if (bad.kind in _NETWORK and processes
        and {int(case.run.process_of_rank[r]) for r in bad.ranks} == processes):
      return bad
  return None


def find_late_in_place(case: EvidenceInputs, bad: Bad, episodes: Sequence[Episode],
                       held: WaitedFor) -> Finding:
  """Describes ranks that are late because of their place."""
  lateness = float(np.mean([e.lateness for e in episodes]))
  ranks = costliest_first(episodes)
  evidence, mechanisms = describe(case, episodes)
  # as many late ranks, picked blindly, are exactly those in a bad place once in so many times
  times = math.comb(int((case.totals.present > 0).sum()), len(bad.ranks))
  head = Evidence.IN_PLACE.say(
      "late", those=_those(bad), ranks=list_ranks(ranks), s="s" if len(ranks) == 1 else "",
      lateness=milliseconds(lateness), times=times)
  first, last = spell_of(case, episodes)
  return Finding(
      mode=Verdict.LOCALITY, share=held.seconds / case.mean_step,
      confidence=min(e.confidence for e in episodes), ranks=tuple(ranks),
      hosts=hosts_of(case.run, ranks),
      evidence=(head, Sentence(Evidence.PLACE, bad.sentence), *evidence),
      advice=_advice_for_place(bad),
      causes=(bad.kind, *kinds(mechanisms)), first_step=first, last_step=last)


def find_slow(case: EvidenceInputs, bad: Bad, slow: Finding) -> Finding:
  """Turns the finding of a slow host into one of its place."""
  ranks = sorted(bad.ranks)
  head = Evidence.IN_PLACE.say("slow", those=_those(bad), ranks=list_ranks(ranks),
                               lost=milliseconds(slow.share * case.mean_step))
  return dataclasses.replace(
      slow, mode=Verdict.LOCALITY, ranks=tuple(ranks), advice=_advice_for_place(bad),
      evidence=(head, Sentence(Evidence.PLACE, bad.sentence), *slow.evidence),
      causes=(bad.kind, *slow.causes))


def _those(bad: Bad) -> str:
  lead = f"The {len(bad.ranks)} ranks" if len(bad.ranks) > 1 else "The one rank"
  return f"{lead} {_SAYS.get(bad.kind, 'in a bad place')}"


def _advice_for_place(bad: Bad) -> str:
  return advise(Verdict.LOCALITY, bad.kind if bad.kind in ADVICE[Verdict.LOCALITY] else "")
