"""In which steps each finding happened, and where it cost most."""

from __future__ import annotations

from typing import Any

import numpy as np

from jaxpace.diagnosis.diagnosis import Diagnosis
from jaxpace.diagnosis.findings import AMPLIFICATION, JITTER, LOCALITY, PERSISTENT, Finding
from jaxpace.diagnosis.lateness import hold

_HALF = 0.5
"""Blocks that cost at least this part of what the costliest one does belong to its stretch."""
_MORE = 1.5
"""It is told if it costs this many times what the finding's steps do on average."""
_EVERYWHERE = 0.8
"""A stretch of this part of a finding's steps or more is no place in particular."""


def where(diagnosis: Diagnosis) -> dict[str, Any]:
  """Returns `blocks` of steps (first and last), and of each finding what it cost in each, and the
  costliest stretch."""
  run, selected = diagnosis.run, diagnosis.selected
  at = np.flatnonzero(selected.mask)
  number = np.bincount(selected.block[at], minlength=selected.blocks)
  end = np.cumsum(number)
  first, last = run.steps[at[end - number]], run.steps[at[end - 1]]
  rows = []
  for finding in diagnosis.findings:
    cost = np.maximum(np.nan_to_num(_cost(diagnosis, finding)), 0.0)
    begin, stop = _stretch(cost)
    since = int(first[0]) if finding.first_step is None else finding.first_step
    until = int(last[-1]) if finding.last_step is None else finding.last_step
    own = (last >= since) & (first <= until)
    usual, most = (float(np.average(cost[part], weights=number[part]))
                   for part in (own, slice(begin, stop)))
    stands_out = (most >= _MORE * usual
                  and last[stop - 1] - first[begin] < _EVERYWHERE * (until - since))
    costliest = {"first_step": int(first[begin]), "last_step": int(last[stop - 1]), "cost": most}
    rows.append({"first_step": since, "last_step": until, "cost": cost.tolist(),
                 "costliest": costliest if stands_out else None})
  return {"blocks": {"first": first.tolist(), "last": last.tolist(), "number": number.tolist()},
          "findings": rows}


def _cost(diagnosis: Diagnosis, finding: Finding) -> np.ndarray:
  """[B] seconds a step by block: waiting for the late ranks or by turns, gaps and waiting for them,
  contention."""
  lateness, selected, totals = diagnosis.lateness, diagnosis.selected, diagnosis.totals
  own = [e for e in lateness.episodes if e.rank in finding.ranks]
  if finding.mode == PERSISTENT or (finding.mode == LOCALITY and own):
    # Block by block, not the mean of an episode: a rank that is late by more for a while shows.
    return hold(totals, selected,
                [e._replace(begin=b, end=b + 1) for e in own
                 for b in range(e.begin, e.end)]).by_block
  if finding.mode == AMPLIFICATION:
    return lateness.random_by_block
  if finding.mode == JITTER:
    return selected.means(totals.per_step["runtime"] + totals.per_step["waiting_runtime"])
  return selected.means(diagnosis.floor.contention.sum(axis=0))


def _stretch(cost: np.ndarray) -> tuple[int, int]:
  """First block, and one past the last, of the neighbouring blocks around the costliest one that
  cost half as much."""
  peak = int(cost.argmax())
  low = np.flatnonzero(cost < _HALF * cost[peak])
  before, after = low[low < peak], low[low > peak]
  return int(before[-1]) + 1 if before.size else 0, int(after[0]) if after.size else len(cost)
