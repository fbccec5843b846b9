"""The slow ranks are those that sit in a bad place: `locality`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from jaxpace.diagnosis.codes import Evidence, Sentence
from jaxpace.diagnosis.episodes import Episode
from jaxpace.diagnosis.lateness import WaitedFor, costliest_first
from jaxpace.diagnosis.modes import straggler
from jaxpace.diagnosis.modes.case import LOCALITY, Case, Finding
from jaxpace.diagnosis.modes.contention import SlowTransfers
from jaxpace.diagnosis.wording import hosts_of, milliseconds
from jaxpace.hosts.locality.concerns import WARNING, Concern, find_concerns
from jaxpace.trace.problems import list_ranks
from jaxpace.trace.run import Run

# Set looking at the fault lab's runs of seeds 0 to 3; measurements/fault_lab_seed4 is what they are
# worth on others.
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
      seen = (place._replace(devices=place.devices[i:i + 1]) if one_each
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


def late_in_place(case: Case, places: Sequence[Bad]) -> tuple[Bad, list[Episode]] | None:
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


def slow_in_place(case: Case, places: Sequence[Bad], slow: SlowTransfers) -> Bad | None:
  """The concern whose ranks' processes have the slow links."""
  processes = set(slow.links.slow)
  for bad in places:
    if (bad.kind in _NETWORK and processes
        and {int(case.run.process_of_rank[r]) for r in bad.ranks} == processes):
      return bad
  return None


def chance(case: Case, bad: Bad) -> float:
  """That as many late ranks, picked blindly, are exactly those in a bad place."""
  return 1 / math.comb(int((case.totals.present > 0).sum()), len(bad.ranks))


def find_late(case: Case, bad: Bad, episodes: Sequence[Episode], held: WaitedFor) -> Finding:
  """Describes ranks that are late because of their place."""
  lateness = float(np.mean([e.lateness for e in episodes]))
  ranks = costliest_first(episodes)
  evidence, mechanisms = straggler.describe(case, episodes)
  lead = f"The {len(ranks)} ranks" if len(ranks) > 1 else "The one rank"
  head = (Sentence(Evidence.IN_PLACE,
      f"{lead} {_says(bad)} ({list_ranks(ranks)}) lose{'s' if len(ranks) == 1 else ''} "
      f"{milliseconds(lateness)} per step against the others, and they are the only ones there: by "
      f"chance that is so once in {round(1 / chance(case, bad)):,}."))
  first, last = straggler.spell_of(case, episodes)
  return Finding(
      mode=LOCALITY, share=held.seconds / case.step_time,
      confidence=min(e.confidence for e in episodes), ranks=tuple(ranks),
      hosts=hosts_of(case.run, ranks),
      evidence=(head, Sentence(Evidence.PLACE, bad.sentence), *evidence), advice=_advice(bad),
      causes=(bad.kind, *dict.fromkeys(m.kind for m in mechanisms if m.kind)), first_step=first,
      last_step=last)


def find_slow(case: Case, bad: Bad, slow: Finding) -> Finding:
  """Turns the finding of a slow host into one of its place."""
  ranks = sorted(bad.ranks)
  lead = f"The {len(ranks)} ranks" if len(ranks) > 1 else "The one rank"
  head = (Sentence(Evidence.IN_PLACE,
      f"{lead} {_says(bad)} ({list_ranks(ranks)}) are those whose host's link is slow; each step "
      f"loses {milliseconds(slow.share * case.step_time)}."))
  return Finding(
      mode=LOCALITY, share=slow.share, confidence=slow.confidence, ranks=tuple(ranks),
      hosts=slow.hosts, evidence=(head, Sentence(Evidence.PLACE, bad.sentence), *slow.evidence),
      advice=_advice(bad), causes=(bad.kind, *slow.causes), first_step=slow.first_step,
      last_step=slow.last_step)


def _says(bad: Bad) -> str:
  return _SAYS.get(bad.kind, "in a bad place")


def _advice(bad: Bad) -> str:
  return {"cpu_limit":
          "Raise the CPU limit of the control group, or give all processes the same one.",
          "clock_source": "Give these hosts the same, quick clock source as the others.",
          "far_socket":
          "Bind the process to the socket of its GPU and NIC; `jaxpace doctor` shows which "
          "that is."}.get(
              bad.kind, "Move the GPU or the NIC so that both hang on the same switch or socket, "
                        "or tell the collective library which NIC to use; `jaxpace doctor` shows "
                        "the tree.")
