"""The experiment on a rank slowed down: its sums, on figures made up."""

import itertools

import numpy as np
import pytest

from experiments.measure import balanced, balanced_simulated, balanced_worker
from experiments.measure.balanced_worker import AGAIN, CHOSEN, EVEN, SHARED, WITHOUT


def stage(slow=2.0, shared=11.0):
  seconds = {EVEN: 16.0, AGAIN: 16.0, SHARED: shared, CHOSEN: 10.0, WITHOUT: 11.0}
  return {"slow": slow, "each": [1e-3, 1e-3, 1e-3, slow * 1e-3], "chosen": [9, 9, 9, 5], "without": [11, 11, 10, 0],
          "history": [[8, 8, 8, 8]] * 20 + [[10, 9, 9, 4]] * 5 + [[9, 9, 9, 5]] * 15, "counts": [9, 9, 9, 5],
          "seconds": {arm: [1e-3 * value * (1 + 0.01 * k) for k in range(4)] for arm, value in seconds.items()}}


def test_what_was_recovered_and_how_soon():
  found = balanced.judge(stage())
  assert found["recovered_percent"] == pytest.approx(100 * 5 / 6, rel=1e-3) and found["followed_after"] == 20
  assert found["change_percent"][SHARED] == pytest.approx([(11 / 16 - 1) * 100] * 3, rel=1e-3)
  assert found["change_percent"][AGAIN] == [0, 0, 0] and found["rounds"] == 4
  late = stage()
  late["history"][-1] = [8, 8, 8, 8]
  assert balanced.judge(late)["followed_after"] is None
  assert "recovered_percent" not in balanced.judge(stage(slow=1.0))


def test_the_page_has_every_stage_and_says_what_failed():
  figures = {"machine": {"cores": 2, "platform": "x", "jax": "y", "python": "z"}, "command": "c", "date": "d",
             "load_average_at_start": 0.1, "rounds": 4, "intervals": "student",
             "jobs": {"sleep-32": {"stages": [balanced.judge(stage())]}, "quota-16": {"failed": "quota-16: no right"}}}
  page = "\n".join(balanced.lines(figures))
  assert "9/9/9/5" in page and "Could not be run: quota-16: no right" in page and "83.33" in page


def test_the_best_counts_by_hand():
  seconds = np.array([1.0, 1.7, 3.1])
  every = [c for c in itertools.product(range(9), repeat=3) if sum(c) == 8]
  best = min((np.array(c) * seconds).max() for c in every)
  assert (balanced_worker.quickest(seconds, 8) * seconds).max() == best
  without = balanced_worker.quickest(seconds, 8, 2)
  assert without[2] == 0 and (without * seconds).max() == min((np.array(c) * seconds).max() for c in every if not c[2])


def test_made_up_speeds_are_what_they_are_called():
  rng = np.random.default_rng(0)
  for name, (speeds, _) in balanced_simulated.SCENARIOS.items():
    made = speeds(8, rng)
    assert made.shape == (balanced_simulated.STEPS, 8) and (made > 0).all(), name
    slow = (made.mean(axis=0) > 1.05).sum()
    assert "drift" in name or slow == (0 if "healthy" in name else 4 if "half the ranks" in name else 1), name
