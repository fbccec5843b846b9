"""Timestamps joined to the timestamps of an instrumented step, against a reading mark by mark."""

import dataclasses
import json

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxpace.core.plan import Loop, Plan, Timestamp
from jaxpace.core.ring_layout import PHASE_TAG, STEP_VALUE, slot_tags
from jaxpace.record.ring.collect import Detail
from jaxpace.record.ring.executions import Executions
from jaxpace.record.ring.instrumented import observed_program
from tests.quick import examples
from tests.record.ring.programs import traced
from tests.record.ring.replayed import rows_of, step_of

PLAN = Plan(
    axis="data", ranks=2, clock="native", program=7,
    marks=(Timestamp("start", "gap"), Timestamp("phase", "forward"),
           Timestamp("enter", "backward", 0),
           Timestamp("exit", "sync", 0), Timestamp("end", "update")),
    collectives=(traced(0, "grads", bytes=64),),
    inside=(traced(1, "psum.0", phase="forward", loops=(Loop("scan.0", 3),), enter_tag=34,
                   source="model.py:3"),
            traced(2, "gather", ("all_gather",), operands=2, index_groups=((0, 1),),
                   conditional=True, enter_tag=36)),
    order=(1, 0, 2))


def executions(times, marks):
  """Executions with the step's timestamps, [n, 5], and nested ones: (execution, tag, ns)."""
  enter, leave = slot_tags(0)
  events = [event for place, own in enumerate(times) for event in (
      (place, STEP_VALUE, 4 + place), (place, PHASE_TAG, own[1]), (place, enter, own[2]),
      (place, leave, own[3]))] + marks
  of, tag, ns = np.array(sorted(events, key=lambda event: event[0]), np.int64).T
  return Executions(np.arange(len(times)), np.array([own[0] for own in times], np.int64),
                    np.array([own[-1] for own in times], np.int64), of, tag.astype(np.uint32), ns)


@st.composite
def recorded(draw):
  """Timestamps of some steps, and timestamps in their executions, each where its turn puts it."""
  now, times, marks = 1000, [], []
  for _ in range(draw(st.integers(1, 4))):
    begin = now
    spans = [draw(st.integers(1, 50)) for _ in range(4)]
    bounds = np.cumsum([begin, *spans])
    times.append(bounds)
    now = int(bounds[-1]) + draw(st.integers(1, 20))
    tags = [34, 35] * draw(st.integers(0, 3)) + draw(st.sampled_from([[], [36, 37]]))
    at = begin
    for tag in tags:
      at = min(int(bounds[2]), at + draw(st.integers(0, 15)))
      marks.append((len(times) - 1, tag, at))
  return np.array(times), executions(times, marks)


@given(recorded())
@settings(max_examples=examples(60), deadline=None)
def test_each_nanosecond_of_waiting_leaves_its_phase_and_counts_once(case):
  times, ran = case
  steps, waits, _ = rows_of(PLAN, ran)
  expected = {phase: np.diff(times)[:, place] for place, phase in
              ((0, "forward"), (1, "backward"), (3, "update"))}
  sync = np.diff(times)[:, 2]
  rows = []
  for row in range(len(times)):
    occurrences = []
    for number, tags in enumerate(((34, 35), (36, 37))):
      pairs = zip(*(ran.ns[(ran.of == row) & (ran.tag == tag)].tolist() for tag in tags),
                  strict=True)
      occurrences += [(leave, enter, number, iteration)
                      for iteration, (enter, leave) in enumerate(pairs)]
    waited = set()
    for leave, enter, number, iteration in occurrences:
      rows.append((row, 1 + (iteration if number == 0 else 3), enter, leave))
      waited |= set(range(enter, leave))
    for instant in waited:
      place = int(np.searchsorted(times[row], instant, side="right"))
      segment = PLAN.marks[place].segment
      if segment in expected:
        expected[segment][row] -= 1
        sync[row] += 1
  for phase, total in (*expected.items(), ("sync", sync)):
    assert steps[f"{phase}_ns"].tolist() == total.tolist()
  nested = waits["collective"] > 0
  assert sorted(zip(*((waits[name] - offset)[nested].tolist() for name, offset in (
      ("step", 4), ("collective", 0), ("enter_ns", 0), ("exit_ns", 0))), strict=True)
                ) == sorted(rows)
  assert steps["last_exit_ns"].tolist() == [
      max([own[3], *(leave for row, _, _, leave in rows if row == at)])
      for at, own in enumerate(times.tolist())]


def test_run_json_tells_each_turn_and_stamped_slots_stay():
  told = step_of(PLAN).plan_of([], Detail()).to_json()
  assert [entry["slot"] for entry in told["collectives"]] == [0, 1, 2, 3, 4]
  assert [(entry["name"], entry["of"], entry["loops"]) for entry in told["collectives"]] == [
      ("grads", 0, []), ("psum.0", 1, [["scan.0", 0, 3]]), ("psum.0@1", 1, [["scan.0", 1, 3]]),
      ("psum.0@2", 1, [["scan.0", 2, 3]]), ("gather", 2, [])]
  assert (told["collectives"][1]["source"] == "model.py:3"
          and told["collectives"][4]["index_groups"] == [[0, 1]])
  assert ({mark["collective"] for mark in told["marks"]} == {None, 0}
          and told["detail"]["every"] == 1 and "inside" not in told)
  alone = step_of(dataclasses.replace(PLAN, inside=(), order=(0,))).plan_of([], Detail()).to_json()
  assert json.loads(json.dumps(PLAN.to_json()))["collectives"] == alone["collectives"]
  assert alone["collectives"][0].keys().isdisjoint({"loops", "of"})


def test_who_meets_is_told_beside_the_ring():
  settings_of = {"mesh": {"data": 2, "model": 2}, "axis": ["data"], "step": "train_step"}
  found = observed_program(PLAN, settings_of, 4)
  assert [one.name for one in found.collectives] == ["psum.0", "grads", "gather"]
  assert found.collectives[0].groups == ((0, 2), (1, 3)) and found.name == "train_step"
