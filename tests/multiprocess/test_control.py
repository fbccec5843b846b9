"""Run-time control of a job of two processes of two devices each, one of which hears of changes
late."""

import pathlib
import subprocess
import sys

import pytest

from tests.multiprocess import jobs

WORKER = pathlib.Path(__file__).with_name("control_worker.py")


@pytest.mark.long
def test_both_processes_apply_a_change_at_the_same_step(tmp_path):
  port = jobs.free_high_port()
  workers = [subprocess.Popen(
      [sys.executable, str(WORKER), str(tmp_path), "400"], cwd=jobs.ROOT, text=True,
      stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=jobs.clean_environment(
          JAX_COORDINATOR_ADDRESS=f"127.0.0.1:{port}", JAX_NUM_PROCESSES="2",
          JAX_PROCESS_ID=str(index), XLA_FLAGS="--xla_force_host_platform_device_count=2"))
             for index in range(2)]
  done = jobs.finish(workers, 150)
  assert [status for status, _ in done] == [0, 0], done
  first, second = (jobs.facts(output) for _, output in done)
  assert first["applied"] == second["applied"]
  (off, enabled), (on, enabled_again) = first["applied"]
  assert (enabled, enabled_again) == (False, True) and 41 < off < on
  # Row 0 is before any decision: `off` counts from row 1.
  assert first["off"] == second["off"] == list(range(off - 1, on - 1))
  assert first["rounds"] == second["rounds"] > 10
  assert 0 < first["kept"] <= 8
