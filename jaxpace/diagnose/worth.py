"""What mending would save: the run replayed without what makes it slow."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TypeVar

from jaxpace.diagnose.codes import Evidence, codes, hosts_of
from jaxpace.diagnose.modes import contention
from jaxpace.diagnose.modes.inputs import CONTENTION, LOCALITY, PERSISTENT, EvidenceInputs, Finding
from jaxpace.diagnose.what_if import Alternative, Without, alternative, has_gaps, saved
from jaxpace.diagnose.what_if_request import WhatIfRequest, resolve

_Step = TypeVar("_Step", Alternative, Alternative | None)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Worth:
  """The step without one thing or another; None where that is not known or does not apply."""

  no_skew: Alternative | None = None
  no_contention: Alternative | None = None
  without_rank: dict[int, Alternative] = dataclasses.field(default_factory=dict)
  """Each late rank by itself."""
  without_late: Alternative | None = None
  """All late ranks at once, where there are several."""
  without_host: dict[str, Alternative] = dataclasses.field(default_factory=dict)
  """Each host that has a late rank, where there are several hosts."""
  no_runtime_jitter: Alternative | None = None
  """None where no gaps were recorded."""
  work_shared: Alternative | None = None
  """Work by each rank's speed; None where no rank is late for good."""
  asked: tuple[tuple[str, Alternative], ...] = ()
  """What the caller asked to take out, in their words."""

  def scaled(self, factor: float) -> Worth:
    """Of steps that take that many times as long, and would be as many times as quick."""

    def of(one: _Step) -> _Step:
      return one and one._replace(step_time=one.step_time * factor)

    return Worth(
        no_skew=of(self.no_skew), no_contention=of(self.no_contention),
        without_rank={rank: of(one) for rank, one in self.without_rank.items()},
        without_late=of(self.without_late),
        without_host={host: of(one) for host, one in self.without_host.items()},
        no_runtime_jitter=of(self.no_runtime_jitter), work_shared=of(self.work_shared),
        asked=tuple((text, of(one)) for text, one in self.asked))


def named(case: EvidenceInputs, findings: Sequence[Finding]) -> list[int]:
  """The late ranks, if a finding is about them."""
  modes = {finding.mode for finding in findings}
  return case.lateness.late.tolist() if modes & {PERSISTENT, LOCALITY} else []


def worth(case: EvidenceInputs, findings: Sequence[Finding], asked: Sequence[WhatIfRequest],
          inconclusive: bool) -> Worth:
  """Replays the run without what is worth asking for, and without what was asked for.

  Of a finding that was asked for, its share is taken out: shares of findings are disjoint parts of
  the step.

  Args:
    case: the run.
    findings: in it.
    asked: what else is to be taken out.
    inconclusive: whether timestamps don't tell who is last: then a step without skew is not known.

  Raises:
    RunError: the run holds nothing of what was asked to be taken out.
  """
  if not case.selected.size:
    return Worth()
  run, mean, late = case.run, case.step_time, named(case, findings)
  direct = case.totals.groups is None or bool(case.totals.groups.found.direct.all())
  even, quiet, *others = saved(
      run, case.selected, case.floor,
      [Without(skew=not direct), Without(contention=True), *(Without(ranks=(r,)) for r in late)])
  earliness = float(case.lateness.persistent.sum() + case.lateness.random.sum())
  return dataclasses.replace(
      _replayed(case, late, asked, findings),
      no_skew=None if inconclusive and not late
      else alternative(mean, earliness if direct else even),
      no_contention=alternative(mean, quiet),
      without_rank={r: alternative(mean, seconds + _slow_with(case, findings, [r]))
                    for r, seconds in zip(late, others, strict=True)})


def _replayed(case: EvidenceInputs, late: list[int], asked: Sequence[WhatIfRequest],
              findings: Sequence[Finding]) -> Worth:
  """What takes a replay of its own, all in one pass."""
  run, mean, modes = case.run, case.step_time, {finding.mode for finding in findings}
  scenarios = [
      resolve(request, run, case.floor)._replace(together=CONTENTION in modes & request.findings)
      for request in asked]
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
  more = [also + (0.0 if scenario.contention else _slow_with(case, findings, scenario.ranks))
          for also, scenario in zip(more, scenarios, strict=True)]
  results = iter([alternative(mean, seconds + also)
                  for seconds, also in zip(saved(run, case.selected, case.floor, scenarios), more,
                                           strict=True)])
  return Worth(asked=tuple((request.text, next(results)) for request in asked),
               without_host={host: next(results) for host in hosts},
               no_runtime_jitter=next(results) if jitter else None,
               work_shared=next(results) if moves else None, without_late=next(results, None))


def _slow_with(case: EvidenceInputs, findings: Sequence[Finding], ranks: Sequence[int]) -> float:
  """Seconds per step by which transfers are slow as well, by the fault that makes some of these
  ranks late: mending them mends the transfers."""
  slowing = [finding for finding in findings if Evidence.SLOW_AS_WELL in codes(finding.evidence)
             and set(finding.ranks) <= set(ranks)]
  slow = contention.look(case) if slowing else None
  return slow.seconds if slow else 0.0


def saves_nothing(case: EvidenceInputs, ranks: Sequence[int], least: float) -> bool:
  """Whether a step without some ranks being late would be shorter by less than a part of it."""
  if not ranks:
    return False
  seconds = saved(case.run, case.selected, case.floor, [Without(ranks=tuple(ranks))])[0]
  return bool(seconds < least * case.step_time)


