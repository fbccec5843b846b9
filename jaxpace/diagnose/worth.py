"""What mending would save: the run replayed without what makes it slow, and without what a user
asks to be taken out."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from jaxpace.core.words import plural
from jaxpace.diagnose.limits import LEAST
from jaxpace.diagnose.modes import contention
from jaxpace.diagnose.modes.inputs import EvidenceInputs, Finding
from jaxpace.diagnose.phases import pauses_in
from jaxpace.diagnose.what_if import Alternative, Without, alternative, has_gaps, saved
from jaxpace.diagnose.words.codes import Verdict, codes
from jaxpace.diagnose.words.evidence import Evidence
from jaxpace.diagnose.words.names import hosts_of, ranks_by_host
from jaxpace.files import UserError
from jaxpace.runs.run import Run, RunError


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


def _named(case: EvidenceInputs, findings: Sequence[Finding]) -> list[int]:
  """The late ranks, if a finding is about them."""
  modes = {finding.mode for finding in findings}
  return case.lateness.late.tolist() if modes & {Verdict.PERSISTENT, Verdict.LOCALITY} else []


def worth(case: EvidenceInputs, asked: Sequence[WhatIfRequest]) -> Worth:
  """Replays the run without what is worth asking for, and without what was asked for.

  Of a finding that was asked for, its share is taken out: shares of findings are disjoint parts of
  the step.

  Where timestamps don't tell who is last a step without skew is not known.

  Raises:
    RunError: the run holds nothing of what was asked to be taken out.
  """
  if not case.selected.size:
    return Worth()
  run, mean, findings, late = case.run, case.mean_step, case.findings, _named(case, case.findings)
  # the steps that are replayed are detailed, those that count need not be
  scale = float(case.steps.mean()) / mean
  modes = {finding.mode for finding in findings}
  found = case.totals.groups
  direct = bool(found.direct.all())
  by_host = ranks_by_host(run)
  hosts = list(hosts_of(run, late)) if len(by_host) > 1 else []
  without: dict[Any, Without] = {"skew": Without(skew=not direct),
                                 "contention": Without(contention=True)}
  without |= {rank: Without(ranks=(rank,)) for rank in late}
  without |= {("asked", place): resolve(request, run)._replace(
      together=Verdict.CONTENTION in modes & request.findings)
      for place, request in enumerate(asked)}
  without |= {("host", host): Without(ranks=tuple(by_host[host])) for host in hosts}
  if run.collectives and has_gaps(run):
    without["jitter"] = Without(runtime_jitter=True)
  if late and found.all_meet:
    without["work"] = Without(uneven=True)
  if len(late) > 1:
    without["late"] = Without(ranks=tuple(late))
  seconds = dict(zip(without, saved(run, case.selected, case.floor, list(without.values())),
                     strict=True))

  def after(what: Any, also: float = 0.0) -> Alternative:
    also += 0.0 if without[what].contention else _slow_with(case, without[what].ranks)
    return alternative(mean, seconds[what] + also, scale)

  def known(what: str) -> Alternative | None:
    return after(what) if what in without else None

  return Worth(
      no_skew=None if case.inconclusive and not late
      else alternative(mean, case.lateness.earliness if direct else seconds["skew"], scale),
      no_contention=after("contention"), without_rank={rank: after(rank) for rank in late},
      without_late=known("late"), without_host={host: after(("host", host)) for host in hosts},
      no_runtime_jitter=known("jitter"), work_shared=known("work"),
      asked=tuple((request.text, after(("asked", place), sum(f.share * mean for f in findings
                                                     if f.mode in request.findings)))
                  for place, request in enumerate(asked)))


def _slow_with(case: EvidenceInputs, ranks: Sequence[int]) -> float:
  """Seconds per step by which transfers are slow as well, by the fault that makes some of these
  ranks late: mending them mends the transfers."""
  slowing = any(Evidence.SLOW_AS_WELL in codes(finding.evidence)
                and set(finding.ranks) <= set(ranks) for finding in case.findings)
  slow = contention.look(case) if slowing else None
  return slow.seconds if slow else 0.0


def saves_nothing(case: EvidenceInputs, findings: Sequence[Finding]) -> bool:
  """Whether a step would hardly be shorter without the ranks that the findings call late."""
  late = tuple(_named(case, findings))
  return bool(late and saved(case.run, case.selected, case.floor, [Without(ranks=late)])[0]
              < LEAST * case.mean_step)


# What a user asks to be taken out of a run: "rank:3,host:b,jitter", read and found in the run.

_SWITCHES = {"skew": "skew", "contention": "contention", "jitter": "runtime_jitter",
             "runtime_jitter": "runtime_jitter", "pauses": "pauses", "pacing": "pacing"}
_FINDINGS = (Verdict.PERSISTENT, Verdict.LOCALITY, Verdict.AMPLIFICATION, Verdict.CONTENTION)
FORMS = ("rank:3, rank:4-7, host:NAME, skew, contention, jitter, pauses, pacing or a finding of "
         f"the report ({', '.join(_FINDINGS)})")


class WhatIfRequest(NamedTuple):
  """Things to be taken out together, as they were named; not yet looked for in any run."""

  text: str
  ranks: tuple[tuple[int, int], ...]  # first and last
  hosts: tuple[str, ...]
  switches: frozenset[str]  # fields of `Without`
  # modes whose cost is taken out, as far as the report finds them
  findings: frozenset[str] = frozenset()


def parse(text: str) -> WhatIfRequest:
  """Reads what is to be taken out.

  >>> parse("rank:3,host:b,jitter")[1:4]
  (((3, 3),), ('b',), frozenset({'runtime_jitter'}))

  Raises:
    UserError: a part is none of the forms.
  """
  ranks: list[tuple[int, int]] = []
  hosts: list[str] = []
  switches: set[str] = set()
  findings: set[str] = set()
  for part in (p.strip() for p in text.split(",")):
    kind, colon, value = part.partition(":")
    if kind in ("rank", "ranks") and colon:
      ranks.append(_range(part, value))
    elif kind in ("host", "hosts") and value:
      hosts.append(value)
    elif part in _SWITCHES:
      switches.add(_SWITCHES[part])
    elif part in _FINDINGS:
      findings.add(part)
    else:
      raise UserError(
          f"{part!r} can't be taken out of a run: give {FORMS}, or several joined by commas.")
  return WhatIfRequest(text, tuple(ranks), tuple(hosts), frozenset(switches), frozenset(findings))


def resolve(request: WhatIfRequest, run: Run) -> Without:
  """Finds what was asked for in a run.

  Raises:
    RunError: the run has no such rank or host, nobody would be left, or what is to be taken out was
      not recorded.
  """
  asked = f"--without {request.text}"
  if not run.collectives:
    raise RunError(f"{asked} can't be answered: no collective of {run.path} has timestamps, so "
                   "nothing shows who waits for whom.")
  gone: set[int] = set()
  for first, last in request.ranks:
    if last >= run.ranks:
      raise RunError(
          f"{asked}: the run has {plural(run.ranks, 'rank')}, numbered 0 to {run.ranks - 1}.")
    gone.update(range(first, last + 1))
  by_host = ranks_by_host(run)
  for host in request.hosts:
    if host not in by_host:
      raise RunError(f"{asked}: no host of the run is called {host!r}; {_close(host, by_host)}")
    gone.update(by_host[host])
  present = {r for r in range(run.ranks) if (run.attempt[r] >= 0).any()}
  if present <= gone:
    raise RunError(f"{asked} leaves no rank of the run: take fewer out.")
  if "runtime_jitter" in request.switches and not has_gaps(run):
    raise RunError(
        f"{asked}: the gaps between steps were not recorded, so jitter of the runtime is part "
        "of compute.")
  if "pauses" in request.switches and not (has_gaps(run) and pauses_in(run)):
    raise RunError(f"{asked}: neither garbage collection nor data nor checkpoints were measured "
                   "(`recorder.measure`), so nothing separates pauses from other gaps.")
  return Without(ranks=tuple(sorted(gone)), **dict.fromkeys(request.switches, True))


def _range(part: str, value: str) -> tuple[int, int]:
  first, dash, last = value.partition("-")
  if not first.isdecimal() or (dash and not last.isdecimal()) or (dash and int(last) < int(first)):
    raise UserError(f"{part!r} names no rank: write rank:3, or rank:4-7 for several.")
  return int(first), int(last or first)


def _close(host: str, names: Iterable[str]) -> str:
  known = [name for name in names if name]
  if not known:
    return "its processes left no host names."
  # Only after a slip: every report imports this module.
  import difflib
  close = difflib.get_close_matches(host, known, n=1)
  if close:
    return f"did you mean {close[0]!r}?"
  return f"there are {', '.join(known[:8])}{' and others' if len(known) > 8 else ''}."
