"""The measured fabric as a JSON document, which `jaxpace report --floor` reads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from jaxpace.costs.bench.fit import Fit, Timing
from jaxpace.costs.bench.places import Group
from jaxpace.costs.fabric_file import SCHEMA


def to_json(levels: Sequence[tuple[Group, Mapping[str, tuple[Fit, Sequence[Timing]]]]],
            facts: Mapping[str, Any], notes: Sequence[str]) -> dict[str, Any]:
  """Returns plain lists, dicts and scalars; seconds and bytes.

  Args:
    levels: what was fitted and measured, by level and kind.
    facts: of the job: versions, devices, processes, hosts.
    notes: sentences.
  """
  return {"schema": SCHEMA, "kind": "jaxpace bench", **facts, "levels": [
      {"level": group.level, "ranks": group.ranks, "measured": len(group.members[0]),
       "groups": len(group.members),
       "collectives": {kind: _cost(found, measured) for kind, (found, measured) in by_kind.items()}}
      for group, by_kind in levels], "notes": list(notes)}


def _cost(found: Fit, measured: Sequence[Timing]) -> dict[str, Any]:
  return {"algorithm": found.cost.algorithm, "alpha": found.cost.alpha.to_json(),
          "beta": found.cost.beta.to_json(), "misfit": found.misfit, "points": [
              {"bytes": m.bytes, "seconds": m.seconds, "low": float(np.quantile(m.samples, 0.05)),
               "high": float(np.quantile(m.samples, 0.95)), "samples": len(m.samples)}
              for m in measured]}
