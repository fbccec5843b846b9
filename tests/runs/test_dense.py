"""What counts where a run holds several rows of one rank and step."""

import numpy as np
import pytest

from jaxpace.record.parts import PartStore
from jaxpace.runs.reader import read_run
from tests.synthetic import synthetic_runs
from tests.synthetic.synthetic_runs import SyntheticJob

JOB = SyntheticJob(ranks=2, steps=20, processes=1, hosts=1)


@pytest.mark.parametrize(("attempt", "counts"), [(0, True), (1, True), (-1, False)])
def test_the_newest_attempt_counts_and_of_one_attempt_what_was_written_last(
    tmp_path, attempt, counts):
  """Rows of steps 5 to 9 come again, delayed: in the same attempt, a later one, an earlier one."""
  synthetic_runs.write(tmp_path, JOB, attempt=1 if attempt < 0 else 0)
  again = synthetic_runs.rows(synthetic_runs.simulate(JOB), np.arange(2), slice(5, 10), process=0,
                            attempt=max(attempt, 0))
  again["steps"]["delay_applied_ns"] = np.full(10, 7_000_000)
  again["collectives"]["exit_ns"] += 1_000
  for table, columns in again.items():
    PartStore(tmp_path, table, "synthetic", 0).append(columns)
  run = read_run(tmp_path)
  expected = np.zeros((2, 20), np.float32)
  expected[:, 5:10] = 7e-3 * counts
  np.testing.assert_allclose(run.durations["delay_applied"], expected)
  assert run.duplicates == 10 and run.attempt.max() == (0 if attempt == 0 else 1)
