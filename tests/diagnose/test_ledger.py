"""Blame along a chain of groups: whoever is late is charged, not whoever waited for it before."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxpace.diagnose.groups import RunGroups, join_groups, step_through
from jaxpace.diagnose.ledger import charges
from jaxpace.runs.groups import RankGroups
from tests.quick import examples
from tests.synthetic.synthetic_groups import meet

TENSOR, DATA = [[0, 1], [2, 3]], [[0, 2], [1, 3]]


def groups_of(groups: list[list[list[int]]], ranks: int) -> RunGroups:
  """Who meets in collectives of these groups."""
  of = []
  for some in groups:
    own = np.full(ranks, -1, np.int64)
    for number, members in enumerate(some):
      own[members] = number
    of.append(RankGroups(own))
  return join_groups(tuple(of))


def blame(groups: list[list[list[int]]], busy: np.ndarray,
          adjacent: bool = True) -> tuple[np.ndarray, np.ndarray]:
  """[R] seconds charged to each rank, and [C, R, K] what each waits for others."""
  found, ranks = groups_of(groups, busy.shape[1]), busy.shape[1]
  enter, leave = meet(busy, np.full(busy.shape, 1e-3), groups)
  wait = leave - enter
  valid = np.ones(busy.shape[1:], bool)
  waits = step_through(found, busy, wait, valid)
  total = np.zeros(ranks)
  for charge, waited in zip(charges(found, waits, busy, np.full(busy.shape[2], adjacent)), waits,
                            strict=True):
    whole = sum(charge.seconds)
    np.testing.assert_allclose(whole, waited.early, atol=1e-12)
    assert min(values.min() for values in charge.seconds) >= 0
    total += charge.by_culprit(ranks, np.ones(busy.shape[2])).sum(axis=1)
  return total, np.array([waited.early for waited in waits])


def even(slots: int, ranks: int, size: int) -> np.ndarray:
  return np.full((slots, ranks, size), 5e-3)


def test_a_victim_that_a_hair_of_chance_made_wait_for_its_partner_is_not_blamed():
  groups = [TENSOR, TENSOR, DATA, [[0, 1, 2, 3]]]
  busy = even(4, 4, 1)
  busy[0, 1] += 8e-3  # late in its tensor group: 0 waits for it
  busy[1, 0] += 5e-5  # then it waits for 0 by a hair
  total, early = blame(groups, busy)
  # 0 waits 8 ms, 2 and 3 wait for 0 and 1 in the data groups: all of that is 1's.
  assert early.sum() == pytest.approx(3 * 8e-3, rel=0.02)
  assert total[1] == pytest.approx(3 * 8e-3, rel=0.01)
  assert total[2:].max() < 1e-9 and total[0] < 3e-4


def test_what_made_both_late_makes_neither_wait_for_the_other():
  groups = [TENSOR, DATA, TENSOR, DATA, [[0, 1, 2, 3]]]
  busy = even(5, 4, 1)
  busy[0, 1] += 8e-3
  busy[2, 2] += 1e-3  # when all are 8 ms late already
  total, _ = blame(groups, busy)
  assert total[1] == pytest.approx(3 * 8e-3, rel=1e-6)
  assert total[2] == pytest.approx(3 * 1e-3, rel=1e-6)


def test_lateness_at_the_end_of_a_step_is_charged_in_the_next():
  groups = [DATA, TENSOR]  # nothing joins all at once
  busy = even(2, 4, 3)
  busy[1, 1, 0] += 8e-3
  total, early = blame(groups, busy)
  assert early[0, :, 1].sum() == pytest.approx(2 * 8e-3)  # 2 and 3 wait in the next step
  assert total[1] == pytest.approx(early.sum(), rel=1e-9)


@settings(max_examples=examples(60), deadline=None)
@given(st.data())
def test_one_late_rank_is_charged_with_all_that_is_waited(data):
  shape = data.draw(st.sampled_from([(2, 2, 1), (2, 2, 2), (1, 4, 2), (3, 2, 1)]))
  mesh = np.arange(int(np.prod(shape))).reshape(shape)
  axes = [np.moveaxis(mesh, axis, -1).reshape(-1, shape[axis]).tolist()
          for axis in range(3) if shape[axis] > 1]
  groups = data.draw(st.lists(st.sampled_from(axes), min_size=2, max_size=8))
  groups.append([list(range(mesh.size))])
  busy = even(len(groups), mesh.size, 2)
  busy += np.array(data.draw(st.lists(st.floats(0, 5e-3), min_size=len(groups),
                                      max_size=len(groups))))[:, None, None]
  rank, slot = data.draw(st.integers(0, mesh.size - 1)), data.draw(st.integers(0, len(groups) - 1))
  busy[slot, rank] += 7e-3
  total, early = blame(groups, busy, adjacent=data.draw(st.booleans()))
  assert total[rank] == pytest.approx(early.sum(), rel=1e-9)
  assert early.sum() == pytest.approx(2 * 7e-3 * (mesh.size - 1), rel=1e-9)
