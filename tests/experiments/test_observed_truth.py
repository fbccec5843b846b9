"""The measurement of lateness inside layers, shortened: one process, a late device in a step jitted
as a whole."""

import numpy as np
import pytest

from experiments.measure import observed_truth


@pytest.mark.long
def test_a_device_late_in_a_layer_is_told_with_its_layer():
  job = observed_truth.launch(1, [30.0], 3)
  assert job["lost"] == 0 and job["collectives"] == 3 * observed_truth.LAYERS + 1
  assert [(fault["within"], fault["layer_right"]) for fault in job["faults"]] == [(True, True)] * 3
  assert all(30 <= fault["slept_ms"] < 60 for fault in job["faults"])
  assert [row["within"] for row in observed_truth.summary(job)] == [3, 3]


def test_faults_are_the_same_in_every_process_and_of_every_size():
  asked = observed_truth.faults([1.0, 2.0], 50, 4)
  assert asked == observed_truth.faults([1.0, 2.0], 50, 4)
  assert sorted(fault.delay_ms for fault in asked) == [1.0] * 50 + [2.0] * 50
  assert {fault.layer for fault in asked} == set(range(observed_truth.LAYERS))
  assert (np.diff([fault.step for fault in asked]) == observed_truth.EVERY).all()
