"""What the fault lab says is true of its runs, against truth worked out by hand."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from experiments.labs.faults import truth
from tests.quick import examples


def by_hand(inside: np.ndarray, pauses: np.ndarray) -> dict[str, float]:
  """The accounting, step by step and rank by rank."""
  ranks, steps = inside.shape
  waited = {"work": 0.0, "pause": 0.0}
  for k in range(steps):
    busy = [inside[r, k] + pauses[r, k] for r in range(ranks)]
    last = max(range(ranks), key=lambda r: busy[r])
    for r in range(ranks):
      work = max(inside[last, k] - inside[r, k], 0)
      pause = max(pauses[last, k] - pauses[r, k], 0)
      if work + pause > 0:
        waited["work"] += (busy[last] - busy[r]) * work / (work + pause)
        waited["pause"] += (busy[last] - busy[r]) * pause / (work + pause)
  means = [sum(inside[r]) / steps for r in range(ranks)]
  chronic = max(means) - sum(means) / ranks
  skew = waited["work"] / ranks / steps
  chronic = min(chronic, skew)
  return {"chronic": chronic, "wandering": skew - chronic,
          "runtime": waited["pause"] / ranks / steps + sum(map(sum, pauses)) / ranks / steps}


@settings(max_examples=examples(40), deadline=None)
@given(st.integers(0, 10**6), st.integers(2, 5), st.integers(1, 12))
def test_truth_accounts_as_by_hand(seed: int, ranks: int, steps: int) -> None:
  rng = np.random.default_rng(seed)
  inside = rng.gamma(4.0, 1.0, (ranks, steps)) + 3.0 * (np.arange(ranks) == 0)[:, None]
  pauses = np.where(rng.random((ranks, steps)) < 0.3, rng.random((ranks, steps)) * 5, 0.0)
  found = truth.accounting(inside, pauses)
  for group, seconds in by_hand(inside, pauses).items():
    assert found[group] == pytest.approx(seconds, abs=1e-9)
  busy = inside + pauses
  assert (sum(found.values()) == pytest.approx((busy.max(axis=0) - busy.mean(axis=0)).mean()
                                               + pauses.mean()))
