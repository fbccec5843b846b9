"""The floor of a transfer."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxpace.diagnosis.floor import running_minimum


@pytest.mark.parametrize("freaks", [[100], [100, 101]])
def test_freak_readings_do_not_pull_it_down(freaks):
  transfer = np.full((1, 400), 2e-3)
  transfer[0, freaks] = 0.0
  floor = running_minimum(transfer)
  assert floor.floor[0] == 2e-3
  assert floor.contention.sum() == 0.0


def test_a_short_quiet_spell_is_believed():
  transfer = np.full((1, 200), 5e-3)
  transfer[0, 60:70] = 2e-3
  assert running_minimum(transfer).floor[0] == 2e-3
  assert running_minimum(transfer).contention.mean() == pytest.approx(3e-3 * 190 / 200)


def test_contention_is_what_exceeds_the_quiet_transfer():
  transfer = np.stack([np.full(400, 2e-3), np.full(400, 1e-3)])
  transfer[0, 100:200] += 6e-3
  floor = running_minimum(transfer)
  np.testing.assert_allclose(floor.floor, [2e-3, 1e-3])
  assert floor.contention.sum() == pytest.approx(0.6)


@given(st.lists(st.one_of(st.floats(0, 1), st.just(float("nan"))), min_size=1, max_size=80))
def test_transfer_is_split_exactly_and_never_negatively(values):
  transfer = np.array([values])
  floor = running_minimum(transfer)
  np.testing.assert_allclose(floor.quiet + floor.contention, transfer, atol=1e-15)
  assert not (floor.contention < 0).any()
  assert not (floor.quiet < 0).any()
