"""The fault lab's plan, its schedules and its fixtures of places."""

from __future__ import annotations

import numpy as np
import pytest

from configs import fault_lab
from experiments.labs.faults import plan
from experiments.labs.faults.schedule import schedule
from experiments.labs.faults.spec import MODES, Spec
from tests.experiments.faults_made_up import fault_of, spec_of


@pytest.fixture(scope="module")
def specs() -> list[Spec]:
  return plan.plan(fault_lab.get_config())


def test_the_default_plan_is_large_enough_and_says_twice_the_same(specs: list[Spec]) -> None:
  assert sum(bool(spec.faults) for spec in specs) >= 200
  assert sum("healthy" in spec.name for spec in specs) >= 150
  assert len({spec.name for spec in specs}) == len(specs)
  assert {mode for spec in specs for mode in spec.modes} == set(MODES)
  assert {fault.onset > 0 for spec in specs for fault in spec.faults} == {True, False}
  assert sum(len(spec.faults) == 2 for spec in specs) >= 20
  assert plan.plan(fault_lab.get_config()) == specs


def test_schedules_hold_what_the_faults_say() -> None:
  late = schedule(spec_of(fault_of("straggler", (1, 2), 3e-3, onset=80))).extra
  np.testing.assert_allclose(late[1:3, 80:], 3e-3, rtol=1e-6)
  assert not late[:, :80].any() and not late[[0, 3]].any()
  turns = schedule(spec_of(fault_of("rotating", (), 4e-3))).extra
  assert ((turns > 0).sum(axis=0) == 1).all() and len(set(turns.argmax(axis=0))) == 4
  both = schedule(spec_of(fault_of("rotating", (), 4e-3), fault_of("rotating", (), 4e-3))).extra
  assert (np.count_nonzero(both, axis=0) == 2).sum() > 100  # two faults are drawn apart
  unequal = schedule(spec_of(fault_of("imbalance", (), 2e-3))).extra.astype(np.float64)
  assert (unequal.max(axis=0) - unequal.mean(axis=0)).mean() == pytest.approx(2e-3, rel=1e-5)
  saved = schedule(spec_of(fault_of("checkpointing", (0,), 0.1, chance=25.0), name="4x1")).pause[
      "checkpoint"]
  assert np.flatnonzero(saved[0]).tolist() == list(range(24, 200, 25)) and not saved[1:].any()
  paused = schedule(spec_of(fault_of("collecting", (2, 3), 0.02, chance=0.1,
                                     onset=50), name="4x1")).pause["gc"]
  assert not paused[:2].any() and not paused[:, :50].any() and 15 < (paused > 0).sum() < 50
