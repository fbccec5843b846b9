"""The null of pacing without shared arrivals: its figures are those of the job simulated another
way."""

import numpy as np
import pytest

from experiments.lib import measured
from experiments.measure import null_unshared
from experiments.measure.null_pacing import SHAPES
from tests.coordination import jobs
from tests.coordination.test_unshared import run


@pytest.mark.parametrize("transfer", null_unshared.TRANSFERS)
@pytest.mark.parametrize("name", ["default", "eager, cost 5 %"])
def test_a_cell_against_the_tests_own_simulation(name, transfer):
  """There, every rank sees nothing but its own."""
  shape, ranks, steps, seed = "wandering", 4, 300, 2
  pacer = null_unshared.PACERS[name]
  found = null_unshared.cell(pacer, shape, transfer, ranks, steps, seed)
  rng = np.random.default_rng([seed, list(SHAPES).index(shape),
                               list(null_unshared.TRANSFERS).index(transfer), ranks])
  busy = SHAPES[shape](rng, steps, ranks).astype(np.float32)
  transfers = null_unshared.TRANSFERS[transfer](rng, steps)
  applied, _ = run(pacer, busy, transfers)
  elapsed = busy.max(axis=1).astype(np.float64).sum() + transfers.sum()
  assert found["cost"] == pytest.approx(jobs.held_back(busy, applied).sum() / elapsed, abs=1e-4)
  assert found["mean_delay_ms"] == pytest.approx(1e3 * applied.mean(), rel=0.3, abs=1e-6)
  # The theorem.
  assert found["cost"] <= (0.05 if "5" in name else 1e-3) + found["beyond"]
  assert (found["beyond"] == 0) == (transfer == "within the ceiling")


def test_the_page():
  cell = {"pacer": "default", "transfer": "within the ceiling", "shape": "normal", "ranks": 4,
          "seed": 0, "cost": 5e-4, "mean_delay_ms": 0.1, "beyond": 0.0}
  text = "\n".join(null_unshared.lines({**measured.circumstances("x"), "steps": 5, "seeds": 1,
                                        "worst_within": 5e-4, "worst_beyond": 0.1,
                                        "cells": [cell]}))
  assert "| within the ceiling | normal | 4 | +0.0500 % | 0.00 % | 0.1000 |" in text
