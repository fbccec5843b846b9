import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxpace.core import ring
from jaxpace.core.plan import Mark, Plan
from jaxpace.trace import decode
from jaxpace.trace.host_causes import HOST_CAUSES
from jaxpace.trace.intake import Batch, Intake, Losses
from tests.trace import fake_step as fake


def simple_plan(*marks: Mark) -> Plan:
  return Plan(axis="data", ranks=1, clock="test", marks=marks, collectives=())


def rows_of(times: list[list[int]], steps: list[int]) -> np.ndarray:
  rows = np.zeros((len(times), fake.WIDTH), np.uint32)
  for row, stamps, step in zip(rows, times, steps, strict=True):
    row[ring.STEP], row[ring.FLAGS] = step, ring.VALID
    for i, time in enumerate(stamps):
      row[ring.STAMPS + 2 * i:ring.STAMPS + 2 * i + 2] = time >> 32, time & 0xFFFFFFFF
  return rows


def test_every_column_of_a_known_step():
  steps, collectives = decode.decode(fake.numpy_rows([4, 5], rank=3), fake.PLAN, rank=3, process=1,
                                     attempt=2)
  expected = {
      "step": [4, 5], "rank": [3, 3], "process": [1, 1], "attempt": [2, 2],
      "start_ns": [fake.stamp(4, 3, 0), fake.stamp(5, 3, 0)],
      "end_ns": [fake.stamp(4, 3, 7), fake.stamp(5, 3, 7)], "forward_ns": [200_000] * 2,
      "backward_ns": [300_000] * 2, "sync_ns": [45_000] * 2, "update_ns": [60_000] * 2,
      "phase_my_loss_ns": [7_000] * 2, "gap_ns": [None, fake.PERIOD - sum(fake.DURATIONS)],
      "delay_ns": [250_000] * 2, "delay_applied_ns": [125_000] * 2, "decision_slack": [2.0, 2.5],
  }
  assert {name: values.tolist() for name, values in steps.items()} == expected
  assert {name: values.tolist() for name, values in collectives.items()} == {
      "step": [4, 5], "rank": [3, 3], "process": [1, 1], "attempt": [2, 2], "collective": [0, 0],
      "name": ["psum.grads"] * 2, "axis": ["data"] * 2, "bytes": [4096] * 2,
      "enter_ns": [fake.stamp(4, 3, 4), fake.stamp(5, 3, 4)],
      "exit_ns": [fake.stamp(4, 3, 5), fake.stamp(5, 3, 5)]}


def test_phases_that_were_not_told_apart_are_absent_and_not_zero():
  plan = simple_plan(Mark("start", "gap"), Mark("phase", "compute"), Mark("end", "update"))
  steps, _ = decode.decode(rows_of([[100, 350, 400]], [0]), plan, 0, 0, 0)
  assert steps["compute_ns"].tolist() == [250]
  assert steps["update_ns"].tolist() == [50]
  assert not {"forward_ns", "backward_ns", "sync_ns"} & set(steps)


def test_phases_that_occur_several_times_add_up():
  plan = simple_plan(Mark("start", "gap"), Mark("phase", "forward"), Mark("phase", "backward"),
                     Mark("phase", "forward"), Mark("end", "backward"))
  steps, _ = decode.decode(rows_of([[10, 11, 13, 17, 25]], [0]), plan, 0, 0, 0)
  assert steps["forward_ns"].tolist() == [1 + 4]
  assert steps["backward_ns"].tolist() == [2 + 8]


def test_two_collectives_make_two_rows_a_step():
  first, = fake.PLAN.collectives
  plan = dataclasses.replace(
      simple_plan(Mark("start", "gap"), Mark("enter", "sync", 0), Mark("exit", "sync", 0),
                  Mark("enter", "compute", 1), Mark("exit", "sync", 1), Mark("end", "update")),
      collectives=(first, dataclasses.replace(first, slot=1, name="loss", bytes=4)))
  _, collectives = decode.decode(rows_of([[1, 2, 4, 8, 16, 32], [101, 102, 104, 108, 116, 132]],
                                         [0, 1]), plan, 0, 0, 0)
  assert collectives["step"].tolist() == [0, 0, 1, 1]
  assert collectives["name"].tolist() == ["psum.grads", "loss"] * 2
  assert collectives["enter_ns"].tolist() == [2, 8, 102, 108]
  assert collectives["exit_ns"].tolist() == [4, 16, 104, 116]


def test_a_stamp_not_taken_makes_null():
  plan = simple_plan(Mark("start", "gap"), Mark("phase", "forward"), Mark("end", "update"))
  steps, _ = decode.decode(rows_of([[10, 0, 30], [40, 50, 70]], [0, 1]), plan, 0, 0, 0)
  assert steps["forward_ns"].tolist() == [None, 10]
  assert steps["update_ns"].tolist() == [None, 20]
  assert steps["gap_ns"].tolist() == [None, 10]
  shifted, _ = decode.decode(rows_of([[10, 0, 30], [40, 50, 70]], [0, 1]), plan, 0, 0, 0, shift=5)
  assert shifted["forward_ns"].tolist() == [None, 10] and shifted["end_ns"].tolist() == [35, 75]


def test_gap_is_carried_over_batches_but_not_over_holes():
  plan = simple_plan(Mark("start", "gap"), Mark("end", "update"))
  rows = rows_of([[100, 110], [125, 140], [300, 310]], [7, 8, 10])
  gap = decode.decode(rows, plan, 0, 0, 0, decode.Previous(6, 93))[0]["gap_ns"]
  assert gap.tolist() == [7, 15, None]
  assert (decode.decode(rows, plan, 0, 0, 0, decode.Previous(5, 93))[0]["gap_ns"].tolist()
          == [None, 15, None])
  assert decode.decode(rows, plan, 0, 0, 0)[0]["gap_ns"].tolist() == [None, 15, None]


def test_a_delay_that_is_not_a_number_is_null():
  rows = fake.numpy_rows([1])
  rows[0, ring.DELAY_ASKED] = np.array(np.nan, np.float32).view(np.uint32)
  steps, _ = decode.decode(rows, fake.PLAN, 0, 0, 0)
  assert steps["delay_ns"].tolist() == [None]
  assert steps["delay_applied_ns"].tolist() == [125_000]


@pytest.mark.parametrize(("asked", "recorded"),
                         [(1e30, 10**18), (-1e30, -10**18), (1e9, 10**18), (np.inf, None)])
def test_a_delay_of_any_size_keeps_its_sign(asked, recorded):
  rows = fake.numpy_rows([1])
  rows[0, ring.DELAY_ASKED] = np.array(asked, np.float32).view(np.uint32)
  steps, _ = decode.decode(rows, fake.PLAN, 0, 0, 0)
  assert steps["delay_ns"].tolist() == [recorded]


def test_rows_too_narrow_for_the_plan():
  with pytest.raises(ValueError, match="another pace state"):
    decode.decode(fake.numpy_rows([1])[:, :ring.STAMPS + 4], fake.PLAN, 0, 0, 0)


def test_no_rows():
  steps, collectives = decode.decode(np.zeros((5, fake.WIDTH), np.uint32), fake.PLAN, 0, 0, 0)
  assert len(steps["step"]) == len(collectives["step"]) == len(steps["gap_ns"]) == 0


@given(rows=st.integers(1, 12), copies=st.lists(st.integers(0, 30), max_size=8))
def test_copies_of_a_ring_give_every_step_once_and_count_what_is_missing(rows, copies):
  """Oracle: the set of steps the ring held at any copy."""
  buffer = np.zeros((rows, fake.WIDTH), np.uint32)
  step, seen, got, missing, held = 0, -1, [], 0, set()
  for advance in copies:
    for _ in range(advance):
      buffer[step % rows] = fake.numpy_rows([step])[0]
      step += 1
    fresh = decode.new_rows(buffer, seen)
    got += fresh.rows[:, ring.STEP].tolist()
    missing += fresh.missing
    seen = max([seen, *got])
    held |= set(range(max(0, step - rows), step))
    assert decode.newest_step(buffer) == step - 1
  assert got == sorted(held)
  assert missing == step - len(held)


@given(st.permutations(range(6)), st.integers(0, 5))
def test_batching_and_order_do_not_matter(order, cut):
  rows = fake.numpy_rows(list(range(6)))
  whole, _ = decode.decode(rows, fake.PLAN, 0, 0, 0)
  assert (decode.decode(rows[list(order)], fake.PLAN, 0, 0, 0)[0]["gap_ns"].tolist()
          == whole["gap_ns"].tolist())
  first, _ = decode.decode(rows[:cut], fake.PLAN, 0, 0, 0)
  previous = decode.Previous(cut - 1, fake.stamp(cut - 1, 0, 7)) if cut else None
  second, _ = decode.decode(rows[cut:], fake.PLAN, 0, 0, 0, previous)
  joined = decode.concatenate([first, second])
  assert {n: v.tolist() for n, v in joined.items()} == {n: v.tolist() for n, v in whole.items()}


def test_host_columns_join_by_step():
  columns = {"step": np.array([3, 4, 5, 6]), "rank": np.zeros(4, np.int32)}
  host = {"step": np.array([4, 3, 6]),
          "cpu_ns": np.ma.masked_array([40, 30, 60], [False, False, True])}
  assert decode.join_host(columns, host)["cpu_ns"].tolist() == [30, 40, None, None]
  assert "cpu_ns" not in decode.join_host(columns,
                                          {"step": np.zeros(0, np.int64), "cpu_ns": np.zeros(0)})


def test_stamps_of_a_device_s_clock_become_the_host_s_by_one_shift_for_each_rank():
  plan = dataclasses.replace(fake.PLAN, clock="stream")
  ranks = [3, 5]
  intake = Intake(ranks, process=1, attempt=0, losses=Losses())

  def batch(steps, read_ns):
    rings = np.stack([fake.numpy_rows(steps, rank=rank) for rank in ranks])
    return Batch(rings, plan, [(None,) * len(HOST_CAUSES)] * len(steps), [{}] * len(steps), read_ns)

  intake.add(batch([0, 1], 7_000_000))
  first, waits = intake.decode(plan)
  intake.add(batch([2, 3], 90_000_000))  # read late: that must not move it
  second, _ = intake.decode(plan)
  for rank in ranks:
    ends = np.concatenate([columns["end_ns"][columns["rank"] == rank]
                           for columns in (first, second)])
    assert ends.tolist() == [7_000_000 + (step - 1) * fake.PERIOD for step in range(4)]
    assert (second["gap_ns"][second["rank"] == rank].tolist()
            == [fake.PERIOD - sum(fake.DURATIONS)] * 2)
    mine = waits["rank"] == rank
    assert (waits["exit_ns"] - waits["enter_ns"])[mine].tolist() == [fake.DURATIONS[5]] * 2
    assert ((first["end_ns"][first["rank"] == rank] - waits["exit_ns"][mine]).tolist()
            == [sum(fake.DURATIONS[6:])] * 2)


def test_stamps_of_the_host_s_clock_are_left_alone():
  intake = Intake([3], process=1, attempt=0, losses=Losses())
  # steps before the recording
  intake.add(Batch(fake.numpy_rows([4], rank=3)[None], fake.PLAN, [], [], 7_000_000))
  intake.add(Batch(fake.numpy_rows([5], rank=3)[None], fake.PLAN, [], [], 7_000_000))
  assert intake.decode(fake.PLAN)[0]["end_ns"].tolist() == [fake.stamp(5, 3, 7)]
