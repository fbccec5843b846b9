"""A job that is killed, goes on from its checkpoint in other processes, and goes on again on more
ranks."""

import json

import numpy as np
import pytest

from jaxpace.runs.reader import read_run
from tests.multiprocess import jobs

WORKER = "restore_worker.py"


def restored(output):
  return json.loads(next(line for line in output.splitlines() if line.startswith("restored "))[9:])


@pytest.mark.long
def test_killed_restarted_and_restarted_on_more_ranks(tmp_path):
  killed = jobs.start(WORKER, tmp_path, 100_000, 25, 0.12, devices=2)
  lines = []
  for line in killed.stdout:
    lines.append(line)
    # Rows of the last few seconds may be lost.
    if line.startswith("step ") and int(line.split()[1]) >= 60 and any(
        (tmp_path / "run" / "steps").glob("*.parquet")):
      break
  killed.kill()
  ((status, rest),) = jobs.finish([killed])
  assert status == -9, [*lines[-20:], rest]
  last_save = max(int(path.name) for path in (tmp_path / "checkpoints").iterdir()
                  if path.name.isdigit())
  assert last_save >= 50
  end = last_save + 40

  # On as many ranks, now in two processes.
  outputs = jobs.pair(WORKER, tmp_path, end, 1000, 0)
  output = outputs[0]
  assert list(map(restored, outputs)) == [{"step": last_save, "seen": 16, "end": False}] * 2
  facts = jobs.facts(output)
  # The killed process's last exit must not be taken for this one's: the first arrival is unknown,
  # the second sane.
  assert facts["unknown"] == [2, 0, 0] and facts["longest"] < 600
  assert facts["step"] == end and "WARNING jaxpace" not in output
  run = read_run(tmp_path / "run")
  assert run.ranks == 2 and run.steps[0] == 0 and run.steps[-1] == end - 1
  attempt = run.attempt[0]
  assert attempt[0] == 0 and (attempt[:last_save] <= 0).all() and (attempt[last_save:] == 1).all()
  assert np.isnan(run.durations["gap"][:, last_save]).all()

  ((status, output),) = jobs.finish([jobs.start(WORKER, tmp_path, last_save + 20, 1000, 0,
                                                devices=4)])
  assert status == 0, output
  assert "of 2 ranks, this job has 4" in output
  assert restored(output) == {"step": last_save, "seen": 0, "end": False}
  assert jobs.facts(output)["ranks"] == 4 and jobs.facts(output)["step"] == last_save + 20
