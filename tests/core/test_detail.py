"""Which steps are written in detail."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxpace.core.detail import FEW_ROWS, MANY_RANKS, ROWS, every, is_detailed


@given(st.integers(1, 4000), st.integers(1, 5000))
def test_rows_of_a_step_are_bounded_on_average(occurrences: int, ranks: int):
  rows = ROWS if ranks <= MANY_RANKS or occurrences <= ROWS else FEW_ROWS
  assert occurrences / every(occurrences, ranks) <= rows
  assert every(occurrences, ranks) == 1 or occurrences / (every(occurrences, ranks) - 1) > rows


@given(st.integers(1, 300), st.integers(0, 1 << 40))
def test_each_stretch_has_one_step_in_full(stretch: int, number: int):
  steps = np.arange(number * stretch, (number + 1) * stretch)
  drawn = is_detailed(steps, stretch)
  assert drawn.sum() == 1
  assert bool(is_detailed(int(steps[drawn][0]), stretch))


@pytest.mark.parametrize(("stretch", "period"), [(10, 100), (50, 100), (25, 10), (8, 64)])
def test_regular_steps_are_drawn_as_often_as_others(stretch: int, period: int):
  steps = np.arange(200_000)
  drawn = is_detailed(steps, stretch)
  for place in range(0, period, max(1, period // 5)):
    often = drawn[place::period].mean()
    chance = 1 / stretch
    assert abs(often - chance) < 5 * np.sqrt(chance * (1 - chance) / len(steps[place::period]))
