"""Names what is wrong with a job, with evidence and advice, or nothing."""

from __future__ import annotations

import dataclasses

from jaxpace.diagnosis import step_ranges, tcp
from jaxpace.diagnosis.changes import change_points
from jaxpace.diagnosis.codes import Evidence, Sentence
from jaxpace.diagnosis.episodes import CONFIDENCE
from jaxpace.diagnosis.lateness import WaitedFor, hold
from jaxpace.diagnosis.modes import (
  amplification,
  contention,
  jitter,
  locality,
  straggler,
)
from jaxpace.diagnosis.modes.case import (
  AMPLIFICATION,
  CONTENTION,
  COSTLY,
  JITTER,
  LEAST,
  LOCALITY,
  PERSISTENT,
  Case,
  Finding,
)
from jaxpace.diagnosis.selected_steps import MIN_STEPS
from jaxpace.diagnosis.wording import hosts_of, milliseconds, name_rank, named

__all__ = ["AMPLIFICATION", "CONTENTION", "COSTLY", "JITTER", "LOCALITY", "PERSISTENT", "Finding",
           "find", "hosts_of", "milliseconds", "name_rank"]


# Set looking at the fault lab's runs of seeds 0 to 3; measurements/fault_lab_seed4 is what they are
# worth on others.
_TOGETHER = 0.04
"""Two faults that begin within this part of the run from each other are one."""
_LITTLE = 0.25
"""A rank that becomes late as transfers become slow is late because of them if round trips show
that data queue on the way, and its share is less than this part of theirs."""


def find(case: Case) -> tuple[Finding, ...]:
  """Looks for every failure mode.

  The waiting for late ranks is divided without overlap among ranks that are late for good
  (`locality` where their place explains it, else `persistent_straggler`), pauses between steps
  (`runtime_jitter`) and the rest (`synchronization_amplification`). The pauses themselves are part
  of the gaps, contention part of the transfers.

  Args:
    case: the run, added up; fewer than 20 counted steps carry no finding.

  Returns:
    Findings, the costliest first; none means healthy.
  """
  run = case.run
  if case.selected.size < MIN_STEPS or not run.collectives or not case.step_time > 0:
    return ()
  places = locality.bad_places(run)
  late = _late(case, places)
  slow = _slow(case)
  transfers = _transfers(case, places, slow)
  if late and slow and transfers and _one_fault(case, late[0], transfers[0], slow):
    if slow.queued and late[0].share < _LITTLE * transfers[0].share:
      # What its processors do for a crowded network makes a host late by a little.
      said = Sentence(Evidence.LATE_AS_WELL,
          f"{named(late[0].hosts) or 'A rank'} is late by a little since then: "
          f"{late[0].evidence[0]}")
      transfers[0] = dataclasses.replace(transfers[0], evidence=(*transfers[0].evidence, said))
      late = late[1:]
    else:
      # A host whose processors are taken is late and slow to send: one fault, and its contention is
      # no fabric's.
      said = Sentence(Evidence.SLOW_AS_WELL,
          "Transfers are slower as well then, as this host's processors serve them: "
          f"{transfers[0].evidence[0]}")
      late[0] = dataclasses.replace(late[0], evidence=(*late[0].evidence, said))
      transfers = []
  findings = [*late, *_turns(case), *transfers]
  return tuple(sorted(findings, key=lambda f: -f.share))


def _late(case: Case, places: list[locality.Bad]) -> list[Finding]:
  """Ranks that are late for good: in a bad place, and others."""
  episodes, held = case.lateness.episodes, case.lateness.held
  match = locality.late_in_place(case, places)
  if match is None:
    late = straggler.find(case, episodes, held)
    return [late] if late else []
  bad, own = match
  others = [e for e in episodes if e not in own]
  placed, rest = (hold(case.totals, case.selected, some)
                  for some in (own, others))
  # Both may be late at once: each gets the mean of what it holds alone and what it adds to the
  # other (Shapley).
  placed = _mean_held(placed, held, rest)
  rest = WaitedFor(held.by_collective - placed.by_collective, held.for_gaps - placed.for_gaps,
                   held.by_block - placed.by_block)
  found = ([locality.find_late(case, bad, own, placed)]
           if placed.seconds >= LEAST * case.step_time else [])
  another = straggler.find(case, others, rest)
  return [*found, *([another] if another else [])]


def _mean_held(own: WaitedFor, both: WaitedFor, others: WaitedFor) -> WaitedFor:
  return WaitedFor((own.by_collective + both.by_collective - others.by_collective) / 2,
                   (own.for_gaps + both.for_gaps - others.for_gaps) / 2,
                   (own.by_block + both.by_block - others.by_block) / 2)


def _turns(case: Case) -> list[Finding]:
  """Waiting for ranks by turns: because of pauses between steps, and because of work."""
  lateness = case.lateness
  pauses = jitter.LongGaps(case)
  by_turns = float(lateness.random.sum())
  for_work = by_turns - pauses.waiting
  jittery = jitter.find(case, pauses)
  found = [jittery] if jittery else []
  # Waiting for gaps that are no finding makes one of waiting for work in step after step, which by
  # itself may be too little to tell: other load on the hosts makes a few steps long and leaves the
  # median.
  everyday = amplification.everyday(case) >= COSTLY / 2 * case.step_time
  if case.run.ranks > 1:
    amplified = amplification.find(case, for_work,
                                   by_turns if not jittery and everyday else for_work)
    found += [amplified] if amplified and amplified.confidence >= CONFIDENCE else []
  return found


def _one_fault(case: Case, late: Finding, contended: Finding,
               slow: contention.SlowTransfers) -> bool:
  """Whether transfers are slow because a late rank's host is, and no host's link by itself is the
  slow one.

  They became slow when the rank became late; or other programs take its processors all the while
  they are slow; or it is that host's partners whose connections are busy, with what it is slow to
  take, and no others'. Or, of two hosts, it is the other one whose link seems slow, by less than
  the lateness.
  """
  processes = {int(case.run.process_of_rank[r]) for r in late.ranks}
  if (contended.mode == CONTENTION and contended.share < late.share
      and tcp.waits_for(slow.links, processes)):
    return True
  if (contended.mode != CONTENTION or set(contended.hosts) - set(late.hosts)
      or "slow_host" in contended.causes):
    return False
  if ("preempted" in late.causes and (late.first_step or 0) <= (contended.first_step or 0)
      + _within(case)):
    return True
  if tcp.taken_slowly(slow.links, processes):
    return True
  # A process that stands still now and then does so in the step and in the collective. Where no
  # connections tell, that explains both.
  if slow.bursts and not slow.links.busy:
    return True
  if contended.first_step is None:
    return False
  # A rank that was late before may have become later then.
  blocks = case.lateness.blocks.arrival
  ranks = sorted({e.rank for e in case.lateness.episodes})
  starts = [step_ranges.rank_change(case.run, case.selected, rank, point)
            for rank, points in zip(ranks, change_points(blocks[ranks], len(blocks)), strict=True)
            for point in points]
  return any(abs(start - contended.first_step) <= _within(case) for start in starts)


def _within(case: Case) -> float:
  """Steps by which what begins together may seem to begin apart."""
  return max(3, _TOGETHER * case.selected.size)


def _slow(case: Case) -> contention.SlowTransfers | None:
  slow = contention.look(case) if case.run.ranks > 1 else None
  return (slow if slow and slow.seconds >= COSTLY * case.step_time and slow.confidence >= CONFIDENCE
          else None)


def _transfers(case: Case, places: list[locality.Bad],
               slow: contention.SlowTransfers | None) -> list[Finding]:
  if slow is None:
    return []
  found = contention.describe(case, slow)
  bad = locality.slow_in_place(case, places, slow)
  return [locality.find_slow(case, bad, found) if bad else found]
