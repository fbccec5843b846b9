"""Waiting for late ranks that is much and that no finding speaks of: where it is, and what for."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from jaxpace.diagnosis.diagnosis import Diagnosis
from jaxpace.diagnosis.findings import COSTLY
from jaxpace.diagnosis.selected_steps import MIN_STEPS

_FEW = 0.1
"""Steps that hold half of the waiting are few up to this share; of exponential jitter, 19 % of the steps hold half."""
_MOST = 0.6
"""One rank is last in this part of the steps at least, and holds this part of the waiting, if that is said of it."""


class Unnamed(NamedTuple):
  """Waiting without a finding."""

  share: float  # of the step
  steps: np.ndarray  # numbers of the steps that hold half of it, as few as do
  few: bool  # whether these are few
  rank: int | None = None  # the rank that is last in most of the steps, if most of the waiting is for it
  often: float = 0.0  # share of the steps in which it is


def unnamed_waiting(diagnosis: Diagnosis) -> Unnamed | None:
  """Returns where the waiting is; None where it is little, a finding speaks of it, or nothing can be judged."""
  run, selected, step_time = diagnosis.run, diagnosis.selected, diagnosis.step_time
  if (step_time is None or diagnosis.findings or not run.collectives or run.ranks < 2 or selected.size < MIN_STEPS
      or diagnosis.earliness < COSTLY * step_time.mean):
    return None
  whole = np.where(selected.mask, np.nan_to_num(diagnosis.totals.earliness.sum(axis=0)), 0.0)
  order = np.argsort(-whole, kind="stable")
  number = int(np.searchsorted(np.cumsum(whole[order]), whole.sum() / 2)) + 1
  totals = diagnosis.totals
  rank = int(totals.last.argmax())
  often = float(totals.last[rank]) / max(1, int(totals.present[rank]))
  held = float(whole[totals.last_rank == rank].sum()) / max(float(whole.sum()), 1e-12)
  most = often >= _MOST and held >= _MOST
  return Unnamed(diagnosis.earliness / step_time.mean, np.sort(run.steps[order[:number]]),
                 number <= _FEW * selected.size, rank if most else None, often)


__all__ = ["Unnamed", "unnamed_waiting"]
