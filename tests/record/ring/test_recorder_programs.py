"""The Recorder of observed steps: several programs, and those compiled anew or never run."""

import dataclasses

import jax

from jaxpace.core.observed import ObservedFunction, ObservedPlan
from jaxpace.record.recorder import Recorder
from jaxpace.record.ring.collect import Collector
from jaxpace.record.ring.intake import Intake
from jaxpace.record.ring.observed import PlannedPrograms
from jaxpace.runs.rundir import RunIdentity
from tests.record.recording import parts, process_file, run_file, table
from tests.record.ring.handmade import Handmade


class Several(Handmade):
  """A function that was compiled to the programs of several."""

  def __init__(self, *made):
    self.made, self.runs = made, frozenset().union(*(one.runs for one in made))

  @property
  def plan(self):
    # As soon as a program is compiled, before it runs.
    return ObservedPlan(tuple(program for one in self.made if one.plan
                              for program in one.plan.programs))


def test_steps_of_several_programs_and_programs_that_run_now_and_then(tmp_path):
  micro, update, evaluate = (Handmade(jax.devices()[:2], layers, name) for layers, name in
                             ((2, "micro"), (1, "update"), (1, "evaluate")))
  x = micro.inputs()
  with Recorder(tmp_path, [micro, update, evaluate]) as recorder:
    for k in range(9):
      for _ in range(3):
        x = micro(x)
      x = update(x)
      if k % 4 == 3:
        evaluate(x)
      recorder.record()
  rows = table(tmp_path)
  assert (sorted((row["rank"], row["step"]) for row in rows)
          == [(r, s) for r in range(2) for s in range(9)])
  # Evaluation runs now and then, so it is beside the step.
  planned = {each["slot"]: each for each in run_file(tmp_path)["plan"]["collectives"]}
  named = [planned[slot]["name"] for slot in range(len(planned))]
  assert named[:9] == [
      "all-reduce.0", "all-reduce.0@1", "all-reduce.1", "all-reduce.0#1", "all-reduce.0@1#1",
      "all-reduce.1#1", "all-reduce.0#2", "all-reduce.0@1#2", "all-reduce.1#2"]
  assert planned[4]["loops"][0] == ["call", 1, None] and planned[4]["of"] == planned[0]["of"] == 0
  assert [planned[slot]["of"] for slot in range(9, 11)] == [2, 3]
  found = {}
  for row in table(tmp_path, "collectives"):
    found.setdefault((row["rank"], row["step"]), []).append(row)
  for own in found.values():
    own.sort(key=lambda row: row["enter_ns"])
    assert [row["collective"] for row in own] == list(range(11))
  for row in rows:
    assert sum(parts(row)) <= row["end_ns"] - row["start_ns"]
    before = next((each for each in rows
                   if (each["rank"], each["step"]) == (row["rank"], row["step"] - 1)), None)
    if before is not None:  # nothing of the time is left out, nothing counts twice
      assert row["gap_ns"] + sum(parts(row)) == row["end_ns"] - before["end_ns"]


def test_a_program_that_runs_without_marks_leaves_no_rows_and_its_reason(tmp_path):
  step = Handmade(jax.devices()[:2], layers=1)
  step(step.inputs())
  step._program = dataclasses.replace(step._program, bare="the module could not be read back.")
  step.plan, step.runs = ObservedPlan((step._program,)), frozenset()
  with Recorder(tmp_path, step) as recorder:
    for _ in range(3):
      recorder.record()
  assert table(tmp_path) == [] and process_file(tmp_path)["closed_cleanly"]
  assert "runs unmodified" in run_file(tmp_path)["plan"]["notices"][0]


def test_a_program_that_is_compiled_while_it_is_recorded_gets_slots_of_its_own(tmp_path, observed):
  other = Handmade(jax.devices()[:4], layers=2)
  other._program = dataclasses.replace(other._program, name="longer")

  with Recorder(tmp_path, Several(observed, other)) as recorder:
    for k in range(6):
      if k < 3:
        observed(observed.inputs())
      else:
        other(other.inputs())
      recorder.record()
  found = {}
  for row in table(tmp_path, "collectives"):
    found.setdefault(row["step"], set()).add(row["collective"])
  assert found == {**{k: {0, 1, 2, 3} for k in range(3)}, **{k: {4, 5, 6} for k in range(3, 6)}}
  assert [each["program"] for each in run_file(tmp_path)["plan"]["collectives"]] == (
      [observed.number] * 4 + [other.number] * 3)


def test_a_step_that_is_compiled_twice_alike_is_one_in_the_tables(tmp_path):
  step = Handmade(jax.devices()[:2], layers=2)
  again = Handmade(jax.devices()[:2], layers=2)

  with Recorder(tmp_path, Several(step, again)) as recorder:
    for called in (step, again, again):
      called(step.inputs())
      recorder.record()
  entries = run_file(tmp_path)["plan"]["collectives"]
  assert [(entry["name"], entry["of"]) for entry in entries] == [
      ("all-reduce.0", 0), ("all-reduce.0@1", 0), ("all-reduce.1", 1)]
  found = {}
  for row in sorted(table(tmp_path, "collectives"), key=lambda row: row["enter_ns"]):
    found.setdefault((row["rank"], row["step"]), []).append(row["collective"])
  assert found == {(rank, k): list(range(3)) for rank in range(2) for k in range(3)}
  assert len(table(tmp_path)) == 6


def test_a_loop_of_unknown_turns_is_recorded_turn_by_turn(tmp_path):
  step = Handmade(jax.devices()[:2], layers=4, unknown=True)
  with Recorder(tmp_path, step) as recorder:
    for _ in range(2):
      step(step.inputs())
      recorder.record()
  rows = [row for row in table(tmp_path, "collectives") if (row["rank"], row["step"]) == (1, 1)]
  assert [row["name"] for row in sorted(rows, key=lambda row: row["enter_ns"])] == [
      "all-reduce.0", "all-reduce.0@1", "all-reduce.0@2", "all-reduce.0@3", "all-reduce.1"]


# What the writer's thread reads while the loop goes on.

def test_a_program_that_runs_first_while_the_ring_is_read_loses_nothing(tmp_path):
  step = Handmade(jax.devices()[:2])
  asked = []

  class Asked(ObservedFunction):
    """The loop compiles and runs the step just after the thread has asked what there is."""

    runs = step.runs

    @property
    def plan(self) -> ObservedPlan:
      asked.append(True)
      if len(asked) == 2:
        jax.block_until_ready(step(step.inputs()))
        return ObservedPlan()
      return ObservedPlan((step._program,) if len(asked) > 2 else ())

  collector = Collector()
  taken = Intake(PlannedPrograms([Asked()]), collector, tmp_path, RunIdentity("run", 0, 0), 0)
  taken.poll()
  assert len(taken.plan.collectives) == 0 and taken.over == 1
  buffers = [collector.ranks.index(rank) for rank in step._program.ranks]
  assert [collector.passed(buffer, step.number) for buffer in buffers] == [1, 1]
