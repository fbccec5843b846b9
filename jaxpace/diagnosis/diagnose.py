"""From a recorded run to its diagnosis: shares, findings, verdict, what-if."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from jaxpace.costs.fabric_file import MeasuredFabric
from jaxpace.diagnosis import findings as findings_module
from jaxpace.diagnosis.by_rank import shares_of
from jaxpace.diagnosis.codes import Evidence, Note, Sentence
from jaxpace.diagnosis.counters import switches
from jaxpace.diagnosis.diagnosis import Diagnosis, Facts, step_time_of
from jaxpace.diagnosis.findings import Finding, hosts_of
from jaxpace.diagnosis.floor import find_floor
from jaxpace.diagnosis.lateness import find_late
from jaxpace.diagnosis.modes.case import LEAST, Case
from jaxpace.diagnosis.notes import hung, notes_on
from jaxpace.diagnosis.overlap import overlap
from jaxpace.diagnosis.pacing import measured, work_moved
from jaxpace.diagnosis.phases import phase_medians
from jaxpace.diagnosis.sampled import Sampled, hold_back
from jaxpace.diagnosis.selected_steps import (
  SelectedSteps,
  count_steps,
  is_possible,
  step_times,
  without_unfinished,
)
from jaxpace.diagnosis.stages import stages
from jaxpace.diagnosis.totals import Summed, Totals, add_up
from jaxpace.diagnosis.untold import (
  hidden,
  hidden_sentence,
  unrecorded,
  unseen,
  untold,
)
from jaxpace.diagnosis.verdict import mended, saving, verdict_on
from jaxpace.diagnosis.waiting_places import where_waits_are
from jaxpace.diagnosis.what_if import Alternative, Without, alternative, has_gaps, saved
from jaxpace.diagnosis.what_if_request import WhatIfRequest, resolve
from jaxpace.diagnosis.wording import percent
from jaxpace.trace.links import ProbedLinks
from jaxpace.trace.problems import list_ranks, plural
from jaxpace.trace.run import Run

_MORE, _MORE_BY = 1.2, 0.02
"""A finding whose mending saves that many times its share, and that part of the step more, needs a
sentence on it."""


def diagnose(run: Run, progress: Callable[[int, int], None] | None = None, *,
             asked: Sequence[WhatIfRequest] = (), fabric: MeasuredFabric | None = None,
             links: ProbedLinks | None = None,
             events: Sequence[Mapping[str, Any]] = ()) -> Diagnosis:
  """Diagnoses a recorded run.

  Args:
    run: the run, as `jaxpace.trace.reader.read_run` returns it.
    progress: called with the steps done and their number.
    asked: what else the run is to be played without.
    fabric: what the collectives take on a quiet fabric, as `jaxpace bench` measured it; without it
      the floor is estimated from the run itself, and contention is a lower bound.
    links: what a link probe measured, as `jaxpace.trace.links.read_links` returns it: it names
      the slow host or link of contended transfers where the hosts' counters don't.
    events: what watchdogs found, as `jaxpace.trace.alarms.read_events` returns it; goes
      into the notes.

  Raises:
    RunError: the run holds nothing of what was asked to be taken out.
  """
  finished, unfinished = without_unfinished(run)
  selected = count_steps(finished)
  totals = add_up(run, selected, progress)
  selected = _measurable(selected, totals)
  floor = find_floor(run, totals.transfer, fabric, totals.groups)
  steps = totals.per_step["step"][selected.mask]
  step_time = step_time_of(steps) if steps.size else None
  mean = step_time.mean if step_time else float("nan")
  summed = Summed(run, selected, totals, mean)
  away = hidden(summed)
  floor = floor if away is None else floor.untold_in(away.steps)
  lateness = find_late(summed)
  phases = phase_medians(run, selected.mask)
  found: tuple[Finding, ...] = ()
  sampled = Sampled(())
  no_skew = no_contention = None
  without_rank: dict[int, Alternative] = {}
  played = _Played(None, None, None, {}, ())
  shares, spread, waiting, preempted = None, 0.0, {}, 0.0
  untold_why = untold(run, selected)
  never = tuple(unseen(summed, away).tolist())
  if step_time:
    parts = {name: float(values[selected.mask].mean()) for name, values in totals.per_step.items()}
    spread = parts["spread"]
    waiting = {name: parts[f"waiting_{name}"] for name in ("compute", "runtime", "pacing")}
    contention = float(floor.contention[:, selected.mask].sum(axis=0).mean())
    shares = shares_of(parts, float(floor.quiet[:, selected.mask].sum(axis=0).mean()), contention)
    case = Case(
        **vars(summed), lateness=lateness, phases=phases, floor=floor, links=links,
        hidden=None if away is None else away.steps)
    case, sampled = _judged(case)
    lateness = case.lateness
    found = () if unrecorded(run) else sampled.findings
    preempted = switches(run, selected)
    found = tuple(_or_waiting(run, finding, never) for finding in found)
    if untold_why is not None:  # who is last by turns is told by the stamps that are in doubt
      found = tuple(finding for finding in found if finding.mode != findings_module.AMPLIFICATION)
    no_skew = alternative(mean, float(lateness.persistent.sum() + lateness.random.sum()))
    no_contention = alternative(mean, contention)
    late = _named(case, found)
    direct = totals.groups is None or bool(totals.groups.found.direct.all())
    even, *others = saved(run, selected, floor,
                          [Without(skew=not direct), *(Without(ranks=(r,)) for r in late)])
    no_skew = no_skew if direct else alternative(mean, even)
    without_rank = {r: alternative(mean, seconds) for r, seconds in zip(late, others, strict=True)}
    no_skew = None if untold_why is not None and not late else no_skew
    played = _play(case, list(without_rank), asked, found)
  facts = Facts(
      run=run, selected=selected, recorded=_recorded(run), step_time=step_time, shares=shares,
      waiting=waiting, spread=spread, floor=floor, totals=totals, lateness=lateness, phases=phases,
      findings=found, measured=measured(run), work_moved=work_moved(run),
      no_skew=no_skew, no_contention=no_contention, without_rank=without_rank,
      without_late=played.late, without_host=played.hosts, no_runtime_jitter=played.no_jitter,
      work_shared=played.shared, asked=played.asked,
      preempted=preempted, links=links, events=tuple(events), doubt=sampled.doubt,
      unseen=never, untold=untold_why, stages=stages(summed),
      waits=where_waits_are(run, selected, totals, floor) if step_time else (),
      overlap=overlap(run, totals.overlap, selected.size) if step_time else None)
  facts = of_all_steps(facts, finished)
  facts = dataclasses.replace(facts, findings=tuple(_explained(facts, f) for f in found))
  notes = (*_impossible(selected), *notes_on(facts, fabric, unfinished),
           *([] if away is None else [hidden_sentence(away.ranks, run.steps[away.steps])]),
           *sampled.notes, *hung(events))
  return Diagnosis(**vars(facts), verdict=verdict_on(facts), notes=notes)


def _judged(case: Case) -> tuple[Case, Sampled]:
  """The findings, and the case with whom they blame: nobody without whom no step would be shorter.

  Args:
    case: the run, with the ranks that are late by their means.
  """
  sampled = hold_back(case, findings_module.find(case))
  late = _named(case, sampled.findings)
  if late and saved(case.run, case.selected, case.floor,
                    [Without(ranks=tuple(late))])[0] < LEAST * case.step_time:
    case = dataclasses.replace(case, lateness=case.lateness.of_nobody())
    sampled = hold_back(case, findings_module.find(case))
  return case, sampled


def _named(case: Case, findings: Sequence[Finding]) -> list[int]:
  """The late ranks, if a finding is about them."""
  modes = {finding.mode for finding in findings}
  return (case.lateness.late.tolist()
          if modes & {findings_module.PERSISTENT, findings_module.LOCALITY} else [])


def _impossible(selected: SelectedSteps) -> tuple[Sentence, ...]:
  if not selected.impossible:
    return ()
  return (Sentence(Note.IMPOSSIBLE_STEPS,
      f"{plural(selected.impossible, 'step')} left out: by their timestamps they took no time, "
      "less than none, or more than eleven days. Are the columns nanoseconds of one clock for each "
      "rank?"),)


def _or_waiting(run: Run, finding: Finding, never: Sequence[int]) -> Finding:
  """Slow transfers with a word on the ranks without rows, if there are any: waiting for them looks
  the same."""
  if finding.mode != findings_module.CONTENTION or not never or len(never) == run.ranks:
    return finding
  several = len(never) > 1
  said = Sentence(Evidence.ROWS_MISSING,
      f"Rows of rank{'s' if several else ''} {list_ranks(never)} are missing: what the others wait "
      f"for {'them' if several else 'it'} looks the same.")
  return dataclasses.replace(finding, evidence=(*finding.evidence, said))


def _explained(facts: Facts, finding: Finding) -> Finding:
  """With a sentence on why mending it saves more than its share, where it does by much."""
  after = mended(facts, finding)
  if after is None or not saving(after) >= max(_MORE * finding.share, finding.share + _MORE_BY):
    return finding
  late = ("the late rank itself waits" if len(finding.ranks) == 1
          else "the late ranks themselves wait")
  said = (Sentence(Evidence.SAVES_MORE,
      f"{percent(finding.share)} of the step is what the ranks wait for that, mean over all, of "
      f"which {late} little; the job as a whole would save {percent(saving(after))}: "
      f"{after.speedup:.2f} times as fast."))
  return dataclasses.replace(finding, evidence=(*finding.evidence, said))


def _measurable(selected: SelectedSteps, totals: Totals) -> SelectedSteps:
  """Without the steps that no rank could be measured in after all."""
  lost = selected.mask & ~is_possible(totals.per_step["step"])
  if not lost.any():
    return selected
  return selected._replace(mask=selected.mask & ~lost, block=np.where(lost, -1, selected.block))


class _Played(NamedTuple):
  """The run played again, each time without something."""

  late: Alternative | None
  no_jitter: Alternative | None
  shared: Alternative | None
  hosts: dict[str, Alternative]
  asked: tuple[tuple[str, Alternative], ...]


def _play(case: Case, late: list[int], asked: Sequence[WhatIfRequest],
          findings: Sequence[Finding]) -> _Played:
  """Plays the run without what is worth asking for, and without what was asked for, in one pass.

  Of a finding that was asked for, its share is taken out: shares of findings are disjoint parts of
  the step.
  """
  run, mean = case.run, case.step_time
  scenarios = [resolve(request, run, case.floor) for request in asked]
  of_rank = [run.host_of_rank(r) for r in range(run.ranks)]
  hosts = list(hosts_of(run, late)) if len(set(of_rank)) > 1 else []
  scenarios += [Without(ranks=tuple(r for r, name in enumerate(of_rank) if name == host))
                for host in hosts]
  jitter = bool(run.collectives) and has_gaps(run)
  moves = bool(late) and case.totals.groups is None
  scenarios += [Without(runtime_jitter=True)] * jitter + [Without(uneven=True)] * moves
  scenarios += [Without(ranks=tuple(late))] * (len(late) > 1)
  more = [sum(f.share * mean for f in findings if f.mode in request.findings) for request in asked]
  more += [0.0] * (len(scenarios) - len(more))
  results = iter([alternative(mean, seconds + also)
                  for seconds, also in zip(saved(run, case.selected, case.floor, scenarios), more,
                                           strict=True)])
  answers = tuple((request.text, next(results)) for request in asked)
  of_host = {host: next(results) for host in hosts}
  no_jitter = next(results) if jitter else None
  shared = next(results) if moves else None
  return _Played(next(results, None), no_jitter, shared, of_host, answers)


def _recorded(run: Run) -> int:
  run = run.all_steps
  return int(((run.attempt >= 0).any(axis=0) & run.inside).sum())


# What is said of all steps of an observed run, of which only some are written in full.

def of_all_steps(facts: Facts, finished: Run) -> Facts:
  """Puts the times of all steps in: steps that might have been are as many times as quick as those
  written in full.

  Args:
    facts: of the steps that are written in full; they come back as they are where those are all.
    finished: the run without its unfinished steps.
  """
  if finished.whole is None or facts.step_time is None:
    return facts
  mask = count_steps(finished.whole).mask
  times = step_times(finished.whole)[mask]
  if not times.size:
    return facts
  found = step_time_of(times)
  factor = found.mean / facts.step_time.mean

  def scaled(one: Alternative | None) -> Alternative | None:
    return None if one is None else one._replace(step_time=one.step_time * factor)

  def each(some: dict) -> dict:
    return {key: one._replace(step_time=one.step_time * factor) for key, one in some.items()}

  return dataclasses.replace(
      facts, step_time=found, counted_in_all=int(mask.sum()), no_skew=scaled(facts.no_skew),
      no_contention=scaled(facts.no_contention), without_rank=each(facts.without_rank),
      without_late=scaled(facts.without_late), without_host=each(facts.without_host),
      no_runtime_jitter=scaled(facts.no_runtime_jitter), work_shared=scaled(facts.work_shared),
      asked=tuple((text, one._replace(step_time=one.step_time * factor))
                  for text, one in facts.asked))
