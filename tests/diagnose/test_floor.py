"""The floor of a transfer."""

import types

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxpace.costs.fabric_file import ALL_REDUCE, RING, Cost, Estimate, Level, MeasuredFabric
from jaxpace.diagnose import floor
from jaxpace.diagnose.diagnose import add, count, diagnose
from jaxpace.diagnose.floor import find_floor, running_minimum
from jaxpace.diagnose.words.notes import Note
from tests.diagnose.synthetic import run_of
from tests.diagnose.test_contention import with_bytes
from tests.lib.said import numbers, only
from tests.synthetic.synthetic_runs import SyntheticJob


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


@pytest.mark.parametrize("plan, joined",
                         [({"ranks": 2}, 2), ({}, 4), ({"ranks": 0}, 4), ({"ranks": "2"}, 4)])
def test_a_known_fabric_is_asked_for_the_ranks_that_a_collective_joins(plan, joined):
  """On a data x model mesh of four devices the sums join two."""
  run = with_bytes(run_of(SyntheticJob(ranks=4, steps=40))[0], 4096)
  costs = {count: Cost(Estimate(count * 1e-9, 0, 0), Estimate(0.0, 0.0, 0.0), RING)
           for count in (2, 4)}
  fabric = MeasuredFabric(tuple(Level(str(count), count, None, {ALL_REDUCE: cost})
                                for count, cost in costs.items()),
                          "made up")
  run.info["plan"] = {**(run.info.get("plan") or {}), **plan}
  seconds = costs[joined].seconds(ALL_REDUCE, joined, 4096)
  totals = add(run, count(run)).totals
  totals.group_transfer[:] = 1.0
  floor = find_floor(run, fabric, totals)
  np.testing.assert_allclose(floor.floor, seconds)
  # What the run itself has had is believed before a fabric that says it can't be.
  totals.group_transfer[:] = seconds / 2
  quicker = find_floor(run, fabric, totals)
  np.testing.assert_allclose(quicker.floor, seconds / 2)


def test_the_note_on_a_floor_that_says_nothing_counts_the_ranks_that_were_asked_for():
  run = with_bytes(run_of(SyntheticJob(ranks=4, steps=200))[0], 4096)
  run.info["plan"] = {**(run.info.get("plan") or {}), "ranks": 2}
  one = MeasuredFabric((Level("one", 1, None, {}),), "made up")
  assert numbers(only(diagnose(run, fabric=one).notes, Note.FABRIC_UNUSED)) == [2]


def test_a_collective_without_any_transfer_has_no_mean_and_no_warning():
  totals = types.SimpleNamespace(collective_of=np.array([0, 0, 1]), slow=np.full((3, 4), 8.0))
  own = types.SimpleNamespace(floor=np.array([1.0, 3.0, np.nan]),
                              contention=np.array([[1.0] * 4, [1.0] * 4, [np.nan] * 4]))
  quiet, contended = floor._slow(totals, own)
  # 1 above the mean of 2; what is slow at a step's end is waited for in the next, too.
  np.testing.assert_allclose(contended[:, 1:], [[8.0] * 3, [8.0 * 2 / 3] * 3, [0.0] * 3])
  np.testing.assert_allclose(quiet + contended, 8.0)
