"""Paired comparisons: intervals that hold as often as they say, and how many rounds a margin
takes."""

from __future__ import annotations

import math
import statistics

import numpy as np
import pytest

from experiments.lib.paired import (
  Estimate,
  estimate,
  ratio_of_means,
  rounds_needed,
)


def test_a_ratio_of_means_pairs_rounds() -> None:
  rng = np.random.default_rng(0)
  base = rng.exponential(1.0, 400)
  exact = ratio_of_means(1.25 * base, base)
  assert (exact.value, exact.low, exact.high) == pytest.approx((1.25, 1.25, 1.25))
  apart = ratio_of_means(rng.permutation(base) * 1.25, base)
  assert apart.value == pytest.approx(1.25) and apart.low < 1.2 and apart.high > 1.3


def test_an_interval_is_students() -> None:
  found = estimate(np.array([1.0, 2.0, 4.0, 5.0]))
  half = 3.182446 * math.sqrt(10 / 3) / 2  # t of 3 degrees of freedom at 97.5 %, from a table
  assert (found.value, found.low, found.high) == pytest.approx((3.0, 3 - half, 3 + half), abs=1e-5)
  assert found.rounds == 4
  assert found.to_json()[0] == 3.0
  alone = estimate(np.array([2.0]))
  assert alone.value == 2.0 and alone.low == -math.inf and alone.high == math.inf


@pytest.mark.parametrize(("half", "rounds", "margin"),
                         [(0.01, 100, 0.005), (0.002, 50, 0.005), (3.7, 80, 0.5)])
def test_with_the_rounds_needed_four_runs_in_five_show_it(half: float, rounds: int,
                                                          margin: float) -> None:
  needed = rounds_needed(Estimate(0.0, -half, half), rounds, margin)
  error = half / 1.96 * (rounds / needed) ** 0.5
  shown = statistics.NormalDist(0.0, error).cdf(margin - 1.96 * error)
  assert shown == pytest.approx(0.8, abs=0.02)
