"""Run-time control of a job of two processes of two devices each, one of which hears of changes
late."""

import pytest

from tests.multiprocess import jobs


@pytest.mark.long
def test_both_processes_apply_a_change_at_the_same_step(tmp_path):
  first, second = map(jobs.facts, jobs.pair("control_worker.py", tmp_path, 400, devices=2))
  assert first["applied"] == second["applied"]
  (off, enabled), (on, enabled_again) = first["applied"]
  assert (enabled, enabled_again) == (False, True) and 41 < off < on
  # Row 0 is before any decision: `off` counts from row 1.
  assert first["off"] == second["off"] == list(range(off - 1, on - 1))
  assert first["rounds"] == second["rounds"] > 10
  assert 0 < first["kept"] <= 8
