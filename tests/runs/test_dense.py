"""What counts where a run holds several rows of one rank and step."""

import numpy as np
import pytest

from jaxpace.record import columns
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
  for table, rows in again.items():
    PartStore(tmp_path, table, "synthetic", 0).append(rows)
  run = read_run(tmp_path)
  expected = np.zeros((2, 20), np.float32)
  expected[:, 5:10] = 7e-3 * counts
  np.testing.assert_allclose(run.durations["delay_applied"], expected)
  assert run.duplicates == 10 and run.attempt.max() == (0 if attempt == 0 else 1)


def test_steps_end_for_ranks_that_are_in_later_collectives_alone(tmp_path):
  """Rank 1 has no row of the first collective, as the stages of a pipeline; nor are there sums."""
  for slot, ranks in enumerate(([0], [0, 1])):
    step, rank = (each.ravel() for each in np.meshgrid(np.arange(4), ranks))
    enter = 1000 * step + 100 * slot + 10
    PartStore(tmp_path, "collectives", "a", 0).append({
        **columns.whose(step, rank, 0, 0), "collective": np.full(len(step), slot, np.int32),
        "enter_ns": enter, "exit_ns": enter + 50})
  every = read_run(tmp_path).all_steps
  assert (every.attempt == 0).all()
  assert every.end_ns.tolist() == [[1000 * step + 160 for step in range(4)]] * 2
