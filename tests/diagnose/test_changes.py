"""Change-points where levels change, dated to the step, and none where only noise does."""

import numpy as np
import pytest

from jaxpace.diagnose.episodes import SHORTEST, change_points, long_run_deviation
from jaxpace.diagnose.lateness import series_changes
from tests.diagnose.synthetic import case_of, run_of
from tests.quick import long
from tests.synthetic.synthetic_runs import SyntheticJob


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


@pytest.mark.parametrize("pause", [None, 0, 1, -3, -1])
def test_a_level_is_dated_to_the_step_and_a_single_pause_is_none(pause):
  """A tenth more from the fourth of ten steps on; a pause of a hundred times that would make the
  better split."""
  run, _ = run_of(SyntheticJob(ranks=2, steps=600, processes=2, noise=0.01))
  selected = case_of(run).selected
  inside = run.steps[selected.within(9, 11)]
  begin = inside[3]
  values = 1.0 + 0.1 * (run.steps >= begin) + 0.005 * np.random.default_rng(0).standard_normal(600)
  if pause is not None:
    values[inside[pause]] += 10
  assert series_changes(run, selected, values, 10, selected.blocks) == (begin, None)
