"""The live view of runs in whose collectives not all ranks meet, or whose timestamps don't tell."""

import numpy as np
import pytest

from jaxpace.diagnose.live.follower import Follower
from tests.diagnose import grouped
from tests.lib.said import numbers

STEPS = 400
ROWS = [[0, 1], [2, 3]]
MESH = {"mesh": {"replica": 2, "data": 2}, "axis": ["data"]}


def noisy(busy):
  busy = np.repeat(np.asarray(busy, float)[..., None], STEPS, axis=-1)
  return busy * (1 + 0.01 * np.random.default_rng(0).standard_normal(busy.shape))


def test_groups_that_never_meet_are_not_compared(tmp_path):
  """One of them becomes slower half way, both of its ranks alike: nobody waits for anybody."""
  busy = noisy([[10e-3, 10e-3, 15e-3, 15e-3]])
  busy[:, 2:, STEPS // 2:] += 10e-3
  grouped.write(tmp_path / "run", *grouped.play(busy, [2e-3], [ROWS]), settings=MESH)
  look = Follower(tmp_path / "run").poll(0.0, 0.0)
  assert not look.alerts
  assert max(abs(rank.lateness) for rank in look.numbers.late) < 0.5e-3
  shares = look.numbers.shares
  assert sum(shares.values()) == pytest.approx(1, abs=1e-6)
  assert (shares["skew"] < 0.02
          and shares["transfer"] * look.numbers.step_time.mean == pytest.approx(2e-3, rel=0.05))


def test_a_rank_that_becomes_late_in_its_group_is_told(tmp_path):
  busy = noisy([[10e-3, 10e-3, 15e-3, 15e-3]])
  busy[:, 3, STEPS // 2:] += 5e-3
  grouped.write(tmp_path / "run", *grouped.play(busy, [2e-3], [ROWS]), settings=MESH)
  look = Follower(tmp_path / "run", steps=100).poll(0.0, 0.0)
  assert (look.alerts and all(numbers(alerts.sentence)[1] == 3
                            for alerts in look.alerts)), "after the step, the rank"
  assert (look.numbers.late[0].rank == 3
          and look.numbers.late[0].lateness == pytest.approx(5e-3, rel=0.1))
  assert [abs(rank.lateness) < 0.5e-3 for rank in look.numbers.late[1:]] == [True] * 3
