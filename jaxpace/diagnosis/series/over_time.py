"""Step time and its shares, column by column."""

from __future__ import annotations

from typing import Any

import numpy as np

from jaxpace.diagnosis.by_rank import SHARES, shares_of
from jaxpace.diagnosis.diagnosis import Diagnosis
from jaxpace.diagnosis.series.columns import Columns
from jaxpace.diagnosis.totals import PARTS

MOST = 512
"""Columns of the charts over time, at most: a wide screen has twice as many pixels to spare."""


def over_time(diagnosis: Diagnosis) -> dict[str, Any]:
  """Returns `columns`, `step_time` (mean, lowest and highest, seconds) and `shares` (of each
  column's steps)."""
  columns = Columns.over(diagnosis.run, diagnosis.selected, MOST)
  totals, floor = diagnosis.totals, diagnosis.floor
  means = {name: columns.mean(totals.per_step[name]) for name in PARTS}
  quiet, contention = (columns.mean(floor.quiet.sum(axis=0)),
                       columns.mean(floor.contention.sum(axis=0)))
  shares = [shares_of({name: float(means[name][i]) for name in PARTS}, _known(quiet[i]),
                      _known(contention[i]))
            for i in range(columns.size)]
  low, high = columns.extremes(totals.per_step["step"])
  return {"columns": columns.to_json(),
          "step_time": {"mean": means["step"].tolist(), "low": low.tolist(), "high": high.tolist()},
          "shares": {name: [own[name] for own in shares] for name in SHARES}}


def _known(value: np.floating[Any]) -> float:
  return float(value) if np.isfinite(value) else 0.0
