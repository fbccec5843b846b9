"""From a recorded run to its diagnosis, in six stages: events, busy times, who is late, why, what
mending is worth, and words. `idea` shows what happens to one collective."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from jaxpace.core.words import some_ranks
from jaxpace.costs.fabric_file import MeasuredFabric
from jaxpace.diagnose.diagnosis import Diagnosis
from jaxpace.diagnose.findings import few_pauses, find, hold_back, unnamed_waiting
from jaxpace.diagnose.floor import find_floor, shares_in
from jaxpace.diagnose.inconclusive import (
  find_inconclusive,
  may_be_waiting,
  missing_ranks,
  stages,
  unrecorded,
  unseen,
)
from jaxpace.diagnose.lateness import find_late
from jaxpace.diagnose.limits import EFFECT
from jaxpace.diagnose.links import ProbedLinks
from jaxpace.diagnose.modes.inputs import EvidenceInputs, Finding
from jaxpace.diagnose.notes import notes_on
from jaxpace.diagnose.pacing import measured, work_moved
from jaxpace.diagnose.phases import phase_medians, waiting_for_data
from jaxpace.diagnose.selected_steps import (
  SelectedSteps,
  count_steps,
  is_possible,
  step_time_of,
  without_unfinished,
)
from jaxpace.diagnose.totals import RunTotals, add_up
from jaxpace.diagnose.verdict import mended, verdict_on
from jaxpace.diagnose.waiting_places import overlap, shares_by_collective, where_waits_are
from jaxpace.diagnose.words.codes import Verdict
from jaxpace.diagnose.words.evidence import Evidence
from jaxpace.diagnose.words.names import percent
from jaxpace.diagnose.worth import WhatIfRequest, Worth, saves_nothing, worth
from jaxpace.runs.run import Run


def diagnose(run: Run, progress: Callable[[int, int], None] | None = None, *,
             asked: Sequence[WhatIfRequest] = (), fabric: MeasuredFabric | None = None,
             links: ProbedLinks | None = None, events: Sequence[Mapping[str, Any]] = (),
             in_loops: Sequence[Diagnosis | None] = ()) -> Diagnosis:
  """Diagnoses a recorded run.

  Args:
    run: the run, as `jaxpace.runs.reader.read_run` returns it.
    asked: what else the run is to be played without.
    fabric: what the collectives take on a quiet fabric, as `jaxpace bench` measured it; without it
      the floor is estimated from the run itself, and contention is a lower bound.
    links: what a link probe measured, as `jaxpace.diagnose.links.read_links` returns it: it names
      the slow host or link of contended transfers where the hosts' counters don't.
    events: what watchdogs found, as `jaxpace.hang.alarms.read_events` returns it; goes
      into the notes.
    in_loops: what was found in the run's other loops, in their order, None where nothing can be
      read; goes into the notes.

  Raises:
    RunError: the run holds nothing of what was asked to be taken out.
  """
  totals = add(run, count(run), progress)
  late = who(totals, fabric, links)
  case = why(late)
  saved = worth(case, asked)
  return words(case, saved, fabric, events, in_loops)


def count(run: Run) -> SelectedSteps:
  """Selects the steps that count."""
  finished, unfinished = without_unfinished(run)
  every = run.all_steps
  recorded = int(((every.attempt >= 0).any(axis=0) & run.asked(every.steps)).sum())
  return count_steps(finished)._replace(unfinished=unfinished, recorded=recorded)


def add(run: Run, selected: SelectedSteps, progress: Callable[[int, int], None] | None = None
        ) -> RunTotals:
  """Adds up how long ranks are busy and wait, over the steps that can be measured after all."""
  totals = add_up(run, selected, progress)
  lost = selected.mask & ~is_possible(totals.per_step["step"])
  if lost.any():
    selected = selected._replace(mask=selected.mask & ~lost,
                                 block=np.where(lost, -1, selected.block))
  steps = totals.per_step["step"][selected.mask]
  return RunTotals(run, selected, totals, float(steps.mean()) if steps.size else float("nan"))


def who(run_totals: RunTotals, fabric: MeasuredFabric | None = None,
        links: ProbedLinks | None = None) -> EvidenceInputs:
  """Finds who is late and when, and what transfers take on a quiet fabric."""
  run, totals = run_totals.run, run_totals.totals
  away = missing_ranks(run_totals)
  hidden = may_be_waiting(run_totals, away)
  return EvidenceInputs(**vars(run_totals), lateness=find_late(run_totals),
              phases=phase_medians(run, run_totals.selected.mask), links=links, away=away,
              hidden=hidden, floor=find_floor(run, fabric, totals).inconclusive_in(hidden))


def why(case: EvidenceInputs) -> EvidenceInputs:
  """Looks for every failure mode, and takes back what the run can't tell.

  Nobody is blamed without whom no step would be shorter.
  """
  run, doubted = case.run, find_inconclusive(case.run, case.selected)
  never = tuple(unseen(case).tolist())
  case = dataclasses.replace(case, inconclusive=doubted, unseen=never)
  if not case.selected.size:
    return case
  findings, doubt, notes = hold_back(case, find(case))
  if saves_nothing(case, findings):
    case = dataclasses.replace(case, lateness=case.lateness.of_nobody())
    findings, doubt, notes = hold_back(case, find(case))
  # who is last intermittently shows in the timestamps that are in doubt
  found = tuple(_or_waiting(run, finding, never) for finding in findings
                if not doubted or finding.mode != Verdict.AMPLIFICATION)
  case = dataclasses.replace(case, findings=() if unrecorded(run) else found, doubt=doubt,
                             on_sampling=notes)
  return dataclasses.replace(case, few_pauses=few_pauses(case), unnamed=unnamed_waiting(case))


def words(case: EvidenceInputs, saved: Worth, fabric: MeasuredFabric | None = None,
          events: Sequence[Mapping[str, Any]] = (),
          in_loops: Sequence[Diagnosis | None] = ()) -> Diagnosis:
  """Puts it into words: verdict, notes, and a sentence where mending saves more than its share."""
  run, selected, totals, floor, times = case.run, case.selected, case.totals, case.floor, case.steps
  at = shares_by_collective(run, selected, totals, floor)
  found = Diagnosis(
      **vars(case), **vars(saved), step_time=step_time_of(times) if times.size else None,
      shares=shares_in(totals, floor, selected.mask) if times.size else None,
      waiting={name: float(totals.per_step[f"waiting_{name}"][selected.mask].mean())
               if times.size else 0.0 for name in ("compute", "runtime", "pacing")},
      measured=measured(run), work_moved=work_moved(run), for_data=waiting_for_data(run, selected),
      events=tuple(events), stages=stages(case),
      waits=where_waits_are(run, at), overlap=overlap(at, totals.computing / max(1, selected.size)))
  found = dataclasses.replace(found, findings=tuple(_explained(found, f) for f in found.findings))
  return dataclasses.replace(found, verdict=verdict_on(found),
                             notes=notes_on(found, fabric, in_loops))


def _or_waiting(run: Run, finding: Finding, never: Sequence[int]) -> Finding:
  """Slow transfers with a word on the ranks without rows, if there are any: waiting for them looks
  the same."""
  if finding.mode != Verdict.CONTENTION or not never or len(never) == run.ranks:
    return finding
  return finding.also(Evidence.ROWS_MISSING.say(ranks=some_ranks(never),
      them="them" if len(never) > 1 else "it"))


def _explained(facts: Diagnosis, finding: Finding) -> Finding:
  """With a sentence on why mending it saves more than its share, where it does by much."""
  after = mended(facts, finding)
  if after is None or not after.saving >= finding.share + EFFECT:
    return finding
  late = ("the late rank itself waits" if len(finding.ranks) == 1
          else "the late ranks themselves wait")
  return finding.also(Evidence.SAVES_MORE.say(part=percent(finding.share), late=late,
      saving=percent(after.saving), speedup=after.speedup))
