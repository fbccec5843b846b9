"""Timestamps joined to the timestamps of an instrumented step, against a reading mark by mark."""

import dataclasses
import json

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxpace.core.plan import Collective, Loop, Plan, Timestamp
from jaxpace.core.ring_layout import slot_tags
from jaxpace.record.ring import nested
from jaxpace.record.ring.executions import Executions
from tests.quick import examples

PLAN = Plan(
    axis="data", ranks=2, clock="native", program=7,
    marks=(Timestamp("start", "gap"), Timestamp("phase", "forward"),
           Timestamp("enter", "backward", 0),
           Timestamp("exit", "sync", 0), Timestamp("end", "update")),
    collectives=(Collective(0, "grads", ("psum",), "data", 64, 1, ("float32",), "backward"),),
    inside=(Collective(0, "psum.0", ("psum",), "data", 8, 1, ("float32",), "forward",
                       loops=(Loop("scan.0", 3),), enter_tags=(34,), exit_tags=(35,),
                       source="model.py:3"),
            Collective(1, "gather", ("all_gather",), "data", 16, 2, ("float32",), "backward",
                       index_groups=((0, 1),), conditional=True, enter_tags=(36, 38),
                       exit_tags=(37, 39))))


@st.composite
def recorded(draw):
  """Timestamps of some steps, and timestamps in their executions, each where its turn puts it."""
  now, times, runs, marks = 1000, [], [], []
  for _ in range(draw(st.integers(1, 4))):
    begin = now
    spans = [draw(st.integers(1, 50)) for _ in range(4)]
    bounds = np.cumsum([begin, *spans])
    times.append(bounds)
    now = int(bounds[-1]) + draw(st.integers(1, 20))
    tags = [(34, 35)] * draw(st.integers(0, 3)) + draw(st.sampled_from([[], [(36, 38, 37, 39)]]))
    runs.append((begin, int(bounds[-1])))
    at = begin
    for own in tags:
      enters, leaves = own[:len(own) // 2], own[len(own) // 2:]
      for tag in (*enters, *leaves):
        at = min(int(bounds[2]), at + draw(st.integers(0, 15)))
        marks.append((len(runs) - 1, tag, at))
  of, tag, ns = ((np.array(column) for column in zip(*marks, strict=True)) if marks
                 else (np.empty(0, int),) * 3)
  return np.array(times), Executions(np.arange(len(runs)), np.array([r[0] for r in runs], np.int64),
                                     np.array([r[1] for r in runs], np.int64), of.astype(np.int64),
                                     tag.astype(np.uint32), ns.astype(np.int64))


@given(recorded())
@settings(max_examples=examples(60), deadline=None)
def test_each_nanosecond_of_waiting_leaves_its_phase_and_counts_once(case):
  times, ran = case
  plan = nested.NestedPlan(PLAN, {})
  found = nested.join(times, ran, plan)
  starts = ran.start_ns.tolist()
  expected = {phase: np.zeros(len(times), np.int64) for phase in ("forward", "backward", "update")}
  rows = []
  for run, start in enumerate(starts):
    row = run
    assert times[row, 0] == start
    occurrences = []
    for number, (enters, leaves) in enumerate((((34,), (35,)), ((36, 38), (37, 39)))):
      by_tag = {tag: ran.ns[(ran.of == run) & (ran.tag == tag)].tolist()
                for tag in (*enters, *leaves)}
      for iteration in range(min(map(len, by_tag.values()))):
        enter, leave = (choose(by_tag[tag][iteration] for tag in tags)
                        for choose, tags in ((max, enters), (min, leaves)))
        occurrences.append((max(leave, enter), enter, number, iteration))
    waited = set()
    for leave, enter, number, iteration in occurrences:
      rows.append((row, 1 + (iteration if number == 0 else 3), enter, leave))
      waited |= set(range(enter, leave))
    for instant in waited:
      place = int(np.searchsorted(times[row], instant, side="right"))
      segment = PLAN.marks[place].segment
      if segment in expected:
        expected[segment][row] += 1
  for phase, total in expected.items():
    assert found.waiting[phase].tolist() == total.tolist()
  assert sorted(zip(found.row.tolist(), found.slot.tolist(), found.enter_ns.tolist(),
                    found.exit_ns.tolist(), strict=True)) == sorted(rows)


def test_columns_add_up_as_before():
  plan = nested.NestedPlan(PLAN, {})
  times = np.array([[0, 100, 200, 250, 260]], np.int64)
  ran = Executions(np.array([0]), np.array([0]), np.array([260]), np.array([0] * 4),
                   np.array([34, 35, 34, 35], np.uint32), np.array([10, 30, 90, 120]))
  columns = {"forward_ns": np.array([100]), "backward_ns": np.array([100]),
             "sync_ns": np.array([50]), "update_ns": np.array([10])}
  joined = nested.join(times, ran, plan)
  steps = nested.step_columns(columns, joined, times, PLAN)
  assert ([steps[name][0] for name in ("forward_ns", "backward_ns", "sync_ns", "update_ns")]
          == [70, 80, 100, 10])
  assert steps["last_exit_ns"][0] == 250
  identity = {"step": np.array([5]), "rank": np.zeros(1, np.int32),
              "process": np.zeros(1, np.int32), "attempt": np.zeros(1, np.int32)}
  rows = nested.collective_columns(identity, joined, np.array([True]), plan)
  assert rows["step"].tolist() == [5, 5] and rows["collective"].tolist() == [1, 2]
  assert rows["name"].tolist() == ["psum.0", "psum.0@1"] and rows["bytes"].tolist() == [8, 8]
  none = nested.collective_columns(identity, joined, np.array([False]), plan)
  assert not len(none["step"])


def test_run_json_tells_each_turn_and_stamped_slots_stay():
  plan = nested.NestedPlan(PLAN, {"every": 1})
  told = plan.to_json()
  assert [entry["slot"] for entry in told["collectives"]] == [0, 1, 2, 3, 4]
  assert [(entry["name"], entry["of"], entry["loops"]) for entry in told["collectives"]] == [
      ("grads", 2, []), ("psum.0", 0, [["scan.0", 0, 3]]), ("psum.0@1", 0, [["scan.0", 1, 3]]),
      ("psum.0@2", 0, [["scan.0", 2, 3]]), ("gather", 1, [])]
  assert (told["collectives"][1]["source"] == "model.py:3"
          and told["collectives"][4]["index_groups"] == [[0, 1]])
  assert ({mark["collective"] for mark in told["marks"]} == {None, 0}
          and told["detail"] == {"every": 1})
  assert plan.rows == 5
  [timestamped] = json.loads(json.dumps(PLAN.to_json()))["collectives"]
  assert timestamped.keys().isdisjoint({"loops", "after"})


def test_who_meets_is_told_beside_the_ring():
  settings_of = {"mesh": {"data": 2, "model": 2}, "axis": ["data"], "step": "train_step"}
  grouped = dataclasses.replace(PLAN, inside=(PLAN.inside[0],
                                              dataclasses.replace(PLAN.inside[1], after=1)))
  found = nested.observed_program(grouped, settings_of, 4, [slot_tags(0)])
  assert [one.name for one in found.collectives] == ["psum.0", "grads", "gather"]
  assert found.collectives[1].enter_tags == (slot_tags(0)[0],)
  assert found.collectives[0].groups == ((0, 2), (1, 3)) and found.number == 7
  assert [one.index for one in found.collectives] == [0, 1, 2]
