"""The made-up job obeys its own barrier model, step by step."""

import numpy as np
import pytest

from tests.synthetic.made_up_runs import MadeUpJob, simulate


@pytest.mark.parametrize("job", [
    MadeUpJob(ranks=3, steps=40, noise=0.2, late={1: 4e-3}, offsets={2: 14e-3}),
    MadeUpJob(ranks=4, steps=40, collectives=3, noise=0.1, delays={0: 2e-3}, contention=3e-3,
              contended=(0.2, 0.7)),
])
def test_everyone_leaves_when_the_last_one_has_come(job):
  truth = simulate(job)
  offset = np.array([round(job.offsets.get(r, 0) * 1e9) for r in range(job.ranks)])
  out = offset.copy()
  for k in range(job.steps):
    for c in range(job.collectives):
      enter = out + truth.busy[c, :, k]
      np.testing.assert_array_equal(truth.enter[c, :, k], enter)
      out = enter.max() + truth.transfer[c, k] + offset
      np.testing.assert_array_equal(truth.exit[c, :, k], out)


def test_a_step_is_made_of_its_phases():
  job = MadeUpJob(ranks=2, steps=30, noise=0.1, delays={1: 1e-3})
  truth = simulate(job)
  sync = truth.exit[0] - truth.enter[0]
  step = truth.gap + truth.delay + truth.forward + truth.backward + sync + truth.update
  np.testing.assert_array_equal(np.diff(truth.end), step[:, 1:])
  np.testing.assert_array_equal(truth.start[:, 1:] - truth.end[:, :-1], truth.gap[:, 1:])
