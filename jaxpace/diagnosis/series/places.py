"""Where the job ran: hosts with their ranks, and the tree of each kind of host."""

from __future__ import annotations

from typing import Any

import numpy as np

from jaxpace.diagnosis.diagnosis import Diagnosis
from jaxpace.hosts.locality.job import job_concerns
from jaxpace.hosts.locality.outline import outlines
from jaxpace.trace.problems import list_ranks


def places(diagnosis: Diagnosis) -> dict[str, Any]:
  """Returns `hosts`, each with processes, ranks and how late these are; the `trees`; and all
  `concerns`, notes too.

  A host's lateness is the mean of its ranks', its latest rank the one that is latest on average.
  Ranks whose host is not known are under the name null.
  """
  run, lateness = diagnosis.run, diagnosis.lateness.mean
  ranks: dict[str, list[int]] = {}
  for rank in range(run.ranks):
    ranks.setdefault(run.host_of_rank(rank), []).append(rank)
  hosts = []
  for name, own in sorted(ranks.items()):
    known = [r for r in own if np.isfinite(lateness[r])]
    hosts.append({"host": name or None, "ranks": own,
                  "processes": sorted({int(p) for p in run.process_of_rank[own] if p >= 0}),
                  "lateness": float(lateness[known].mean()) if known else None,
                  "latest_rank": max(known, key=lambda r: float(lateness[r])) if known else None})
  late = set(diagnosis.lateness.late.tolist())

  def of_process(process: int) -> str:
    own = np.flatnonzero(run.process_of_rank == process).tolist()
    named = [rank for rank in own if rank in late]
    return ", ".join(filter(None,
                            [f"rank{'s' if len(own) > 1 else ''} {list_ranks(own)}" if own else "",
                             f"late: {list_ranks(named)}" if named else ""]))

  return {"hosts": hosts,
          "trees": [outline.to_json() for outline in outlines(run.locality, of_process)],
          "concerns": [concern.to_json() for concern in job_concerns(run.locality)]}
