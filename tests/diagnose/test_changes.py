"""Change-points where levels change, and none where only noise does."""

import numpy as np
import pytest

from jaxpace.diagnose.episodes import SHORTEST, change_points, long_run_deviation
from tests.quick import long


def brute(series, penalty):
  """Best partition by trying all of them: least squares, a price a piece."""
  n, best, at = len(series), [0.0] + [np.inf] * len(series), [()] * (len(series) + 1)
  best[0] = -penalty
  for end in range(SHORTEST, n + 1):
    for begin in range(end - SHORTEST + 1):
      part = series[begin:end]
      cost = best[begin] + ((part - part.mean())**2).sum() + penalty
      if cost < best[end]:
        best[end], at[end] = cost, (*at[begin], begin)
  return [p for p in at[n] if p]


@pytest.mark.parametrize("seed", range(2))
def test_the_partition_is_the_best_of_all(seed):
  from jaxpace.diagnose.episodes import _partition
  random = np.random.default_rng(seed)
  series = random.normal(size=(3, 30)) + np.repeat(random.normal(0, 3, (3, 3)), 10, axis=1)
  for penalty in (5.0, 20.0):
    assert _partition(series, penalty) == [brute(row, penalty) for row in series]


@pytest.mark.parametrize("blocks", [24, 60, 256])
def test_a_change_is_found_where_it_is(blocks):
  random = np.random.default_rng(blocks)
  series = random.normal(size=(8, blocks))
  series[3, blocks // 2:] += 6
  found = change_points(series)
  assert abs(found[3][0] - blocks // 2) <= 1
  assert all(not points for i, points in enumerate(found) if i != 3)


@pytest.mark.parametrize("noise", ["normal", "exponential", "student", "wandering"])
@pytest.mark.parametrize("blocks", [60, *long(256)])
def test_noise_seldom_has_a_change(noise, blocks):
  """Jobs of 8 ranks with any change-point: under 5 in 100 (nominal 1 for Gaussian noise; 0 to 1
  were measured)."""
  random = np.random.default_rng(1)
  alarms = 0
  for _ in range(60):
    series = {"normal": random.normal, "exponential": random.exponential}.get(noise, random.normal)(
        size=(8, blocks))
    if noise == "student":
      series = random.standard_t(3, (8, blocks))
    if noise == "wandering":
      for b in range(1, blocks):
        series[:, b] += 0.5 * series[:, b - 1]
    alarms += any(change_points(series))
  assert alarms <= 3


def test_the_noise_is_that_of_long_means():
  """AR(0.5): the long-run deviation is 1 / (1 - 0.5) = 2, not the 1.15 of single values. It errs
  upwards."""
  random = np.random.default_rng(0)
  series = random.normal(size=(20, 4000))
  for b in range(1, 4000):
    series[:, b] += 0.5 * series[:, b - 1]
  found = long_run_deviation(series)
  assert found.min() > 1.9
  assert np.median(found) < 4


def test_a_single_block_however_far_off_is_no_change():
  series = np.random.default_rng(0).normal(size=(1, 80))
  series[0, 40] += 1000
  assert change_points(series) == [[]]


def test_what_is_missing_is_no_change():
  series = np.random.default_rng(0).normal(size=(2, 80))
  series[0, 20:30] = np.nan
  series[1] = np.nan
  assert change_points(series) == [[], []]
