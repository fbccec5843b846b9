"""How step times are distributed, the tail by itself, and the longest steps."""

from __future__ import annotations

from typing import Any

import numpy as np

from jaxpace.diagnosis.by_rank import shares_of
from jaxpace.diagnosis.diagnosis import Diagnosis
from jaxpace.diagnosis.totals import PARTS

LONGEST = 20
_FEWEST, _MOST = 12, 80
_TAIL = 1.5
"""The histogram ends at the highest step where that is so near; else what lies beyond is counted by
itself."""


def distribution(diagnosis: Diagnosis) -> dict[str, Any]:
  """Returns `edges` and `steps` of the histogram, `beyond` its last edge, the `tail`, and the
  `longest` steps.

  The tail is pairs of a share of the steps and the seconds that this share takes longer than, from
  half of the steps to the very longest. Of each of the longest steps the shares are told, and the
  rank the job waited for most.
  """
  run, totals = diagnosis.run, diagnosis.totals
  at = np.flatnonzero(diagnosis.selected.mask)
  steps = totals.per_step["step"][at]
  low, usual, high = (float(x) for x in np.quantile(steps, [0, 0.995, 1]))
  end = high if high - low <= _TAIL * (usual - low) else usual
  if end <= low:
    end = low + max(low * 1e-3, 1e-6)
  bins = int(np.clip(2 * np.cbrt(len(steps)), _FEWEST, _MOST))
  counts, edges = np.histogram(steps, bins, (low, end))
  inside = int(counts.sum())
  shares = np.unique(np.concatenate([np.geomspace(0.5, 1 / len(steps), 60), [0.5, 0.1, 0.01]]))[
      ::-1]
  shares = shares[shares >= 1 / len(steps)]
  longest = at[np.argsort(-steps, kind="stable")[:LONGEST]]
  return {
      "edges": edges.tolist(), "steps": counts.tolist(), "beyond": len(steps) - inside,
      "longest_step": high,
      "tail": {"share": shares.tolist(),
               "step_time": np.quantile(steps, 1 - shares, method="inverted_cdf").tolist()},
      "longest": [{"step": int(run.steps[k]), "step_time": float(totals.per_step["step"][k]),
                   "last_rank": int(totals.last_rank[k]) if totals.last_rank[k] >= 0 else None,
                   "shares": _shares(diagnosis, int(k))} for k in longest]}


def _shares(diagnosis: Diagnosis, k: int) -> dict[str, float]:
  parts = {name: float(diagnosis.totals.per_step[name][k]) for name in PARTS}
  quiet, contention = (np.nan_to_num(values[:, k]).sum()
                       for values in (diagnosis.floor.quiet, diagnosis.floor.contention))
  return shares_of(parts, float(quiet), float(contention))
