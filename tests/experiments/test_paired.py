"""Paired comparisons: the interval of a ratio of means, and how many rounds a margin takes."""

from __future__ import annotations

import statistics

import numpy as np
import pytest

from experiments.paired import Estimate, ratio_of_means, rounds_needed


def test_a_ratio_of_means_pairs_rounds() -> None:
  rng = np.random.default_rng(0)
  base = rng.exponential(1.0, 400)
  exact = ratio_of_means(1.25 * base, base)
  assert (exact.median, exact.low, exact.high) == pytest.approx((1.25, 1.25, 1.25))
  apart = ratio_of_means(rng.permutation(base) * 1.25, base)
  assert apart.median == pytest.approx(1.25) and apart.low < 1.2 and apart.high > 1.3


@pytest.mark.parametrize(("half", "rounds", "margin"), [(0.01, 100, 0.005), (0.002, 50, 0.005), (3.7, 80, 0.5)])
def test_with_the_rounds_needed_four_runs_in_five_show_it(half: float, rounds: int, margin: float) -> None:
  needed = rounds_needed(Estimate(0.0, -half, half), rounds, margin)
  error = half / 1.96 * (rounds / needed) ** 0.5
  shown = statistics.NormalDist(0.0, error).cdf(margin - 1.96 * error)
  assert shown == pytest.approx(0.8, abs=0.02)
