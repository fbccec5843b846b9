"""The null of pacing: its figures are those of the job simulated another way."""

import numpy as np
import pytest

from experiments.measure import null_pacing
from tests.coordination import jobs


@pytest.mark.parametrize("name", null_pacing.PACERS)
@pytest.mark.parametrize("shape", ["wandering", "straggler"])
def test_a_cell_against_the_tests_own_simulation(name, shape):
  ranks, steps, seed = 4, 250, 1
  found = null_pacing.cell(null_pacing.PACERS[name], shape, ranks, steps, seed)
  rng = np.random.default_rng([seed, list(null_pacing.SHAPES).index(shape), ranks])
  busy = null_pacing.SHAPES[shape](rng, steps, ranks).astype(np.float32)
  applied, _ = jobs.run(null_pacing.PACERS[name], busy)
  held = jobs.held_back(busy, applied).sum()
  bare = (busy.astype(np.float64).max(axis=1) + null_pacing.TRANSFER).sum()
  # The transfer differs between the two: it moves the median step, on which the threshold hangs.
  assert found["ratio"] == pytest.approx(1 + held / bare, abs=3e-5 if name == "default" else 2e-6)
  assert found["held_back_share"] == pytest.approx(found["ratio"] - 1, abs=1e-9)
  assert found["mean_delay_ms"] == pytest.approx(1e3 * applied.mean(), rel=0.1)
  assert 1 <= found["ratio"] <= 1.001


@pytest.mark.parametrize("shape, mean, spread", [
    ("normal", 1.0, 0.05), ("exponential", 1.1, 0.1), ("pauses", 1.01, 0.1425),
    ("wandering", 1.0, 0.102)])
def test_busy_times_are_what_they_are_said_to_be(shape, mean, spread):
  busy = null_pacing.SHAPES[shape](np.random.default_rng(0), 2000, 128) / null_pacing.BUSY
  assert busy.mean() == pytest.approx(mean, abs=0.01)
  assert busy.std() == pytest.approx(spread, rel=0.05)
