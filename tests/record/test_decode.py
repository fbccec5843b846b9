"""From events of instrumented steps to rows of the tables, and what the intake makes of their
numbers."""


import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxpace.core.plan import Plan, Timestamp
from jaxpace.core.ring_layout import DELAY_VALUE, STEP_VALUE, timestamp_tags
from jaxpace.record import columns
from jaxpace.record.ring.executions import Executions
from jaxpace.runs.run import HOST_CAUSES
from tests.record import fake_step as fake
from tests.record.ring.replayed import Replayed, rows_of


def simple_plan(*marks: Timestamp) -> Plan:
  return Plan(axis="data", ranks=1, clock="test", marks=marks, collectives=())


def events_of(plan: Plan, times: list[list[int]], steps: list[int]) -> Executions:
  """Executions with these timestamps, by the plan's; 0 where one was not taken."""
  tags = timestamp_tags(plan.marks)
  events = [event for place, (step, own) in enumerate(zip(steps, times, strict=True))
            for event in [(place, STEP_VALUE, step), (place, DELAY_VALUE, 0)]
            + [(place, tag, ns) for tag, ns in zip(tags[1:-1], own[1:-1], strict=True) if ns]]
  of, tag, ns = np.array(events, np.int64).T
  return Executions(np.arange(len(steps)), *(np.array([own[at] for own in times], np.int64)
                                             for at in (0, -1)), of, tag.astype(np.uint32), ns)


def test_every_column_of_a_known_step():
  steps, collectives, _ = rows_of(fake.PLAN, fake.executions([4, 5], rank=3), rank=3, process=1,
                                  attempt=2)
  expected = {
      "step": [4, 5], "rank": [3, 3], "process": [1, 1], "attempt": [2, 2],
      "start_ns": [fake.timestamp(4, 3, 0), fake.timestamp(5, 3, 0)],
      "end_ns": [fake.timestamp(4, 3, 7), fake.timestamp(5, 3, 7)], "forward_ns": [200_000] * 2,
      "backward_ns": [300_000] * 2, "sync_ns": [45_000] * 2, "update_ns": [60_000] * 2,
      "phase_my_loss_ns": [7_000] * 2, "gap_ns": [None, fake.PERIOD - sum(fake.DURATIONS)],
      "delay_ns": [250_000] * 2, "delay_applied_ns": [10_000] * 2, "decision_slack": [2.0, 2.5],
  }
  assert {name: values.tolist() for name, values in steps.items()} == expected
  assert {name: values.tolist() for name, values in collectives.items()} == {
      "step": [4, 5], "rank": [3, 3], "process": [1, 1], "attempt": [2, 2], "collective": [0, 0],
      "name": ["psum.grads"] * 2, "axis": ["data"] * 2, "bytes": [4096] * 2,
      "enter_ns": [fake.timestamp(4, 3, 4), fake.timestamp(5, 3, 4)],
      "exit_ns": [fake.timestamp(4, 3, 5), fake.timestamp(5, 3, 5)]}


def test_phases_that_were_not_told_apart_are_absent_and_a_stamp_not_taken_makes_null():
  plan = simple_plan(Timestamp("start", "gap"), Timestamp("phase", "compute"),
                     Timestamp("end", "update"))
  steps, _, _ = rows_of(plan, events_of(plan, [[100, 0, 300], [400, 650, 700]], [0, 1]))
  assert {name: steps[f"{name}_ns"].tolist() for name in ("compute", "update", "gap")} == {
      "compute": [None, 250], "update": [None, 50], "gap": [None, 100]}
  assert not {"forward_ns", "backward_ns", "sync_ns"} & set(steps)


def test_gap_is_carried_over_batches_but_not_over_holes():
  plan = simple_plan(Timestamp("start", "gap"), Timestamp("end", "update"))
  rows = events_of(plan, [[100, 110], [125, 140], [300, 310]], [7, 8, 10])
  for previous, first in (((6, 93), 7), ((5, 93), None), (None, None)):
    assert rows_of(plan, rows, previous=previous)[0]["gap_ns"].tolist() == [first, 15, None]


@pytest.mark.parametrize(("asked", "recorded"),
                         [(1e30, 10**18), (-1e30, -10**18), (np.inf, None), (np.nan, None)])
def test_a_delay_of_any_size_keeps_its_sign(asked, recorded):
  steps, _, _ = rows_of(fake.PLAN, fake.executions([1], delay=asked))
  assert steps["delay_ns"].tolist() == [recorded]
  assert steps["delay_applied_ns"].tolist() == [10_000]


@given(st.integers(0, 6))
def test_batching_does_not_matter(cut):
  whole, _, _ = rows_of(fake.PLAN, fake.executions(list(range(6))))
  parts = [rows_of(fake.PLAN, fake.executions(steps, first=steps.start), previous=previous)[0]
           for steps, previous in (
               (range(cut), None),
               (range(cut, 6), (cut - 1, fake.timestamp(cut - 1, 0, 7)) if cut else None)) if steps]
  joined = columns.concatenate(parts)
  assert {n: v.tolist() for n, v in joined.items()} == {n: v.tolist() for n, v in whole.items()}


def called(step: int) -> tuple:
  """What the loop says of a step."""
  return (step,) + (None,) * (len(HOST_CAUSES) - 1), {"load": step / 2}


def test_a_step_with_an_earlier_number_begins_another_attempt_and_one_with_the_same_is_left_out(
    tmp_path):
  intake = Replayed(tmp_path, fake.PLAN, ranks=(3, 5), process=1, attempt=2)
  numbers = [7, 8, 8, 9, 4, 5]
  steps, waits = intake.rows({rank: fake.executions(numbers, rank) for rank in (3, 5)},
                             list(map(called, range(6))))
  for rank in (3, 5):
    mine = steps["rank"] == rank
    assert steps["step"][mine].tolist() == [7, 8, 9, 4, 5]
    assert steps["attempt"][mine].tolist() == [2, 2, 2, 3, 3]
    gap = fake.PERIOD - sum(fake.DURATIONS)
    assert steps["gap_ns"][mine].tolist() == [None, gap, gap, None, gap]
    assert steps["host_load"][mine].tolist() == [0, 0.5, 1.5, 2, 2.5]
    assert steps[HOST_CAUSES[0].column][mine].tolist() == [0, 1, 3, 4, 5]
  assert len(waits["step"]) == 10 and not intake.intake.rows and intake.intake.last_step == 5
  later, _ = intake.rows({rank: fake.executions([6], rank, first=6) for rank in (3, 5)},
                         [called(6)])
  assert later["attempt"].tolist() == [3, 3] and None not in later["gap_ns"].tolist()


def test_a_rank_that_lost_steps_lacks_their_rows_and_no_others(tmp_path):
  intake = Replayed(tmp_path, fake.PLAN, ranks=(0, 1))
  short = fake.executions([0, 1, 2], 1).picked(np.array([True, False, True]))
  steps, _ = intake.rows({0: fake.executions([0, 1, 2]), 1: short}, [])
  assert steps["step"].tolist() == [0, 1, 2, 0, 2]
  assert steps["gap_ns"].tolist()[-1] is None
  assert vars(intake.intake.losses) == {"lost_rows": 1, "holes": 1}
