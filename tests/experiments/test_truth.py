"""The experiment that looks for known delays: its comparisons on made-up times, and a small run of
it."""

from __future__ import annotations

import hypothesis
import jax
import numpy as np
import pytest
from hypothesis import strategies as st
from jax.sharding import AxisType

from experiments.lib import lateness_found, measured
from experiments.lib.injection import PLACES, LateJob, fault
from experiments.measure import truth_processes, truth_steps, truth_tables


def test_the_tolerance_is_the_larger_of_two() -> None:
  np.testing.assert_allclose(lateness_found.tolerance(np.array([1.0, 6.0, 100.0])), [0.3, 0.3, 5.0])
  assert lateness_found.agrees(1.29, 1.0) and not lateness_found.agrees(1.31, 1.0)
  assert lateness_found.agrees(104.9, 100.0) and not lateness_found.agrees(94.9, 100.0)


def test_errors_are_counted_step_by_step() -> None:
  found = lateness_found.compare(np.array([10.2, 10.4, 9.0, 10.0]), np.full(4, 10.0))
  assert found["steps"] == 4 and found["within"] == 0.75
  assert found["median_error_ms"] == pytest.approx(0.1)
  assert found["p95_abs_error_ms"] == pytest.approx(np.percentile([0.2, 0.4, 1.0, 0.0], 95))


@hypothesis.given(st.integers(2, 6), st.integers(0, 5), st.floats(0, 50))
def test_lateness_against_the_others_is_free_of_what_all_share(ranks: int, late: int,
                                                               shared: float) -> None:
  late %= ranks
  rng = np.random.default_rng(ranks)
  values = rng.normal(5, 1, (ranks, 7))
  who = np.full(7, late)
  expected = values[late] - np.median(np.delete(values, late, axis=0), axis=0)
  np.testing.assert_allclose(lateness_found.against_others(values, who), expected)
  np.testing.assert_allclose(lateness_found.against_others(values + shared, who), expected,
                             atol=1e-9)


def test_a_delay_is_found_where_it_was_put() -> None:
  rng = np.random.default_rng(0)
  asked = rng.permutation([0.0] * 30 + [2.0] * 10 + [50.0] * 10)
  slept = np.where(asked > 0, asked + 0.1, 0)
  arrivals = 3 + rng.normal(0, 0.02, (3, 50)) + np.array([[0.0], [0.7], [0.2]])
  arrivals[1] += slept
  arrivals[:, 0] = np.nan
  result = lateness_found.per_step(arrivals, 1, asked, slept)
  assert list(result["delays"]) == ["2", "50"]
  for delay in (2.0, 50.0):
    entry = result["delays"][f"{delay:g}"]
    assert entry["slept_ms"] == pytest.approx(delay + 0.1)
    for baseline in ("others", "own"):
      assert entry[baseline]["within"] == 1 and abs(entry[baseline]["median_error_ms"]) < 0.05
  # Another rank shows nothing of it.
  assert lateness_found.per_step(arrivals, 0, asked, slept)["delays"]["50"]["own"]["within"] == 0
  columns = {"forward": 1 + np.stack([slept * (r == 1) for r in range(3)]),
             "sync": np.full((3, 50), 2.0)}
  shown = lateness_found.where_it_shows(columns, 1, asked, slept)
  assert shown == {"forward": pytest.approx(1), "sync": pytest.approx(0)}


def test_blocks_compare_entries_on_one_clock_with_arrivals() -> None:
  steps = 40
  starts = np.arange(steps) * 100.0
  enters = starts + np.array([[1.0], [21.0], [1.5]])
  arrivals = np.broadcast_to(np.array([[1.0], [20.8], [1.4]]), (3, steps))
  entry = lateness_found.per_block(enters, arrivals, np.full(steps, 20.0), 1)
  assert entry == {"steps": steps, "slept_ms": 20.0, "found_ms": pytest.approx(20.8 - 1.2),
                   "true_ms": pytest.approx(21.0 - 1.25)}


def test_the_schedule_is_the_same_everywhere_and_complete() -> None:
  first = truth_processes.blocks(4, [1.0, 5.0])
  assert first == truth_processes.blocks(4, [1.0, 5.0])
  assert {(b.where, b.delay_ms) for b in first} == {
      (where, delay) for where in ("forward", "update", "host") for delay in (0.0, 1.0, 5.0)}
  assert all(0 <= block.rank < 4 for block in first)


def test_what_ranks_were_told_is_compared_with_their_own_stamps() -> None:
  arrivals = np.array([[np.nan, 2.0, 3.0], [np.nan, 5.0, 6.0]])
  told = arrivals.T.copy()
  same = truth_processes._seen([{"seen": told}, {"seen": told}], arrivals)
  assert (same == {"others_arrivals_seen": 4, "others_arrivals_unknown": 0,
                   "largest_relative_difference": 0})
  wrong = told.copy()
  wrong[2, 1] = 6.6  # what rank 0 was told of rank 1
  assert truth_processes._seen([{"seen": wrong}, {"seen": told}], arrivals)[
      "largest_relative_difference"] == pytest.approx(0.1)
  assert truth_processes._seen([{"seen": told},
                                {"seen": wrong}], arrivals)["largest_relative_difference"] == 0
  alone = [{"seen": np.where(np.arange(2) == rank, told, np.nan)} for rank in range(2)]
  assert truth_processes._seen(alone, arrivals) == {
      "others_arrivals_seen": 0, "others_arrivals_unknown": 4, "largest_relative_difference": None}


@pytest.mark.parametrize("place", PLACES)
def test_only_the_chosen_rank_sleeps_in_the_chosen_place(place: str) -> None:
  mesh = jax.make_mesh((2,), ("data",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2])
  job = LateJob(mesh, clock="auto", rows=8, share=True)
  slept = np.array(job.run(fault(place, 1, 4e-3)))
  assert slept.shape == (2, 3)
  assert slept[1, PLACES.index(place)] >= 4e-3 * 0.999
  slept[1, PLACES.index(place)] = 0
  np.testing.assert_array_equal(slept, 0)
  np.testing.assert_array_equal(np.asarray(job.run(fault())), 0)


@pytest.mark.parametrize("place", PLACES)
def test_a_small_run_finds_its_delays_in_their_column(place: str) -> None:
  found = truth_steps.one_process(place, 2, "auto", [40.0], 5)
  shown = found["shows_in"]
  assert max(shown, key=lambda name: shown[name]) == place
  assert 0.9 < shown[place] < 1.5
  entry = found["delays"]["40"]
  assert entry["slept_ms"] >= 40 * 0.999
  # Loose: this is no measurement. On the next step's arrival after an update, all ranks of one
  # process wait.
  assert abs(entry["own"]["median_error_ms"]) < 20
  lines = "\n".join(truth_tables.markdown({**measured.circumstances("x"), "steps": [found],
                                           "places": [found]}))
  assert "| 2 |" in lines and "## What falls short" in lines
