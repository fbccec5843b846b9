"""What sampled and observed runs can't tell: ranks that take turns on few cores, and ranks that
never meet.

Nothing is put into such a step, so nothing keeps its devices apart either: simulated devices of one
process wait for a core, and a collective may be one over a part of the mesh. Where the stamps show
that, what rests on them is no finding.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import numpy as np

from jaxpace.diagnosis.codes import Note, Sentence
from jaxpace.diagnosis.mechanism import crowded_processors
from jaxpace.diagnosis.modes.case import AMPLIFICATION, LOCALITY, PERSISTENT, Case, Finding
from jaxpace.diagnosis.modes.straggler import excess
from jaxpace.diagnosis.wording import joined, milliseconds
from jaxpace.hosts.locality.tree import parse_list
from jaxpace.trace.run import MISSING, Run

CLOCK = "profiler"

# Chosen by hand; no measurement of them is published.
_STANDS_OUT = 3.0
"""A rank is told from ranks that take turns where it is later by this many times what they differ
among themselves."""
_ENOUGH = 3
"""Other ranks that it takes to say what they differ by."""
_SOMETIMES = 0.1
"""Ranks that meet leave no collective before all have reached it. Some steps may be damaged; more
is no chance."""


@dataclasses.dataclass(frozen=True)
class Sampled:
  """Findings that hold, and what can't be told."""

  findings: tuple[Finding, ...]
  doubt: str = ""
  """Why findings were taken back, in a few words; empty where none was."""
  notes: tuple[Sentence, ...] = ()


def hold_back(case: Case, findings: Sequence[Finding]) -> Sampled:
  """Takes back what a sampled run can't tell.

  Args:
    case: the run.
    findings: what was found in it.

  Returns:
    All findings, and no notes, of a run that was neither sampled nor observed.
  """
  observed = case.run.observed
  if case.run.plan.get("clock") != CLOCK and not observed:
    return Sampled(tuple(findings))
  apart = [] if observed else never_meet(case.run)
  if apart:
    named = joined([*apart[:3], f"{len(apart) - 3} more"] if len(apart) > 3 else apart)
    return Sampled((), "ranks don't all wait for each other", (
        Sentence(Note.NEVER_MEET,
            f"Ranks leave {named} before others have reached it: not all of them wait for each "
            "other there (an axis of a mesh with several, or from one rank to the next). Which "
            "wait for which, a trace doesn't say, so all are compared: who is late, and what "
            "waiting costs, can't be told from that."),))
  rounds, devices, cores = turns(case.run)
  if not rounds:
    return Sampled(tuple(findings))
  least = rounds * _busy(case)
  # Marks tell who waits for whom: of an observed run, only who is late for good, or in most of the
  # steps, may be whose turn comes last.
  kept = tuple(f for f in findings if (observed and f.mode not in (PERSISTENT, LOCALITY)
                                       and not (f.mode == AMPLIFICATION and f.ranks))
               or _told(case, f, least, rounds))
  if observed and devices > cores and crowded_processors(case):
    # Of devices with equal work that run one after another, the mean one waits for at most that.
    most = (1 - cores / devices) / 2
    kept = tuple(_by_the_machine(f, devices, cores)
                 if f.mode == AMPLIFICATION and not f.ranks and f.share <= most else f
                 for f in kept)
  if observed and len(kept) == len(findings):
    return Sampled(kept)
  note = (Sentence(Note.TURNS,
      f"{devices} devices of a host take turns on {cores} cores, as simulated ones do: waiting of "
      f"up to {milliseconds(least)} may be for that, so it is no finding unless one rank stands "
      "out from all others."))
  return Sampled(kept, f"{devices} devices take turns on {cores} cores" if len(kept) < len(findings)
                 else "", (note,))


def _by_the_machine(finding: Finding, devices: int, cores: int) -> Finding:
  """Waiting for ranks by turns where devices are preempted for each other: whatever their work."""
  return dataclasses.replace(
      finding, causes=("shared_cores",),
      advice=(f"{devices} devices take turns on {cores} cores, so that another one is last in each "
              "step: that is the machine, whatever the job's work. Give each device a core of its "
              "own, and see what waiting is left."))


def never_meet(run: Run) -> list[str]:
  """Names of the collectives that ranks of one process leave before others of it have reached them.

  Only ranks of one process are compared: they share a clock.
  """
  found = []
  for times in run.collectives:
    if times.meeting is not None:
      continue  # who meets is recorded
    for process in np.unique(run.process_of_rank[run.process_of_rank >= 0]):
      own = run.process_of_rank == process
      enter, leave = times.enter_ns[own], times.exit_ns[own]
      known = ((enter != MISSING) & (leave != MISSING)).all(axis=0)
      if own.sum() > 1 and known.any():
        early = leave[:, known].min(axis=0) < enter[:, known].max(axis=0)
        if early.mean() > _SOMETIMES:
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


def _busy(case: Case) -> float:
  """Seconds a step that the quickest rank is busy itself."""
  present = case.totals.present
  busy = ((case.totals.per_rank["compute"] + case.totals.per_rank["runtime"])[present > 0]
          / present[present > 0])
  return float(busy.min()) if busy.size else 0.0


def _by_work(case: Case, rank: int, rounds: int) -> bool:
  """Whether a rank is late for longer work, by more than the others' work may make it wait for a
  core."""
  latest = max((e for e in case.lateness.episodes if e.rank == rank), key=lambda e: e.lateness,
               default=None)
  if latest is None:
    return False
  compute, gap = excess(case, latest)
  present = case.totals.present
  least = float((case.totals.per_rank["compute"][present > 0] / present[present > 0]).min())
  return compute > 2 * max(gap, 0.0) and compute > rounds * least


def _told(case: Case, finding: Finding, least: float, rounds: int) -> bool:
  """Whether a finding is more than turns may make."""
  if finding.mode not in (PERSISTENT, LOCALITY) or not finding.ranks:
    return finding.share * case.step_time > least
  lateness = [max((e.lateness for e in case.lateness.episodes if e.rank == rank), default=0.0)
              for rank in finding.ranks]
  if (min(lateness) > least or case.run.observed
      and all(_by_work(case, rank, rounds) for rank in finding.ranks)):
    return True
  others = np.delete(case.lateness.mean, list(finding.ranks))
  others = others[np.isfinite(others)]
  return len(others) >= _ENOUGH and min(lateness) > _STANDS_OUT * float(np.ptp(others))
