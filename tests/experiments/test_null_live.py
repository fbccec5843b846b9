"""The live null: its switch, its schedule, its judgement on made-up times, and a small run."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.lib import measured
from experiments.measure import null_live, null_pacing
from experiments.measure.null_live import BLOCK, ON
from tests.coordination import jobs

WARM_UP = 20


def schedule(rounds: int) -> np.ndarray:
  """[rounds, 3, BLOCK] arms."""
  steps = jnp.arange(WARM_UP, WARM_UP + rounds * 3 * BLOCK, dtype=jnp.int32)
  return np.asarray(jax.vmap(lambda k: null_live.arm(k, WARM_UP))(steps)).reshape(rounds, 3, BLOCK)


def synthetic(harm: float, noise: float, rounds: int = 400) -> dict[str, Any]:
  rng = np.random.default_rng(0)
  arms = schedule(rounds)[..., 0]
  each = (rounds, 3, BLOCK)
  seconds = (20e-3 * (1 + noise * rng.normal(size=each))
             * np.where(arms == ON, 1 + harm, 1.0)[..., None])
  seconds *= 1 + 0.02 * rng.normal(size=(rounds, 1, BLOCK))  # the same steps of all arms alike
  seconds[rng.random(each) < 0.02] += 0.5  # somebody else's pauses
  delays = np.where(arms == ON, 2e-3, 0.0).reshape(-1, 1) * [1, 0]
  return {"seconds": seconds.reshape(-1, BLOCK).tolist(), "arms": arms.reshape(-1).tolist(),
          "delays": delays.tolist()}


@pytest.mark.parametrize(("harm", "noise", "expected"), [
    (0.0, 2e-3, "met"), (0.02, 2e-3, "MISSED"), (0.005, 2e-3, "not shown"),
    (0.0, 0.1, "inconclusive: A/A fails")])
def test_judgement(harm: float, noise: float, expected: str) -> None:
  result = null_live.judge(synthetic(harm, noise))
  assert result["verdict_percent"] == expected
  assert result["verdict_mean_percent"] == expected
  if noise < 0.01:
    assert result["on_percent"][0] == pytest.approx(100 * harm, abs=0.2)
    assert result["on_mean_percent"][0] == pytest.approx(100 * harm, abs=0.5)
    assert result["again_cut"] == pytest.approx(0.04, abs=0.015)
  assert result["largest_mean_delay_ms"] == pytest.approx(2) and result["blocks_delayed"] == 1
  assert result["delay_while_off"] == 0


@pytest.mark.long
def test_a_small_run() -> None:
  """Two devices of this process. Loose: this is no measurement, and on a busy machine nothing may
  be delayed."""
  with jax.numpy_dtype_promotion("strict"):
    found = null_live.run(2, "straggler", rounds=2, warm_up=WARM_UP)
  assert len(found["seconds"]) == len(found["arms"]) == len(found["delays"]) == 6
  assert np.shape(found["seconds"]) == (6, BLOCK) and np.min(found["seconds"]) > null_live.BUSY
  result = null_live.judge(found)
  assert result["delay_while_off"] == 0
  jobs = {"one": {"straggler": result}}
  text = "\n".join(null_live.lines({**measured.circumstances("x"), "rounds": 2, "jobs": jobs}))
  assert "## Mean of the differences, cut" in text and "| one | straggler |" in text


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
