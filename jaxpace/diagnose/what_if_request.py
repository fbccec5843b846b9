"""What a user asks to be taken out of a run: "rank:3,host:b,jitter", read and found in the run."""

from __future__ import annotations

from typing import NamedTuple

from jaxpace.diagnose.floor import Floor
from jaxpace.diagnose.phases import measures_pauses
from jaxpace.diagnose.what_if import Without, has_gaps
from jaxpace.files import UserError
from jaxpace.runs.problems import plural
from jaxpace.runs.run import Run, RunError

_SWITCHES = {"skew": "skew", "contention": "contention", "jitter": "runtime_jitter",
             "runtime_jitter": "runtime_jitter", "pauses": "pauses", "pacing": "pacing"}
_FINDINGS = ("persistent_straggler", "locality", "synchronization_amplification",
             "fabric_contention")
FORMS = ("rank:3, rank:4-7, host:NAME, skew, contention, jitter, pauses, pacing or a finding of "
         f"the report ({', '.join(_FINDINGS)})")


class WhatError(UserError, ValueError):
  """No part of a run is called that; the message is a sentence."""


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
    WhatError: a part is none of the forms.
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
      raise WhatError(
          f"{part!r} can't be taken out of a run: give {FORMS}, or several joined by commas.")
  return WhatIfRequest(text, tuple(ranks), tuple(hosts), frozenset(switches), frozenset(findings))


def resolve(request: WhatIfRequest, run: Run, floor: Floor | None) -> Without:
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
  of_rank = [run.host_of_rank(r) for r in range(run.ranks)]
  for host in request.hosts:
    if host not in of_rank:
      raise RunError(f"{asked}: no host of the run is called {host!r}; {_close(host, of_rank)}")
    gone.update(r for r, name in enumerate(of_rank) if name == host)
  present = {r for r in range(run.ranks) if (run.attempt[r] >= 0).any()}
  if present <= gone:
    raise RunError(f"{asked} leaves no rank of the run: take fewer out.")
  if "runtime_jitter" in request.switches and not has_gaps(run):
    raise RunError(
        f"{asked}: the gaps between steps were not recorded, so jitter of the runtime is part "
        "of compute.")
  if "pauses" in request.switches and not (has_gaps(run) and measures_pauses(run)):
    raise RunError(f"{asked}: neither garbage collection nor data nor checkpoints were measured "
                   "(`recorder.measure`), so nothing tells pauses from other gaps.")
  if "contention" in request.switches and floor is None:
    raise RunError(f"{asked}: the floor of the transfers is not known.")
  switches = dict.fromkeys(request.switches, True)
  return Without(ranks=tuple(sorted(gone)), **switches)


def _range(part: str, value: str) -> tuple[int, int]:
  first, dash, last = value.partition("-")
  if not first.isdecimal() or (dash and not last.isdecimal()) or (dash and int(last) < int(first)):
    raise WhatError(f"{part!r} names no rank: write rank:3, or rank:4-7 for several.")
  return int(first), int(last or first)


def _close(host: str, names: list[str]) -> str:
  known = sorted({name for name in names if name})
  if not known:
    return "its processes left no host names."
  # Only after a slip: every report imports this module.
  import difflib
  close = difflib.get_close_matches(host, known, n=1)
  if close:
    return f"did you mean {close[0]!r}?"
  return f"there are {', '.join(known[:8])}{' and others' if len(known) > 8 else ''}."
