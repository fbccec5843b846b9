"""Sequences evened out over ranks: permutations, against brute force and the sizes that were
promised."""

import itertools

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st

import jaxpace
from tests.quick import examples

pytestmark = pytest.mark.filterwarnings("ignore:jaxpace.balance gains nothing")


def last(costs, order, ranks, speeds=None):
  loads = np.asarray(costs, float)[order].reshape(ranks, -1).sum(axis=1)
  return (loads / (1 if speeds is None else np.asarray(speeds))).max()


@pytest.mark.parametrize(("ranks", "each", "drawn"), [(8, 16, 1.4), (64, 16, 1.8), (8, 4, 1.8)])
def test_log_normal_lengths_as_even_as_the_longest_allows(ranks, each, drawn):
  """Max over mean load. No rank is done before the longest sequence and the shortest others that go
  with it."""
  rng = np.random.default_rng(0)
  before, excess = [], []
  for _ in range(12):
    costs = rng.lognormal(0, 1, ranks * each)
    mean = costs.sum() / ranks
    before.append(last(costs, np.arange(len(costs)), ranks) / mean)
    bound = max(mean, costs.max() + np.sort(costs)[:each - 1].sum())
    excess.append(last(costs, jaxpace.balance(costs, ranks), ranks) / bound)
  assert np.mean(before) > drawn and np.mean(excess) < 1.03 and min(excess) > 1 - 1e-9


@hypothesis.given(st.lists(st.integers(0, 50), min_size=6, max_size=6),
                  st.sampled_from([None, (1.0, 1.0), (1.0, 2.0), (3.0, 1.0)]))
@hypothesis.settings(max_examples=examples(80))
def test_near_the_best_of_all_equal_parts(costs, speeds):
  order = jaxpace.balance(costs, 2, speeds)
  assert sorted(order.tolist()) == list(range(6))
  every = [last(costs, np.array([*first, *(set(range(6)) - set(first))]), 2, speeds)
           for first in itertools.combinations(range(6), 3)]
  assert last(costs, order, 2, speeds) <= min(every) * 1.17 + 1e-9
  assert last(costs, order, 2, speeds) <= last(costs, np.arange(6), 2, speeds) * (1 + 1e-9)


@hypothesis.given(st.lists(st.floats(0, 1e3), min_size=1, max_size=24), st.integers(1, 5),
                  st.booleans())
@hypothesis.settings(max_examples=examples(60))
def test_parts_of_other_sizes_hold_every_sequence_once(costs, ranks, uneven):
  speeds = np.arange(1, ranks + 1) if uneven else None
  parts = jaxpace.balance(costs, ranks, speeds, equal=False)
  assert len(parts) == ranks and sorted(np.concatenate(parts).tolist()) == list(range(len(costs)))
  # Graham's bound for longest first, of machines that are alike.
  if not uneven:
    best = max(sum(costs) / ranks, max(costs))
    assert max(np.asarray(costs)[part].sum() for part in parts) <= best * (4 / 3 + 1) + 1e-6


def test_costs_from_measured_steps():
  rng = np.random.default_rng(1)
  steps = [rng.integers(10, 2000, rng.integers(1, 9)) for _ in range(60)]
  seconds = np.array([sum(1e-3 + 2e-6 * n + 3e-9 * n * n for n in step) for step in steps])
  costs = jaxpace.fit_costs(steps, seconds)
  np.testing.assert_allclose(costs, (1e-3, 2e-6, 3e-9), rtol=1e-6)
  np.testing.assert_allclose(costs([0, 1000]), [1e-3, 1e-3 + 2e-3 + 3e-3])
  noisy = jaxpace.fit_costs(steps, seconds * np.exp(rng.normal(0, 0.02, 60)))
  lengths = np.array([50, 500, 1500])
  np.testing.assert_allclose(noisy(lengths), costs(lengths), rtol=0.15)
  linear = jaxpace.fit_costs(steps, [step.sum() * 1e-6 for step in steps])
  assert linear.square == 0 and linear.each <= 1e-9
  with pytest.raises(ValueError, match="one time a step"):
    jaxpace.fit_costs(steps, seconds[1:])


def test_what_is_refused():
  for costs, ranks, speeds, message in (
      ([1, 2, 3], 2, None, "3 sequences don't divide among 2 ranks"),
      ([1, -2], 2, None, "none below zero"), ([1, np.nan], 2, None, "none below zero"),
      ([1, 2], 2, [1], "speeds must be 2 numbers"), ([1, 2], 2, [1, 0], "speeds must be 2 numbers"),
      ([1, 2], 0, None, "ranks=0"), (["a", "b"], 2, None, "costs must be a list of numbers"),
      ([[1], [2, 3]], 2, None, "costs must be a list of numbers"),
      ([1, 2], 2, [1j, 1], "speeds must be a list of numbers")):
    with pytest.raises(ValueError, match=message):
      jaxpace.balance(costs, ranks, speeds)
