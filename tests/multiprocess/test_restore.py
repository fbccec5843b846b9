"""A job that is killed, goes on from its checkpoint in other processes, and goes on again on more
ranks."""

import json
import pathlib
import subprocess
import sys

import numpy as np
import pytest

from jaxpace.runs.reader import read_run
from tests.multiprocess import jobs

WORKER = pathlib.Path(__file__).with_name("restore_worker.py")


def start(directory, steps, every, devices, pause=0.0, **environment):
  return subprocess.Popen(
      [sys.executable, str(WORKER), str(directory), str(steps), str(every), str(pause)],
      cwd=jobs.ROOT, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
      env=jobs.clean_environment(XLA_FLAGS=f"--xla_force_host_platform_device_count={devices}",
                                 **environment))


def restored(output):
  return json.loads(next(line for line in output.splitlines() if line.startswith("restored "))[9:])


@pytest.mark.long
def test_killed_restarted_and_restarted_on_more_ranks(tmp_path):
  killed = start(tmp_path, 100_000, 25, 2, pause=0.12)  # some 7 s: rows of the last 5 may be lost
  lines = []
  for line in killed.stdout:
    lines.append(line)
    if line.startswith("step 60"):
      break
  killed.kill()
  ((status, rest),) = jobs.finish([killed])
  assert status == -9, [*lines[-20:], rest]
  last_save = max(int(path.name) for path in (tmp_path / "checkpoints").iterdir()
                  if path.name.isdigit())
  assert last_save in (50, 75)

  # On as many ranks, now in two processes.
  port = jobs.free_high_port()
  done = jobs.finish([start(tmp_path, 100, 1000, 1, JAX_COORDINATOR_ADDRESS=f"127.0.0.1:{port}",
                            JAX_NUM_PROCESSES="2", JAX_PROCESS_ID=str(index))
                      for index in range(2)], 120)
  assert [status for status, _ in done] == [0, 0], done
  assert ([restored(output) for _, output in done]
          == [{"step": last_save, "seen": 16, "end": False}] * 2)
  output = done[0][1]
  facts = jobs.facts(output)
  # The killed process's last exit must not be taken for this one's: the first arrival is unknown,
  # the second sane.
  assert facts["unknown"] == [2, 0, 0] and facts["longest"] < 60
  assert facts["step"] == 100 and "WARNING jaxpace" not in output
  run = read_run(tmp_path / "run")
  assert run.ranks == 2 and run.steps[0] == 0 and run.steps[-1] == 99
  attempt = run.attempt[0]
  assert attempt[0] == 0 and (attempt[:last_save] <= 0).all() and (attempt[last_save:] == 1).all()
  assert np.isnan(run.durations["gap"][:, last_save]).all()

  ((status, output),) = jobs.finish([start(tmp_path, last_save + 20, 1000, 4)], 120)
  assert status == 0, output
  assert "of 2 ranks, this job has 4" in output
  assert restored(output) == {"step": last_save, "seen": 0, "end": False}
  assert jobs.facts(output)["ranks"] == 4 and jobs.facts(output)["step"] == last_save + 20
