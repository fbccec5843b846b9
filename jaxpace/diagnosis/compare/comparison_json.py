"""The comparison as a JSON document."""

from __future__ import annotations

from typing import Any

from jaxpace.diagnosis.codes import codes
from jaxpace.diagnosis.compare.change import LEVEL
from jaxpace.diagnosis.compare.compare import Comparison
from jaxpace.diagnosis.diagnosis import Diagnosis

SCHEMA = 1


def to_json(found: Comparison) -> dict[str, Any]:
  """Returns plain lists, dicts and scalars; seconds a step, and shares of A's step where it says
  relative."""
  whole, relative = found.step_time, found.step_time.relative()
  notable = {r.rank for r in found.changed_ranks}
  return {
      "schema": SCHEMA, "a": _run(found.a), "b": _run(found.b), "level": LEVEL,
      "step_time": {**whole.to_json(),
                    "relative": dict(zip(("difference", "low", "high"), relative, strict=True))
                    if relative else None},
      "shares": {name: c.to_json() for name, c in found.shares.items()},
      "ranks": [{"rank": r.rank, "host_a": r.host_a or None, "host_b": r.host_b or None,
                 "notable": r.rank in notable, **r.lateness.to_json()} for r in found.ranks],
      "findings": {"new": list(found.new), "gone": list(found.gone),
                   "untold": [str(said) for said in found.untold],
                   "untold_codes": codes(found.untold)},
      "fail_above": found.limit, "failed": found.failed, "verdict": str(found.verdict),
      "verdict_code": str(found.verdict.code), "notes": [str(note) for note in found.notes],
      "note_codes": codes(found.notes)}


def _run(diagnosis: Diagnosis) -> dict[str, Any]:
  run = diagnosis.run
  return {"run": run.id, "path": str(run.path), "ranks": run.ranks_in_all,
          "hosts": sorted({h for h in (run.host_of_rank(r) for r in range(run.ranks)) if h}),
          "steps": diagnosis.selected.size, "window": list(run.window),
          "problems": list(run.problems)}
