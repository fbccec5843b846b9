"""Housekeepers on several real processes: the same mode at the same step on all, or the collector
left alone."""

import os
import pathlib
import subprocess
import sys

import pytest

from tests.multiprocess import jobs

WORKER = pathlib.Path(__file__).with_name("housekeeping_worker.py")


def launch(tmp_path, *arguments):
  process = subprocess.Popen(
      [sys.executable, "-m", "jaxpace.cli", "launch", "--nproc", "2", "--logs",
       str(tmp_path / "logs"), "--", sys.executable, str(WORKER), *arguments], cwd=jobs.ROOT,
      env=jobs.clean_environment(), text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
  [(status, output)] = jobs.finish([process], timeout=120)
  logs = [(tmp_path / "logs" / f"process-{i}.log").read_text() for i in range(2)]
  assert status == 0, output + "".join(logs)
  return [jobs.facts(log) for log in logs], logs


@pytest.mark.long
@pytest.mark.skipif(os.name != "posix", reason="starts processes with signals of POSIX")
def test_all_processes_change_the_mode_at_the_same_step_and_parameters_stay_the_same(tmp_path):
  (first, second), _ = launch(tmp_path)
  assert first["modes"] == second["modes"]
  assert {"alone", "frozen"} <= set(first["modes"])
  changes = [step for step in range(1, 600) if first["modes"][step] != first["modes"][step - 1]]
  assert len(changes) > 3 and all((step + 1) % 3 == 0 for step in changes)  # list index 2 is step 3
  assert first["bare"] == first["again"] == second["bare"] == second["again"]
  assert first["restored"] and second["restored"]
  assert first["trial"] and not second["trial"]  # process 0 measures
  assert first["old"] == "deleted" and second["messages"] > 10


@pytest.mark.long
def test_a_process_that_is_told_nothing_leaves_the_collector_alone_and_goes_on(tmp_path):
  (first, second), logs = launch(tmp_path, "--broken")
  assert (len(second["modes"]) == 600 and len(set(second["modes"][200:])) == 1
          and second["modes"][-1] == "alone")
  assert ("leaves the garbage collector alone from step" in logs[1]
          and "was published" not in logs[0])
  assert first["restored"] and second["restored"]
