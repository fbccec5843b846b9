"""Describes transfers that take longer than they need, `fabric_contention`, and whose link that
is."""

from __future__ import annotations

import numpy as np

from jaxpace.diagnosis import step_ranges
from jaxpace.diagnosis.codes import Evidence, Sentence
from jaxpace.diagnosis.counters import per_step
from jaxpace.diagnosis.modes.case import CONTENTION, Case, Finding
from jaxpace.diagnosis.modes.contention import SlowTransfers
from jaxpace.diagnosis.waiting_places import most_contended
from jaxpace.diagnosis.wording import hosts_of_processes, milliseconds, name_process, named, percent

# Set looking at the fault lab's runs of seeds 0 to 3, as those of `modes.contention`.
_SLOW_SHARE = 0.03
"""All hosts' links are busy if each is for this share of the step, at least."""


def find(case: Case, slow: SlowTransfers) -> Finding:
  """Describes slow transfers, and whose link it is as far as that can be told."""
  run, selected = case.run, case.selected
  first = (None if slow.begin == 0
           else step_ranges.series_change(run, selected, case.transfer, slow.begin))
  last = (None if slow.end == selected.blocks
          else step_ranges.series_change(run, selected, case.transfer, slow.end) - 1)
  if slow.bursts:
    evidence = [Sentence(Evidence.TWO_KINDS,
        f"The collectives come in two kinds: {percent(slow.bursts)} of the steps take "
        f"{milliseconds(slow.level)} in them, the others {milliseconds(slow.quiet)}.")]
  elif first is None and last is None:
    evidence = [Sentence(Evidence.THROUGHOUT,
        f"The collectives themselves take {milliseconds(slow.level)} a step throughout; "
        + (f"on a quiet fabric {milliseconds(float(case.floor.floor.sum()))} ({case.floor.source})."
        if case.floor.known else f"without that host's link about {milliseconds(slow.quiet)}."
        if slow.links.slow else f"the quickest about {milliseconds(slow.quiet)}."))]
  else:
    evidence = [Sentence(Evidence.STRETCH,
        f"The collectives themselves take {milliseconds(slow.level)} a step "
        f"{step_ranges.spell(first, last)}, {milliseconds(slow.quiet)} in the rest of the run.")]
  if not case.floor.known:
    evidence.append(Sentence(Evidence.NEEDS_FLOOR,
        "What is slow in every step of the run alike can't be seen without a known floor: "
        "`--floor` takes what `jaxpace bench` measured."))
  at = most_contended(case)
  evidence += [at] if at else []
  evidence += _whose(case, slow)
  processes, told = _probed(case, slow)
  evidence += told
  hosts = hosts_of_processes(run, processes)
  share = slow.seconds / case.step_time
  advice = (
      f"Look at the link of {named(hosts)}: its rate and errors, its cable and port, other traffic "
      "on it."
      if hosts else
      "Look for other traffic on the links that all hosts share (other jobs, storage, "
      "checkpoints): place the job under one switch, shift the jobs' phases "
      "(`jaxpace.interleave_jobs`), or send less.")
  ranks = tuple(r for r in range(run.ranks) if int(run.process_of_rank[r]) in processes)
  kinds = ("slow_host",) if processes else ("trunk",) if _crowded(case, slow) else ()
  return Finding(
      mode=CONTENTION, share=share, confidence=slow.confidence, ranks=ranks, hosts=hosts,
      evidence=tuple(evidence), advice=advice, causes=kinds, first_step=first, last_step=last)


def _probed(case: Case, slow: SlowTransfers) -> tuple[tuple[int, ...], list[Sentence]]:
  """Processes with slow links, by the counters, else by a link probe; and what the probe says."""
  if case.links is None:
    return slow.links.slow, []
  said = [Sentence(Evidence.PROBE,
      f"The link probe: {culprit.sentence()}") for culprit in case.links.culprits]
  if not said:
    return slow.links.slow, [Sentence(Evidence.PROBE_NOTHING,
        "The link probe names nothing: " + (
        case.links.cannot_tell or "no host or link was slower than the others when it was made."))]
  host_of = {p.process: p.host for p in case.run.processes}
  named = tuple(p for culprit in case.links.culprits for p in culprit.processes
                if host_of.get(p) in culprit.hosts)
  return slow.links.slow or tuple(dict.fromkeys(named)), said


def _crowded(case: Case, slow: SlowTransfers) -> bool:
  busy = slow.links.busy
  return (len(busy) > 2 and slow.links.everywhere
          and min(busy.values()) >= _SLOW_SHARE * case.step_time)


def _whose(case: Case, slow: SlowTransfers) -> list[Sentence]:
  run, busy = case.run, slow.links.busy
  if len(busy) < 2:
    return [Sentence(Evidence.NO_COUNTERS,
        "Whether one host's link is slow or a trunk that all share is crowded can't be told: no "
        "TCP counters of the hosts were sampled (`Recorder(hosts=...)`), or the collectives don't "
        "use TCP.")]
  said = []
  worst = max(busy, key=lambda p: busy[p])
  others = float(np.median([value for p, value in busy.items() if p != worst]))
  if slow.links.slow:
    said.append(Sentence(Evidence.SLOW_LINK,
        f"The link of {name_process(run, worst)} is the slow one: its connections had data on the "
        f"way for {milliseconds(busy[worst])} a step, the others' for {milliseconds(others)}."))
  elif _crowded(case, slow):
    said.append(Sentence(Evidence.ALL_BUSY,
        f"All hosts' connections are busy alike, {milliseconds(min(busy.values()))} to "
        f"{milliseconds(busy[worst])} a step: the fabric between them is crowded, not one "
        "host's link."))
  elif len(busy) == 2:
    said.append(Sentence(Evidence.BOTH_BUSY,
        f"Both hosts' connections are busy, {milliseconds(min(busy.values()))} and "
        f"{milliseconds(busy[worst])} a step: of two hosts, one's slow link and a crowded one "
        "between them look alike."))
  else:
    said.append(Sentence(Evidence.NO_SINGLE_LINK,
        f"The hosts' TCP counters name no single link: {milliseconds(min(busy.values()))} to "
        f"{milliseconds(busy[worst])} a step with data on the way, most on "
        f"{name_process(run, worst)}."))
  if slow.queued and slow.trips:
    said.append(Sentence(Evidence.QUEUE,
        "Data queue on the way: a round trip of the hosts' connections takes "
        f"{milliseconds(slow.trips[0])} then, {milliseconds(slow.trips[1])} in the rest of "
        "the run."))
  resent = per_step(run, case.selected, "retransmits", slow.begin, slow.end)
  if resent and max(resent.values()) >= 0.01:
    most = max(resent, key=lambda p: resent[p])
    said.append(Sentence(Evidence.RESENT,
        f"Segments are lost and sent again: up to {resent[most]:.2f} a step on "
        f"{name_process(run, most)}."))
  return said
