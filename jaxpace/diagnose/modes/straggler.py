"""The same ranks are late in step after step: `persistent_straggler`."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from jaxpace.core.words import Sentence, list_ranks, some_ranks
from jaxpace.diagnose.episodes import Episode
from jaxpace.diagnose.lateness import WaitedFor, costliest_first, longer_gap, rank_change, spell
from jaxpace.diagnose.limits import LEAST, MOST, NEARLY_ALL
from jaxpace.diagnose.mechanism import kinds, of_lateness
from jaxpace.diagnose.modes.contention import SlowTransfers
from jaxpace.diagnose.modes.inputs import EvidenceInputs, Finding
from jaxpace.diagnose.selected_steps import mean_known
from jaxpace.diagnose.waiting_places import late_at
from jaxpace.diagnose.words.codes import Verdict
from jaxpace.diagnose.words.evidence import ADVICE, Evidence, advise
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
)
from jaxpace.hosts.locality.job import WARNING, Concern, find_concerns
from jaxpace.runs.run import Run


def find(case: EvidenceInputs, episodes: Sequence[Episode], held: WaitedFor,
         bad: Bad | None = None) -> Finding | None:
  """Describes ranks that are late for good or for a long while; None where that costs little."""
  share = held.seconds / case.mean_step
  if not episodes or share < LEAST:
    return None
  late = costliest_first(episodes)
  hosts = hosts_of(case.run, late)
  evidence, mechanisms = describe(case, episodes)
  causes = kinds(mechanisms)
  if bad is None:
    evidence += _of_hosts(case, hosts, late)
    advice = _advice(case, episodes, causes)
  else:
    # as many late ranks, picked blindly, are exactly those in a bad place once in so many times
    times = math.comb(int((case.totals.present > 0).sum()), len(bad.ranks))
    lateness = milliseconds(float(np.mean([e.lateness for e in episodes])))
    evidence = [*bad.evidence("late", late, s="s" if len(late) == 1 else "", lateness=lateness,
                              times=times), *evidence]
    advice, causes = bad.advice, (bad.kind, *causes)
  cost = max(e.lateness * e.steps for e in episodes)
  first, last = _spell(case, [e for e in episodes if e.lateness * e.steps >= MOST * cost])
  return Finding(
      mode=Verdict.PERSISTENT if bad is None else Verdict.LOCALITY, share=share,
      confidence=min(e.confidence for e in episodes), ranks=tuple(late), hosts=hosts,
      evidence=tuple(evidence), advice=advice, causes=causes, first_step=first, last_step=last)


def _of_hosts(case: EvidenceInputs, hosts: Sequence[str], late: Sequence[int]) -> list[Sentence]:
  """On which hosts all ranks are late, and on which only some are."""
  by_host = ranks_by_host(case.run)
  whole = [host for host in hosts if 1 < len(by_host[host]) < case.run.ranks
           and set(late).issuperset(by_host[host])]
  if not whole:
    return []
  said = [Evidence.WHOLE_HOST.say(hosts=named(whole), host="hosts" if len(whole) > 1 else "host")]
  elsewhere = [host for host in hosts if host not in whole]
  return said + ([Evidence.ELSEWHERE.say(hosts=named(elsewhere))] if elsewhere else [])


def _spell(case: EvidenceInputs, episodes: Sequence[Episode]) -> tuple[int | None, int | None]:
  """First and last step of all the episodes together; None where they reach the run's beginning or
  end."""
  first, last = min(episodes, key=lambda e: e.begin), max(episodes, key=lambda e: e.end)
  changed = functools.partial(rank_change, case.run, case.selected)
  return (changed(first.rank, first.begin) if first.begin else None,
          changed(last.rank, last.end) - 1 if last.end < case.selected.blocks else None)


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
    worst = max(own, key=lambda e: e.lateness * e.steps)
    evidence.append(Evidence.LATE.say(rank=name_rank(run, rank), often=percent(often),
                                      **_when(case, own, worst)))
    compute, gap = excess(case, worst)
    if rank == late[0] or len(late) < NAMED:
      evidence.append(Sentence(Evidence.WHERE, _where(case, worst)))
      at = late_at(case, worst) if compute > gap else None
      evidence += [at] if at else []
    process = int(run.process_of_rank[rank])
    if process >= 0 and process not in explained:
      explained.add(process)
      mechanisms += of_lateness(case, process, worst.begin, worst.end,
                                max(compute + gap, 0.0), gap)
  if len(late) > NAMED:
    evidence.append(Evidence.LATE_AND_LESS.say(late=list_ranks(late[NAMED:])))
  return [*evidence, *mechanisms], mechanisms


def _when(case: EvidenceInputs, own: Sequence[Episode], worst: Episode) -> dict[str, str]:
  """By how much and when a rank is late, whether it is in time otherwise, and how persistently it
  is late where it costs most."""
  shown = sorted([worst, *[e for e in own if e is not worst][:NAMED - 1]], key=lambda e: e.begin)
  late = [f"{milliseconds(e.lateness)}{'' if e is not shown[0] else ' after the typical rank'} "
          f"{spell(*_spell(case, [e]))}" for e in shown]
  always = sum(e.end - e.begin for e in own) == case.selected.blocks
  rarely = worst.persistence < NEARLY_ALL
  return {"late": joined(late), "otherwise": "" if always else ", and in time otherwise",
          "persistence": f"; then it is late for {percent(worst.persistence)} of the time"
                         if rarely else ""}


def excess(case: EvidenceInputs, episode: Episode) -> tuple[float, float]:
  """Seconds by which a late rank's compute and gap are longer than the typical rank's, while it is
  late."""
  gap = longer_gap(case.totals, case.lateness.blocks, episode)
  return episode.lateness - gap, gap


def _where(case: EvidenceInputs, episode: Episode) -> str:
  """Which part of the step makes a rank late: by means, and of the phases by medians as the report
  has them."""
  compute, gap = excess(case, episode)
  said = (f"On average its compute is {more(compute)} than the typical rank's, and its gap between "
          f"steps {more(gap)}.")
  typical_ranks = case.lateness.blocks.typical(0, case.selected.blocks, episode.rank)
  longer = []
  for name, medians in case.phases.items():
    if name in ("held", "sync"):  # waiting, for other ranks or for another job
      continue
    own, typical = float(medians[episode.rank]), float(mean_known(medians[typical_ranks]))
    if own - typical > 0.2 * episode.lateness:
      longer.append((own - typical, f"{name} is {milliseconds(own)}, {milliseconds(typical)} on "
                                    "the typical rank"))
  if longer:
    said += f" Its median {'; its median '.join(text for _, text in sorted(longer, reverse=True))}."
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

  @property
  def advice(self) -> str:
    """What to do about the place."""
    return advise(Verdict.LOCALITY, self.kind if self.kind in ADVICE[Verdict.LOCALITY] else "")

  def evidence(self, wording: str, ranks: Sequence[int], **values: object) -> list[Sentence]:
    """That these ranks are those of the place, and what is bad about it."""
    those = f"The {len(self.ranks)} ranks" if len(self.ranks) > 1 else "The one rank"
    return [Evidence.IN_PLACE.say(wording, ranks=list_ranks(ranks), **values,
                those=f"{those} {_SAYS.get(self.kind, 'in a bad place')}"),
            Sentence(Evidence.PLACE, self.sentence)]


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
  """The concern whose ranks are late, all of them, and their episodes."""
  episodes = case.lateness.episodes
  late = {e.rank for e in episodes}
  for bad in places:
    # One late rank of many in a bad place may be chance; all those in it, and more of them than
    # others, is not.
    if bad.ranks <= late and len(late) <= 2 * len(bad.ranks) and len(late) < case.run.ranks:
      return bad, [e for e in episodes if e.rank in bad.ranks]
  return None


def slow_in_place(case: EvidenceInputs, places: Sequence[Bad], slow: SlowTransfers) -> Bad | None:
  """The concern whose ranks' processes have the slow links."""
  processes = set(slow.links.slow)
  for bad in places:
    if (bad.kind in _NETWORK and processes
        and {int(case.run.process_of_rank[r]) for r in bad.ranks} == processes):
      return bad
  return None


def find_slow(case: EvidenceInputs, bad: Bad, slow: Finding) -> Finding:
  """Turns the finding of a slow host into one of its place."""
  ranks = sorted(bad.ranks)
  head = bad.evidence("slow", ranks, lost=milliseconds(slow.share * case.mean_step))
  return dataclasses.replace(
      slow, mode=Verdict.LOCALITY, ranks=tuple(ranks), advice=bad.advice,
      evidence=(*head, *slow.evidence), causes=(bad.kind, *slow.causes))
