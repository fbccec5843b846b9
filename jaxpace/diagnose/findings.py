"""Names what is wrong with a job, with evidence and advice, or nothing."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import numpy as np

from jaxpace.core.words import Sentence, duration, some_ranks
from jaxpace.diagnose import tcp
from jaxpace.diagnose.episodes import change_points
from jaxpace.diagnose.lateness import attributed_wait, rank_change
from jaxpace.diagnose.limits import (
  CONFIDENCE,
  COSTLY,
  FEWEST,
  MIN_STEPS,
  MOST,
  NEARLY_ALL,
  PART,
  SELDOM,
  SHOWS,
  TWICE,
)
from jaxpace.diagnose.mechanism import crowded_processors
from jaxpace.diagnose.modes import amplification, contention, jitter, straggler
from jaxpace.diagnose.modes.inputs import EvidenceInputs, FewPauses, Finding, Unnamed
from jaxpace.diagnose.modes.straggler import excess
from jaxpace.diagnose.phases import beyond_usual, on_purpose, one_alone, pauses_in
from jaxpace.diagnose.selected_steps import ratio
from jaxpace.diagnose.stopped import stopped_in
from jaxpace.diagnose.what_if import has_gaps
from jaxpace.diagnose.words.codes import Verdict
from jaxpace.diagnose.words.evidence import Evidence, advise
from jaxpace.diagnose.words.names import joined, milliseconds, name_process, named
from jaxpace.diagnose.words.notes import Note
from jaxpace.hosts.locality.host import parse_list
from jaxpace.runs.run import MISSING, PAUSES, Run


def find(case: EvidenceInputs) -> tuple[Finding, ...]:
  """Looks for every failure mode.

  The waiting for late ranks is divided without overlap among ranks that are late for good
  (`locality` where their place explains it, else `persistent_straggler`), pauses between steps
  (`runtime_jitter`) and the rest (`synchronization_amplification`). The pauses themselves are part
  of the gaps, contention part of the transfers.

  Returns:
    Findings, the costliest first; none means healthy.
  """
  run = case.run
  if case.selected.size < MIN_STEPS or not run.collectives or not case.mean_step > 0:
    return ()
  places = straggler.bad_places(run)
  late = _late(case, places)
  slow = _slow(case)
  transfers = _transfers(case, places, slow)
  if late and slow and transfers and _one_fault(case, late[0], transfers[0], slow):
    if slow.queued and late[0].share < PART * transfers[0].share:
      # What its processors do for a crowded network makes a host late by a little.
      said = Evidence.LATE_AS_WELL.say(who=named(late[0].hosts) or "A rank",
          evidence=late[0].evidence[0])
      late, transfers = late[1:], [transfers[0].also(said)]
    else:
      # A host whose processors are taken is late and slow to send: one fault, and its contention is
      # no fabric's.
      said = Evidence.SLOW_AS_WELL.say(evidence=transfers[0].evidence[0])
      late, transfers = [late[0].also(said), *late[1:]], []
  findings = [*late, *_turns(case), *transfers]
  return tuple(sorted(findings, key=lambda f: -f.share))


def _late(case: EvidenceInputs, places: list[straggler.Bad]) -> list[Finding]:
  """Ranks that are late for good: in a bad place, and others."""
  episodes, held = case.lateness.episodes, case.lateness.persistent
  match = straggler.late_in_place(case, places)
  if match is None:
    found = [straggler.find(case, episodes, held)]
  else:
    bad, own = match
    others = [e for e in episodes if e not in own]
    placed, rest = (attributed_wait(case.totals, case.selected, some) for some in (own, others))
    # Both may be late at once: each gets the mean of what it holds alone and what it adds to the
    # other (Shapley).
    placed = (placed + held - rest) * 0.5
    found = [straggler.find(case, own, placed, bad), straggler.find(case, others, held - placed)]
  return [late for late in found if late]


def _turns(case: EvidenceInputs) -> list[Finding]:
  """Waiting for intermittently late ranks: because of pauses between steps, and because of work."""
  by_turns = case.lateness.intermittent.seconds
  for_work = by_turns - case.lateness.intermittent.for_gaps
  jittery = jitter.find(case)
  found = [jittery] if jittery else []
  # Waiting for gaps that are no finding makes one of waiting for work in step after step, which by
  # itself may be too little to tell: other load on the hosts makes a few steps long and leaves the
  # median.
  everyday = amplification.everyday(case) >= SHOWS * case.mean_step
  if case.run.ranks > 1:
    amplified = amplification.find(case, for_work,
                                   by_turns if not jittery and everyday else for_work)
    found += [amplified] if amplified and amplified.confidence >= CONFIDENCE else []
  return found


def _one_fault(case: EvidenceInputs, late: Finding, contended: Finding,
               slow: contention.SlowTransfers) -> bool:
  """Whether transfers are slow because a late rank's host is, and no host's link by itself is the
  slow one.

  They became slow when the rank became late; or other programs take its processors all the while
  they are slow; or it is that host's partners whose connections are busy, with what it is slow to
  take, and no others'. Or, of two hosts, it is the other one whose link seems slow, by less than
  the lateness.
  """
  processes = {int(case.run.process_of_rank[r]) for r in late.ranks}
  if contended.share < late.share and tcp.waits_for(slow.links, processes):
    return True
  if (contended.mode != Verdict.CONTENTION or set(contended.hosts) - set(late.hosts)
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
  starts = [rank_change(case.run, case.selected, rank, point)
            for rank, points in zip(ranks, change_points(blocks[ranks], len(blocks)), strict=True)
            for point in points]
  return any(abs(start - contended.first_step) <= _within(case) for start in starts)


def _within(case: EvidenceInputs) -> float:
  """Steps by which what begins together may seem to begin apart."""
  return max(3, COSTLY * case.selected.size)


def _slow(case: EvidenceInputs) -> contention.SlowTransfers | None:
  slow = contention.look(case) if case.run.ranks > 1 else None
  return (slow if slow and slow.seconds >= COSTLY * case.mean_step and slow.confidence >= CONFIDENCE
          else None)


def _transfers(case: EvidenceInputs, places: list[straggler.Bad],
               slow: contention.SlowTransfers | None) -> list[Finding]:
  if slow is None:
    return []
  found = contention.describe(case, slow)
  bad = straggler.slow_in_place(case, places, slow)
  return [straggler.find_slow(case, bad, found) if bad else found]


# What costs much and is no finding: few long pauses, between steps or in transfers, and waiting
# without a cause that shows. The notes and the verdict speak of it.

_UNMEASURED = {
    "runtime": "gaps between steps, for no cause that was recorded,",
    "compute": "long steps on all ranks, of which gaps between steps may be a part,"}
_TRANSFERS = "transfers far longer than usual, as when a process stops or is cut off for a while,"
_FAR = 10.0
"""Where long transfers are common, or a finding, one that takes so many times longer than nine in
ten of all is a pause: four processes on two cores reach 11 once in 399, a link down for 5 s 146."""


def few_pauses(case: EvidenceInputs) -> tuple[FewPauses, ...]:
  """Long pauses that no finding speaks of and that hold `COSTLY` of the time, costliest first.

  A step is taken to lose to them no more than its gap, mean over ranks, and what others wait for
  that: what the devices' work hides costs nothing.
  """
  run, selected = case.run, case.selected
  if not selected.size or any(finding.mode == Verdict.JITTER for finding in case.findings):
    return ()
  step_time = float(case.steps.mean())
  own = "runtime" if has_gaps(run) else "compute"  # which then holds the gaps
  gap = np.nan_to_num(case.totals.per_step[own])
  # what all ranks do alike: one that pauses alone makes the others wait
  alone = np.nan_to_num(case.totals.earliness.sum(axis=0))
  longer = gap - np.median(gap[selected.mask]) - on_purpose(run)
  unmeasured = np.maximum(longer - alone, 0.0)
  with_waiting = 1.0 + ratio(case.totals.waiting_gap, longer, 0.0)
  causes: list[tuple[str, np.ndarray]] = []
  for name, paused in pauses_in(run).items():
    if len(paused):
      beyond = beyond_usual(paused, selected)
      lost = np.minimum(beyond.mean(axis=0), gap)
      unmeasured = np.maximum(unmeasured - lost, 0.0)
      label, one = PAUSES[name].label, one_alone(beyond[:, lost >= PART * step_time])
      if one is not None:
        whose = name_process(run, int(run.host_causes.processes[one]))
        label += f" on {whose}, and waiting for it,"
        lost = np.where(beyond[one] >= NEARLY_ALL * beyond.sum(axis=0), lost * with_waiting, lost)
      causes.append((label, lost))
  transfers = _long_transfers(case)
  why: dict[str, str] = {}
  for process, at in stopped_in(run, transfers, MOST * step_time).items():
    steps, without, usual = zip(*at, strict=True)
    label = f"{name_process(run, process)}, which stood still inside a collective,"
    there = np.isin(np.arange(len(transfers)), steps)
    causes.append((label, np.where(there, transfers, 0.0)))
    transfers = np.where(there, 0.0, transfers)
    why[label] = Note.STOOD_STILL.say(seconds=duration(max(without)), usual=duration(usual[0]))
  found = []
  for label, lost in [*causes, (_UNMEASURED[own], unmeasured), (_TRANSFERS, transfers)]:
    long = selected.mask & (lost >= MOST * step_time)
    seconds = float(lost[long].sum())
    share = seconds / (step_time * selected.size)
    if share >= COSTLY:
      longest = int(np.where(long, lost, 0.0).argmax())
      most = long.sum() > 1 and lost[longest] >= 2 * (seconds - lost[longest])
      found.append(FewPauses(label, seconds, share, run.steps[long], float(lost[longest]),
                             int(run.steps[longest]) if most else None, why.get(label, "")))
  return tuple(sorted(found, key=lambda pauses: -pauses.share))


def _long_transfers(case: EvidenceInputs) -> np.ndarray:
  """[K] seconds by which transfers took longer than usual; 0 where that is so in more than
  `SELDOM` of the steps, or a finding speaks of it, but for those that stand out far even then."""
  mask = case.selected.mask
  lost = np.nan_to_num(case.floor.contention).sum(axis=0)
  lost = np.maximum(lost - np.median(lost[mask]), 0.0)
  long = MOST * float(case.steps.mean())
  common = max(long, float(np.quantile(lost[mask], 1 - SELDOM)))
  known = any(finding.mode == Verdict.CONTENTION for finding in case.findings)
  return lost if common == long and not known else np.where(lost >= _FAR * common, lost, 0.0)


def unnamed_waiting(case: EvidenceInputs) -> Unnamed | None:
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


# What sampled and observed runs can't tell: ranks that take turns on few cores, and ranks that
# never meet.
#
# Nothing is put into such a step, so nothing keeps its devices apart either: simulated devices of
# one process wait for a core, and a collective may be one over a part of the mesh. Where the
# timestamps show that, what rests on them is no finding.

CLOCK = "profiler"
_OF_RANKS = (Verdict.PERSISTENT, Verdict.LOCALITY)


def hold_back(case: EvidenceInputs, findings: tuple[Finding, ...]
              ) -> tuple[tuple[Finding, ...], str, tuple[Sentence, ...]]:
  """Takes back what a sampled run can't tell.

  Returns:
    Findings that hold; why others were taken back, in a few words, empty where none was; and notes
    on what is unknown. All findings of a run that was neither sampled nor observed.
  """
  sampled = case.run.plan.get("clock") == CLOCK
  observed = case.run.observed and not sampled
  if not sampled and not observed:
    return findings, "", ()
  apart = [] if observed else never_grouped(case.run)
  if apart:
    named = joined([*apart[:3], f"{len(apart) - 3} more"] if len(apart) > 3 else apart)
    return (), "ranks don't all wait for each other", (
        Note.NEVER_MEET.say(collectives=named),)
  rounds, devices, cores = turns(case.run)
  if not rounds:
    return findings, "", ()
  least = rounds * _quickest(case, "compute", "runtime")
  # Timestamps tell who waits for whom: of an observed run, only who is late for good, or in most of
  # the steps, may be whose turn comes last.
  kept = tuple(f for f in findings
               if (observed and f.mode not in _OF_RANKS
                   and not (f.mode == Verdict.AMPLIFICATION and f.ranks))
               or _told(case, f, least, rounds * _quickest(case, "compute") if observed else None))
  if observed and devices > cores and crowded_processors(case):
    # Of devices with equal work that run one after another, the mean one waits for at most that,
    # whatever their work.
    most, cause = (1 - cores / devices) / 2, "shared_cores"
    advice = advise(Verdict.AMPLIFICATION, cause, devices=devices, cores=cores)
    kept = tuple(dataclasses.replace(f, causes=(cause,), advice=advice)
                 if f.mode == Verdict.AMPLIFICATION and not f.ranks and f.share <= most else f
                 for f in kept)
  if observed and len(kept) == len(findings):
    return kept, "", ()
  late = sorted({rank for finding in findings if finding not in kept for rank in finding.ranks})
  note = Note.TURNS.say(devices=devices, cores=cores, least=milliseconds(least),
                        who=f", as {some_ranks(late)} {'do' if late[1:] else 'does'} not"
                        if late else "")
  return (kept, f"{devices} devices take turns on {cores} cores" if len(kept) < len(findings)
          else "", (note,))


def never_grouped(run: Run) -> list[str]:
  """Names of the collectives that ranks of one process leave before others of it have reached them.

  Only ranks of one process are compared: they share a clock.
  """
  found = []
  for times in run.collectives:
    if times.rank_groups is not None:
      continue  # who meets is recorded
    for process in np.unique(run.process_of_rank[run.process_of_rank >= 0]):
      own = run.process_of_rank == process
      enter, leave = times.enter_ns[own], times.exit_ns[own]
      known = ((enter != MISSING) & (leave != MISSING)).all(axis=0)
      if own.sum() > 1 and known.any():
        early = leave[:, known].min(axis=0) < enter[:, known].max(axis=0)
        if early.mean() > SELDOM:
          found.append(times.name)
          break
  return found


def turns(run: Run) -> tuple[int, int, int]:
  """How many others a device may have to wait for before it gets a core; devices and cores of the
  fullest host.

  All 0 where devices aren't the host's processors, or it isn't known how many there are. One core
  is the loop's.
  """
  worst = (0, 0, 0)
  for host in {place.hostname for place in run.locality}:
    places = [place for place in run.locality if place.hostname == host]
    devices = [device for place in places for device in place.devices]
    own = [places[0].cgroup.cpu_limit or math.inf,
           len(parse_list(places[0].cpu.allowed)) or math.inf]
    if (len(devices) < 2 or any(device.platform != "cpu" for device in devices)
        or math.isinf(min(own))):
      continue
    cores = max(1, int(min(own)))
    rounds = math.ceil(len(devices) / max(1, cores - 1)) - 1
    worst = max(worst, (rounds, len(devices), cores))
  return worst


def _quickest(case: EvidenceInputs, *parts: str) -> float:
  """Seconds per step of some parts of it on the rank that has least of them."""
  there = case.totals.present > 0
  own = np.sum([case.totals.per_rank[part][there] for part in parts], axis=0)
  return float((own / case.totals.present[there]).min()) if own.size else 0.0


def _told(case: EvidenceInputs, finding: Finding, least: float, for_work: float | None) -> bool:
  """Whether a finding is more than turns may make: `least` seconds, or, of compute alone, what the
  others' work may make a rank wait for a core, where timestamps tell it from gaps."""
  if finding.mode not in _OF_RANKS or not finding.ranks:
    return finding.share * case.mean_step > least
  latest = [max((e for e in case.lateness.episodes if e.rank == rank), key=lambda e: e.lateness,
                default=None) for rank in finding.ranks]
  lateness = min(e.lateness if e else 0.0 for e in latest)
  if lateness > least or _of_whole_hosts(case, finding.ranks, lateness):
    return True
  longer = [excess(case, e) for e in latest if e]
  if for_work is not None and len(longer) == len(latest) and all(
      compute > max(2 * gap, for_work) for compute, gap in longer):
    return True
  others = np.delete(case.lateness.mean, list(finding.ranks))
  others = others[np.isfinite(others)]
  # later by more than what they differ among themselves
  return len(others) >= FEWEST and lateness > TWICE * float(np.ptp(others))


def _of_whole_hosts(case: EvidenceInputs, ranks: Sequence[int], lateness: float) -> bool:
  """Whether ranks are all those of their hosts, and late by more than what ranks of any one host
  differ by.

  Devices wait for each other's turn within a host: where all hosts have as many, turns make ranks
  of one host differ, and no host later than another.
  """
  mean, host = case.lateness.mean, np.array([case.run.host_of_rank(rank)
                                             for rank in range(case.run.ranks)])
  known = np.isfinite(mean) & (host != "")
  late = np.isin(host, host[list(ranks)])
  spread = [mean[known & (host == each)] for each in np.unique(host[known])]
  return (known.all() and late.sum() == len(ranks) and not late.all()
          and len({own.size for own in spread}) == 1
          and lateness > TWICE * max(float(np.ptp(own)) for own in spread))
