"""What any order of sending could give back: known answers of two jobs on one link."""

import pytest

from experiments.measure.turns_bounds import best, played


def test_jobs_of_one_period_that_have_room_lose_nothing_once_they_are_apart():
  assert best(36, 24, 1.0, horizon=4000) == pytest.approx(0, abs=2e-3)
  assert played(36, 24, 1.0, 8, "message", 10.0, steps=60) == pytest.approx([0, 0], abs=1e-6)
  # Both at half speed for all but the 10 ms in which they are apart.
  assert played(36, 24, 1.0, 8, "shared", 10.0, steps=60) == pytest.approx([14 / 60] * 2)


def test_by_message_the_job_of_the_shorter_period_takes_the_other_ones_step():
  first, second = played(36, 24, 1.13, 8, "message", 30.0, steps=60)
  assert first == pytest.approx(0.13, abs=1e-3) and second == pytest.approx(0, abs=1e-6)


@pytest.mark.parametrize("ratio", [1.06, 1.13, 1.2, 1.3])
def test_no_order_is_better_than_the_best(ratio):
  bound = best(36, 24, ratio, horizon=3000)
  for way in ("shared", "bucket", "message"):
    assert sum(played(36, 24, ratio, 8, way, 20.0, steps=80)) / 2 > bound - 2e-3


def test_where_the_link_is_always_in_use_nobody_can_gain():
  # Two messages of 24 ms and no compute but 6 ms: one of them is always being sent.
  assert best(6, 24, 1.0, horizon=4000) == pytest.approx(2 * 24 / 30 - 1, abs=5e-3)


def test_times_that_are_no_whole_ticks_have_no_bound():
  with pytest.raises(ValueError, match="whole ticks"):
    best(36, 24, 1.055)
