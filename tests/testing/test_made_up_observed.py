"""Made-up observed runs: played as the model says, and written as a recorder would."""

from __future__ import annotations

import numpy as np
import pytest

from jaxpace.core.detail import is_detailed
from jaxpace.trace.reader import read_run
from tests.synthetic.made_up_observed import LayerFault, ObservedJob, places, simulate, write

JOB = ObservedJob(data=2, fsdp=2, tensor=2, layers=3, steps=60, noise=0.05, transfer_noise=0.2,
                  every=4, seed=3)


def played(job: ObservedJob, truth) -> np.ndarray:
  """[R, K] when each rank has left the last collective of each step, one rank and one collective at
  a time."""
  time, ends = np.zeros(job.ranks), np.zeros((job.ranks, job.steps))
  for k in range(job.steps):
    for c, place in enumerate(truth.places):
      ready = time + truth.busy[c, :, k]
      for group in place.groups:
        for rank in group:
          time[rank] = max(ready[other] for other in group) + truth.transfer[c, group[0], k]
    ends[:, k] = time
  return ends


@pytest.mark.parametrize("norm", [True, False])
def test_ranks_leave_a_collective_with_their_group(norm: bool):
  job = ObservedJob(**{**vars(JOB), "norm": norm,
                       "faults": (LayerFault("late", 5e-3, (3,), layer=1),)})
  truth = simulate(job)
  ends = truth.begin + (truth.busy + truth.wait).sum(axis=0)
  np.testing.assert_allclose(ends, played(job, truth), atol=1e-9)
  assert truth.late[3] == pytest.approx(5e-3) and not np.delete(truth.late, 3).any()
  assert truth.wait.min() > 0


def test_a_step_has_the_collectives_of_its_axes():
  at = places(JOB)
  assert len(at) == 3 * 2 + 3 * 3 + 2
  for place in at:
    members = [rank for group in place.groups for rank in group]
    assert sorted(members) == list(range(8)), place
  assert {place.axis: len(place.groups) for place in at} == {
      "fsdp": 4, "tensor": 4, "data": 4, "data,fsdp,tensor": 1}
  assert sum(place.transfer for place in at) == pytest.approx(JOB.transfer)
  # The last layer is the first of the backward pass.
  backward = [place for place in at if place.phase == "backward" and place.kind == "all-gather"]
  assert [place.loops[0][1] for place in backward] == [0, 1, 2]


def test_what_is_written_is_read_back(tmp_path):
  truth = write(tmp_path, JOB)
  run = read_run(tmp_path)
  assert run.problems == () and run.observed
  steps = np.arange(JOB.steps)
  np.testing.assert_array_equal(run.all_steps.steps, steps)
  np.testing.assert_array_equal(run.steps, steps[is_detailed(steps, 4)])
  for c, collective in enumerate(run.collectives):
    wait = (collective.exit_ns - collective.enter_ns) * 1e-9
    np.testing.assert_allclose(wait, truth.wait[c][:, run.steps], atol=2e-9)
  whole = run.all_steps
  np.testing.assert_allclose(np.diff(whole.end_ns, axis=1) * 1e-9,
                             (truth.busy + truth.wait).sum(axis=0)[:, 1:], atol=2e-9)
  np.testing.assert_allclose(whole.durations["sync"], truth.wait.sum(axis=0), rtol=1e-6)


def test_an_unknown_fault_is_refused():
  with pytest.raises(ValueError, match="late, pause"):
    LayerFault("slow", 1e-3)
