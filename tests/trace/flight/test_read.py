"""Rings and plans in a run directory, whole, missing, old and damaged, read into one picture of the
job."""

import json
import os
import pathlib
import socket
import subprocess
import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxpace.core import marks
from jaxpace.execution import marks as execution
from jaxpace.trace.flight.programs import ProgramsByKey
from jaxpace.trace.flight.read import of_ring, read_flight
from jaxpace.trace.flight.told import told
from jaxpace.trace.marks import plans
from tests.trace.flight.machine import Machine, collective, program

GONE = 2**22 + 1
"""No process has this number: it is beyond what Linux gives."""


class Directory:
  """A run directory of four processes of a rank each, all but the last of which wait for that
  one."""

  def __init__(self, path, stop=3, at=(5, 0), run="run"):
    self.path, self.run = pathlib.Path(path), run
    self.of = program([collective(0, [(0, 1, 2, 3)])], 4)
    self.machine = Machine(self.of, 4, 9, stop={stop: at})
    if not (self.path / "run.json").exists():
      self.info({"schema_version": 1, "run": run, "attempt": 0, "processes": 4})
    for process in range(4):
      self.process(process)

  def info(self, document):
    (self.path / "run.json").write_text(json.dumps(document))

  def process(self, process, *, alive=30.0, closed=0, attempt=0, run=None, wall=None, **more):
    run = run or self.run
    wall = (time.time_ns() - round((alive or 0.0) * 1e9) - self.machine.time if wall is None
            else wall)
    self.machine.write(self.path / "marks" / f"{process}.ring", [process], process=process,
                       alive=alive, closed=closed, attempt=attempt, run=run, wall=wall)
    plans.write_plan(self.path, process, run, attempt, self.machine.plan)
    (self.path / "process").mkdir(exist_ok=True)
    (self.path / "process" / f"{process}.json").write_text(json.dumps(
        {"process": process, "run": self.run, "hostname": f"host{process}", "closed_cleanly": False}
        | more))

  def told(self):
    return told(read_flight(self.path))


@pytest.fixture
def job(tmp_path):
  return Directory(tmp_path)


def test_the_late_rank_is_named_from_the_files_alone(job):
  flight = read_flight(job.path)
  first, = told(flight)
  assert ((first.cause.kind, first.cause.ranks, flight.running, flight.missing)
          == ("absent", (3,), True, ()))
  assert 30.0 <= flight.waited(first.cause) < 30.1
  assert first.places[0].startswith(
      "Rank 3 (process 3 on host3) has begun the call 30 s ago, and has entered no")
  assert flight.usual == pytest.approx(np.median(np.diff(
      [ns for ns, tag in job.machine.events[flight_rank(flight)] if tag & 0xFFFFF == 0])) / 1e9)


def flight_rank(flight):
  by_usual = sorted(flight.positions.values(), key=lambda one: one.usual)
  return by_usual[len(by_usual) // 2].rank


def test_a_run_that_was_never_observed_or_ended_well_says_nothing(job, tmp_path_factory):
  empty = tmp_path_factory.mktemp("run")
  assert read_flight(empty) is None
  (empty / "marks").mkdir()
  assert read_flight(empty) is None
  for process in range(4):
    job.process(process, closed=1, closed_cleanly=True)
  assert job.told() == () and read_flight(job.path).clean
  job.process(2, closed=1, closed_cleanly=True, ended_by="ValueError: x")
  assert len(job.told()) == 1


def test_a_process_without_a_ring_leaves_its_rank_unknown(job):
  os.unlink(job.path / "marks" / "3.ring")
  flight = read_flight(job.path)
  assert flight.missing == (3,) and "1 process (3) left no ring here" in flight.left_out[0]
  cause, = told(flight)
  assert (cause.cause.kind, cause.cause.ranks) == ("unknown", (3,))


@pytest.mark.parametrize("change, said", [
    ({"attempt": 2}, "attempt 2, not of attempt 0"), ({"run": "another"}, "is of another run")])
def test_rings_of_another_start_are_left_out(job, change, said):
  job.process(3, **change)
  flight = read_flight(job.path)
  assert flight.missing == (3,) and said in flight.left_out[0] and 3 not in flight.positions


def test_a_plan_that_is_missing_or_of_another_attempt_makes_the_marks_useless(job):
  plans.write_plan(job.path, 3, "run", 1, job.machine.plan)
  os.unlink(plans.path_of(job.path, 2))
  said = " ".join(read_flight(job.path).left_out)
  assert "3.ring has a plan of another start" in said and "2.ring has no plan beside it" in said


def test_an_older_attempt_is_left_out_when_the_job_has_started_again(job):
  job.info({"schema_version": 1, "run": "run", "attempt": 1, "processes": 4})
  flight = read_flight(job.path)
  assert not flight.positions and ("The rings of processes 0-3 each is of attempt 0, not of "
                                   "attempt 1") in " ".join(
                                       flight.left_out)


def test_a_process_that_has_ended_is_told_by_its_number_or_its_silence(job):
  job.process(3, hostname=socket.gethostname(), pid=GONE)
  assert read_flight(job.path).positions[3].state == "gone"
  job.process(3, hostname=socket.gethostname(), pid=os.getpid())
  assert read_flight(job.path).positions[3].state == "running"
  ended = subprocess.Popen(["true"])
  os.waitid(os.P_PID, ended.pid, os.WEXITED | os.WNOWAIT)
  job.process(3, hostname=socket.gethostname(), pid=ended.pid)
  assert read_flight(job.path).positions[3].state == "gone"
  ended.wait()
  now = time.time_ns()
  job.process(3, alive=0.5, wall=now - round(40e9) - job.machine.time)
  flight = read_flight(job.path)
  assert flight.positions[3].state == "gone"
  assert told(flight)[0].places[0].endswith(
      "Its process has ended without a word, or stands still.")


def test_a_job_that_was_killed_long_ago_does_not_run(job):
  for process in range(4):
    job.process(process, wall=0)
  flight = read_flight(job.path)
  assert not flight.running and {one.state for one in flight.positions.values()} == {"running"}


def test_a_loop_that_was_left_early_is_told_from_one_that_failed(job):
  job.process(3, closed=1, closed_cleanly=True)
  assert "Its process has left its loop" in job.told()[0].places[0]
  job.process(3, closed=1, closed_cleanly=True, ended_by="ValueError: no")
  assert "Its process has ended with an error" in job.told()[0].places[0]


def test_the_heartbeat_of_the_recording_stands_in_for_the_rings(job):
  for process in range(4):
    job.process(process, alive=None, monotonic_ns=job.machine.time + 7 * 10**9, wall=0)
  flight = read_flight(job.path)
  assert 7.0 <= flight.waited(told(flight)[0].cause) < 7.1


def test_own_marks_are_read_in_place(job):
  assert execution.unavailable() == ""
  ring = execution.current()
  from jaxpace.execution.native import library
  of = program([collective(0, [(0, 1)])], 2, number=3901)
  library.functions().jaxpace_mark_here(1, 3901, 0, 1)
  library.functions().jaxpace_mark_here(1, 3901, 2, 1)
  time.sleep(0.02)
  programs = ProgramsByKey()
  found = of_ring(ring.blocks, ring.events, 0, type(job.machine.plan)((of,)), programs)
  assert [one.rank for one in found] == ring.ranks
  assert (found[1].current.pending == [(0, 0)] and found[1].waiting >= 0.02
          and found[1].current.number >= 0)


@given(st.data())
def test_any_damage_is_read_or_left_out_with_a_sentence(tmp_path_factory, data):
  job = Directory(tmp_path_factory.mktemp("run"))
  name = data.draw(st.sampled_from(["marks/3.ring", "marks/3.plan.json", "process/3.json",
                                    "run.json"]))
  path = job.path / name
  content = bytearray(path.read_bytes())
  places = st.integers(0, min(len(content), marks.PAGE * 2 + 1600) - 1)
  for at, byte in data.draw(st.lists(st.tuples(places, st.integers(0, 255)), min_size=1,
                                     max_size=8)):
    content[at] = byte
  path.write_bytes(content[:data.draw(st.integers(0, len(content)))])
  flight = read_flight(job.path)
  for cause in told(flight):
    assert all(isinstance(sentence, str) for sentence in cause.sentences)
    json.dumps(cause.document)
