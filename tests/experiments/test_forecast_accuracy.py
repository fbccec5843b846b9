"""The experiments on forecasts and on comparisons do what their tables say, on small cases."""

import numpy as np
import pytest

from experiments.measure import compare_false_alarms, forecast_accuracy
from jaxpace.trace.reader import read_run


def test_simulated_jobs_are_forecast_and_played():
  rows = forecast_accuracy.simulated("common", 2, 400, 8, [16, 32], seed=3)
  assert [(row["job"], row["ranks"]) for row in rows] == [(0, 16), (0, 32), (1, 16), (1, 32)]
  found = forecast_accuracy.summarise(rows)
  assert found["forecasts"] == 4 and found["worst_error"] < 0.1 and found["within_10_percent"] == 1
  wrong = [{**row, "estimate": 2 * row["truth"], "low": row["truth"] * 1.5,
            "high": row["truth"] * 3} for row in rows]
  assert forecast_accuracy.summarise(wrong)["coverage"] == 0
  assert forecast_accuracy.summarise(wrong)["worst_error"] == pytest.approx(1)


@pytest.mark.parametrize("kind", forecast_accuracy.KINDS)
def test_noise_is_of_its_kind(kind):
  lasting = np.linspace(-1, 1, 4)
  values = forecast_accuracy.own_noise(kind, 4, 4000, lasting, np.random.default_rng(0))
  shared = np.corrcoef(values)[0, 1]
  assert (shared > 0.8) == kind.startswith("common")
  assert (np.corrcoef(values[0, 1:], values[0, :-1])[0, 1] > 0.8) == (kind == "autocorrelated")
  assert (values.mean(axis=1).std() > 1e-3) == (kind == "offsets")


@pytest.mark.long
def test_devices_that_sleep_take_the_time_of_the_last(tmp_path):
  mean = forecast_accuracy.sleeping_run(tmp_path / "run", 2, 25, 1)
  run = read_run(tmp_path / "run")
  assert run.ranks == 2 and len(run.collectives) == 1
  assert mean > forecast_accuracy._WORK + 1.2 * forecast_accuracy._SPREAD


def test_rates_of_alarms():
  found = compare_false_alarms.rates("normal", 200, 0.06, 12, 4)
  assert found["fails_above_3_percent"] == 1 and found["interval_holds"] > 0.5
  assert compare_false_alarms.rates("normal", 200, 0.0, 12, 4)["fails_above_3_percent"] == 0
