import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxpace.core.plan import Plan, Timestamp
from jaxpace.record import decode
from jaxpace.record.decode import TimestampedSteps
from jaxpace.record.intake import Batch, Intake, Losses
from jaxpace.runs.step_causes import HOST_CAUSES
from tests.record import fake_step as fake


def simple_plan(*marks: Timestamp) -> Plan:
  return Plan(axis="data", ranks=1, clock="test", marks=marks, collectives=())


def rows_of(times: list[list[int]], steps: list[int]) -> TimestampedSteps:
  zeros = np.zeros(len(steps), np.float32)
  return TimestampedSteps(np.array(steps, np.int64), np.array(times, np.int64), zeros, zeros,
                      zeros[:, None])


def test_every_column_of_a_known_step():
  steps, collectives = decode.decode(fake.timestamped([4, 5], rank=3), fake.PLAN, rank=3, process=1,
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


def test_phases_that_were_not_told_apart_are_absent_and_not_zero():
  plan = simple_plan(Timestamp("start", "gap"), Timestamp("phase", "compute"),
                     Timestamp("end", "update"))
  steps, _ = decode.decode(rows_of([[100, 350, 400]], [0]), plan, 0, 0, 0)
  assert steps["compute_ns"].tolist() == [250]
  assert steps["update_ns"].tolist() == [50]
  assert not {"forward_ns", "backward_ns", "sync_ns"} & set(steps)


def test_two_collectives_make_two_rows_a_step():
  first, = fake.PLAN.collectives
  plan = dataclasses.replace(
      simple_plan(Timestamp("start", "gap"), Timestamp("enter", "sync", 0),
                  Timestamp("exit", "sync", 0),
                  Timestamp("enter", "compute", 1), Timestamp("exit", "sync", 1),
                  Timestamp("end", "update")),
      collectives=(first, dataclasses.replace(first, slot=1, name="loss", bytes=4)))
  _, collectives = decode.decode(rows_of([[1, 2, 4, 8, 16, 32], [101, 102, 104, 108, 116, 132]],
                                         [0, 1]), plan, 0, 0, 0)
  assert collectives["step"].tolist() == [0, 0, 1, 1]
  assert collectives["name"].tolist() == ["psum.grads", "loss"] * 2
  assert collectives["enter_ns"].tolist() == [2, 8, 102, 108]
  assert collectives["exit_ns"].tolist() == [4, 16, 104, 116]


def test_a_stamp_not_taken_makes_null():
  plan = simple_plan(Timestamp("start", "gap"), Timestamp("phase", "forward"),
                     Timestamp("end", "update"))
  steps, _ = decode.decode(rows_of([[10, 0, 30], [40, 50, 70]], [0, 1]), plan, 0, 0, 0)
  assert steps["forward_ns"].tolist() == [None, 10]
  assert steps["update_ns"].tolist() == [None, 20]
  assert steps["gap_ns"].tolist() == [None, 10]


def test_gap_is_carried_over_batches_but_not_over_holes():
  plan = simple_plan(Timestamp("start", "gap"), Timestamp("end", "update"))
  rows = rows_of([[100, 110], [125, 140], [300, 310]], [7, 8, 10])
  gap = decode.decode(rows, plan, 0, 0, 0, decode.Previous(6, 93))[0]["gap_ns"]
  assert gap.tolist() == [7, 15, None]
  assert (decode.decode(rows, plan, 0, 0, 0, decode.Previous(5, 93))[0]["gap_ns"].tolist()
          == [None, 15, None])
  assert decode.decode(rows, plan, 0, 0, 0)[0]["gap_ns"].tolist() == [None, 15, None]


def test_a_delay_that_is_not_a_number_is_null():
  own = fake.timestamped([1])._replace(delay=np.array([np.nan], np.float32))
  steps, _ = decode.decode(own, fake.PLAN, 0, 0, 0)
  assert steps["delay_ns"].tolist() == [None]
  assert steps["delay_applied_ns"].tolist() == [10_000]


@pytest.mark.parametrize(("asked", "recorded"),
                         [(1e30, 10**18), (-1e30, -10**18), (np.inf, None)])
def test_a_delay_of_any_size_keeps_its_sign(asked, recorded):
  own = fake.timestamped([1])._replace(delay=np.array([asked], np.float32))
  steps, _ = decode.decode(own, fake.PLAN, 0, 0, 0)
  assert steps["delay_ns"].tolist() == [recorded]


@given(st.integers(0, 6))
def test_batching_does_not_matter(cut):
  whole, _ = decode.decode(fake.timestamped(list(range(6))), fake.PLAN, 0, 0, 0)
  first, _ = decode.decode(fake.timestamped(list(range(cut))), fake.PLAN, 0, 0, 0)
  previous = decode.Previous(cut - 1, fake.timestamp(cut - 1, 0, 7)) if cut else None
  second, _ = decode.decode(fake.timestamped(list(range(cut, 6))), fake.PLAN, 0, 0, 0, previous)
  joined = decode.concatenate([first, second])
  assert {n: v.tolist() for n, v in joined.items()} == {n: v.tolist() for n, v in whole.items()}


def test_host_columns_join_by_step():
  columns = {"step": np.array([3, 4, 5, 6]), "rank": np.zeros(4, np.int32)}
  host = {"step": np.array([4, 3, 6]),
          "cpu_ns": np.ma.masked_array([40, 30, 60], [False, False, True])}
  assert decode.join_host(columns, host)["cpu_ns"].tolist() == [30, 40, None, None]
  assert "cpu_ns" not in decode.join_host(columns,
                                          {"step": np.zeros(0, np.int64), "cpu_ns": np.zeros(0)})


def batch(numbers, steps, ranks=(3, 5)):
  """Steps that all of these ranks ran, with what the host did in each."""
  own = [(np.array(numbers), fake.timestamped(steps, rank)) for rank in ranks]
  host = {number: ((number,) + (None,) * (len(HOST_CAUSES) - 1), {"load": number / 2})
          for number in numbers}
  return Batch(fake.PLAN, ranks, [number for number, _ in own], [each for _, each in own], host)


def test_a_step_with_an_earlier_number_begins_another_attempt_and_one_with_the_same_is_left_out():
  intake = Intake(process=1, attempt=2, losses=Losses())
  intake.plan_of(batch([0], [7]))
  intake.add(batch([0, 1, 2], [7, 8, 8]))
  assert intake.rows == 4 and intake.last_step == 8
  intake.add(batch([3, 4, 5], [9, 4, 5]))
  steps, waits = intake.decode(fake.PLAN)
  for rank in (3, 5):
    mine = steps["rank"] == rank
    assert steps["step"][mine].tolist() == [7, 8, 9, 4, 5]
    assert steps["attempt"][mine].tolist() == [2, 2, 2, 3, 3]
    gap = fake.PERIOD - sum(fake.DURATIONS)
    assert steps["gap_ns"][mine].tolist() == [None, gap, gap, None, gap]
    assert steps["host_load"][mine].tolist() == [0, 0.5, 1.5, 2, 2.5]
    assert steps[HOST_CAUSES[0].column][mine].tolist() == [0, 1, 3, 4, 5]
  assert len(waits["step"]) == 10 and not intake.rows
  intake.add(batch([6], [6]))
  later, _ = intake.decode(fake.PLAN)
  assert later["attempt"].tolist() == [3, 3] and None not in later["gap_ns"].tolist()


def test_a_rank_that_lost_steps_lacks_their_rows_and_no_others():
  intake = Intake(process=0, attempt=0, losses=Losses())
  whole, short = fake.timestamped([0, 1, 2], 0), fake.timestamped([0, 2], 1)
  intake.plan_of(batch([3], [3], ranks=(0, 1)))
  intake.add(Batch(fake.PLAN, [0, 1], [np.arange(3), np.array([0, 2])], [whole, short], {}))
  steps, _ = intake.decode(fake.PLAN)
  assert steps["step"].tolist() == [0, 1, 2, 0, 2]
  assert steps["gap_ns"].tolist()[-1] is None
