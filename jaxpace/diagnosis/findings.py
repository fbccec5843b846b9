"""Names what is wrong with a job, with evidence and advice, or nothing."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from jaxpace.diagnosis.counted import MIN_STEPS, Counted
from jaxpace.diagnosis.lateness import CONFIDENCE, Lateness
from jaxpace.diagnosis.totals import Totals
from jaxpace.trace.problems import list_ranks, plural
from jaxpace.trace.run import Run

PERSISTENT, AMPLIFICATION = "persistent_straggler", "synchronization_amplification"
AMPLIFIED = 0.05
"""Waiting for ranks that change from step to step is a finding from this share of the step on."""
_RARE = 0.5
"""Waiting of which the worst tenth of the steps holds this much comes from pauses; exponential jitter has a third."""

Phases = dict[str, np.ndarray]


@dataclasses.dataclass(frozen=True)
class Finding:
  """One failure mode. Shares of a run's findings are disjoint parts of its step time."""

  mode: str
  share: float
  confidence: float
  ranks: tuple[int, ...]
  hosts: tuple[str, ...]
  evidence: tuple[str, ...]
  advice: str

  def to_json(self) -> dict[str, Any]:
    return dataclasses.asdict(self)


def find(run: Run, counted: Counted, totals: Totals, lateness: Lateness, phases: Phases,
         step_time: float) -> tuple[Finding, ...]:
  """Looks for ranks that are persistently late, and for late ranks that change from step to step.

  Args:
    run: the recorded run.
    counted: the steps that count; fewer than 20 carry no finding.
    totals: the run, added up.
    lateness: how late each rank is.
    phases: [R] medians by phase.
    step_time: mean step, seconds.

  Returns:
    Findings, the costliest first; none means healthy.
  """
  if counted.size < MIN_STEPS or run.ranks < 2 or not run.collectives:
    return ()
  findings = []
  if lateness.late.size:
    findings.append(_persistent(run, counted, totals, lateness, phases, step_time))
  share, confidence = float(lateness.random.sum()) / step_time, lateness.random_confidence
  if not lateness.late.size:
    # Nobody is persistently late: the highest of the means is nobody's fault either.
    share += float(lateness.persistent.sum()) / step_time
    confidence = lateness.waiting_confidence
  if share >= AMPLIFIED and confidence >= CONFIDENCE:
    findings.append(_amplification(run, totals, share, confidence))
  return tuple(sorted(findings, key=lambda f: -f.share))


def _persistent(run: Run, counted: Counted, totals: Totals, lateness: Lateness, phases: Phases,
                step_time: float) -> Finding:
  late = lateness.late
  evidence = []
  for rank in late[:4].tolist():
    often = int(totals.last[rank]) / max(1, int(totals.present[rank]))
    evidence.append(
        f"{name_rank(run, rank)} reaches the collectives {milliseconds(float(lateness.mean[rank]))} after the typical "
        f"rank, late in {_percent(float(lateness.persistence[rank]))} of {counted.blocks} stretches of the run; the "
        f"job waited for it in {_percent(often)} of its steps.")
    evidence.extend(_where(rank, totals, lateness, phases))
  if len(late) > 4:
    evidence.append(f"Late as well, and less: {list_ranks(late[4:])}.")
  if lateness.hidden.size:
    evidence.append(f"Also late, by less than a quarter of that: {list_ranks(lateness.hidden)}.")
  hosts = hosts_of(run, late)
  whole = [h for h in hosts if _whole_host_late(run, h, set(late.tolist()))]
  if whole:
    evidence.append(f"All ranks of {', '.join(whole)} are late: the host, not a single device.")
  elsewhere = [h for h in hosts if h not in whole]
  if whole and elsewhere:
    evidence.append(f"On {', '.join(elsewhere)} other ranks are in time.")
  confidence = float(lateness.confidence[late].min())
  share = float(lateness.persistent.sum()) / step_time
  return Finding(PERSISTENT, share, confidence, tuple(late.tolist()), hosts, tuple(evidence),
                 _advice(run, late, totals, lateness))


def _where(rank: int, totals: Totals, lateness: Lateness, phases: Phases) -> list[str]:
  """Which part of the step makes a rank late."""
  compute, gap = _excess(rank, totals, lateness)
  said = f"Against the typical rank, its compute is {_more(compute)} and its gap between steps {_more(gap)}."
  longer = []
  for name, medians in phases.items():
    typical = medians[lateness.typical]
    if name == "sync" or not np.isfinite(medians[rank]) or not np.isfinite(typical).any():
      continue
    more = medians[rank] - np.nanmean(typical)
    if more > 0.2 * lateness.mean[rank]:
      longer.append((more, f"{name} takes {milliseconds(medians[rank])}, {milliseconds(float(np.nanmean(typical)))} on "
                           "the typical rank"))
  if longer:
    said += f" Its {'; its '.join(text for _, text in sorted(longer, reverse=True))}."
  return [said]


def _excess(rank: int, totals: Totals, lateness: Lateness) -> tuple[float, float]:
  """Seconds by which a rank's compute and gap are longer than the typical rank's."""
  number = np.maximum(totals.present, 1)
  compute, gap = (float(x[rank] / number[rank] - (x / number)[lateness.typical].mean())
                  for x in (totals.lateness_compute, totals.lateness_runtime))
  return compute, gap


def _advice(run: Run, late: np.ndarray, totals: Totals, lateness: Lateness) -> str:
  compute, gap = np.array([_excess(rank, totals, lateness) for rank in late]).sum(axis=0)
  hosts = hosts_of(run, late)
  where = f" on {', '.join(hosts)}" if hosts else ""
  subject = f"rank{'s' if len(late) > 1 else ''} {list_ranks(late)}{where}"
  if gap > compute:
    return (f"See what the process of {subject} does between steps: data loading, logging, checkpoints, garbage "
            "collection, other load on its host's processors.")
  return (f"Compare {subject} with the others: clocks and throttling, other load on the host, a slower device; or more "
          "work than the others get (longer sequences, uneven shards). Replace or relieve what is slow.")


def _amplification(run: Run, totals: Totals, share: float, confidence: float) -> Finding:
  waited = max(1, int(totals.last.sum()))
  often = totals.last / waited
  order = np.argsort(-totals.blame, kind="stable")
  top = int(order[0])
  chance = 1 / max(1, int((totals.present > 0).sum()))
  whole = totals.earliness.sum(axis=0)
  whole = np.sort(whole[np.isfinite(whole)])
  worst = float(whole[-max(1, len(whole) // 10):].sum() / max(whole.sum(), 1e-12))
  evidence = [
      f"The last rank changes: {plural(int((totals.last > 0).sum()), 'rank')} of {run.ranks} were last; the most "
      f"frequent, {int(often.argmax())}, in {_percent(often.max())} of the steps ({_percent(chance)} by chance).",
      f"The worst tenth of the steps holds {_percent(worst)} of the waiting: "
      + ("rare long pauses, not everyday jitter." if worst > _RARE else "everyday jitter, not rare pauses.")]
  causes = {name: float(totals.per_rank[f"waiting_{name}"].sum()) for name in ("compute", "runtime", "pacing")}
  total = max(sum(causes.values()), 1e-12)
  of_all = {name: _percent(seconds / total) for name, seconds in causes.items()}
  evidence.append(f"Of the waiting, {of_all['compute']} is for longer compute and {of_all['runtime']} for longer gaps "
                  "between steps" + (f", {of_all['pacing']} for delays." if causes["pacing"] > 0 else "."))
  by_host = _blame_by_host(run, totals)
  hosts: tuple[str, ...] = ()
  if len(by_host) > 1:
    host, part, expected = max(by_host, key=lambda entry: entry[1] / entry[2])
    if part > 2 * expected and part > 0.2:
      hosts = (host,)
      evidence.append(f"{_percent(part)} of the waiting is for {host}, which has {_percent(expected)} of the ranks.")
  ranks = (top,) if totals.blame[top] > max(0.2, 3 * chance) * totals.blame.sum() else ()
  if causes["runtime"] > causes["compute"]:
    advice = ("Steady what processes do between steps: prefetch data, move logging and checkpoints off the loop, "
              "collect garbage in the same step everywhere.")
  elif worst > _RARE:
    advice = ("Look for what stops ranks now and then for long: host interrupts, garbage collection, checkpoints, "
              "recompilation; let all ranks do it in the same step.")
  else:
    advice = ("Even out the work of a step (sequence lengths, padding, experts) and steady the hosts (pinned "
              "processors, no other load); fewer synchronisations a step mean fewer chances to wait.")
  return Finding(AMPLIFICATION, share, confidence, ranks, hosts, tuple(evidence), advice)


def _blame_by_host(run: Run, totals: Totals) -> list[tuple[str, float, float]]:
  """Host, its share of the waiting it caused, its share of the ranks."""
  hosts = [run.host_of_rank(r) for r in range(run.ranks)]
  whole = max(float(totals.blame.sum()), 1e-12)
  return [(h, float(sum(totals.blame[r] for r in range(run.ranks) if hosts[r] == h)) / whole,
           hosts.count(h) / run.ranks) for h in sorted(set(hosts)) if h]


def _whole_host_late(run: Run, host: str, late: set[int]) -> bool:
  ranks = [r for r in range(run.ranks) if run.host_of_rank(r) == host]
  return len(ranks) > 1 and len(ranks) < run.ranks and late.issuperset(ranks)


def hosts_of(run: Run, ranks: Sequence[int] | np.ndarray) -> tuple[str, ...]:
  """Names of the hosts of `ranks`, in their order, each once."""
  return tuple(dict.fromkeys(h for h in (run.host_of_rank(int(r)) for r in ranks) if h))


def name_rank(run: Run, rank: int) -> str:
  """Names a rank for people: "Rank 3 (host1, process 1)"."""
  process, host = int(run.process_of_rank[rank]), run.host_of_rank(rank)
  where = ", ".join(x for x in (host, f"process {process}" if process >= 0 else "") if x)
  return f"Rank {rank}" + (f" ({where})" if where else "")


def milliseconds(seconds: float) -> str:
  """
  >>> milliseconds(0.02034), milliseconds(0.00031), milliseconds(1.5)
  ('20.3 ms', '0.31 ms', '1,500 ms')
  """
  value = seconds * 1e3
  digits = 2 if abs(value) < 10 else 1 if abs(value) < 1000 else 0
  return f"{value:,.{digits}f} ms"


def _more(seconds: float) -> str:
  return f"{milliseconds(abs(seconds))} {'longer' if seconds >= 0 else 'shorter'}"


def _percent(share: float) -> str:
  value = 100 * float(share)
  return f"{value:.0f} %" if value >= 9.95 or value == 0 else f"{value:.1f} %"
