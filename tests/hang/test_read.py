"""Rings and plans in a run directory, whole, missing, old and damaged, read into one picture of the
job."""

import json
import os
import pathlib
import re
import socket
import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxpace.core import ring_layout
from jaxpace.hang import read_rings
from jaxpace.hang.describe import describe
from jaxpace.hang.positions import ProgramsByKey
from jaxpace.hang.read_rings import of_ring, read_flight
from jaxpace.observation.clocks import host_ring as execution
from jaxpace.runs import ring_file
from tests.hang.machine import Machine, collective, program
from tests.lib.said import numbers

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
    ring_file.write_plan(self.path, process, run, attempt, self.machine.plan)
    (self.path / "process").mkdir(exist_ok=True)
    (self.path / "process" / f"{process}.json").write_text(json.dumps(
        {"process": process, "run": self.run, "hostname": f"host{process}", "closed_cleanly": False}
        | more))

  def beat(self, process, marks_too=0):
    """A living process writes that it lives, and new timestamps."""
    path = self.path / "marks" / f"{process}.ring"
    if not path.exists():
      return
    with open(path, "r+b") as file:
      data = bytearray(file.read(ring_layout.PAGE + ring_layout.BLOCK))
      np.frombuffer(data, ring_layout.HEADER, 1)["alive_ns"] += 250_000_000
      np.frombuffer(data, ring_layout.BUFFER, 1, ring_layout.PAGE)["head"] += marks_too
      file.seek(0)
      file.write(data)

  def told(self):
    flight = read_flight(self.path)
    return describe(flight) if flight is not None else ()


@pytest.fixture
def job(tmp_path):
  return Directory(tmp_path)


class Watched:
  """Stands for the clock while rings are watched: it passes when the reader sleeps, and those that
  live write meanwhile."""

  def __init__(self, job, living=()):
    self.job, self.living, self.now, self.asleep = job, dict.fromkeys(living, 0), 0.0, 0

  def monotonic(self):
    return self.now

  def sleep(self, seconds):
    self.now += seconds
    self.asleep += 1
    for process, marks_too in self.living.items():
      self.job.beat(process, marks_too)


@pytest.fixture
def watched(job, monkeypatch):
  """All four processes live."""
  found = Watched(job, range(4))
  monkeypatch.setattr(read_rings, "time", found)
  return found


def test_the_late_rank_is_named_from_the_files_alone(job, watched):
  flight = read_flight(job.path)
  first, = describe(flight)
  assert ((first.cause.kind, first.cause.ranks, flight.running, flight.left_out)
          == ("absent", (3,), True, ()))
  assert 30.0 <= flight.waited(first.cause) < 30.1 and watched.asleep == 1
  assert first.sentences[1].code == "in_call" and first.sentences[1].startswith(
      "Rank 3 (process 3 on host3) began the call 30 s ago, and has entered no")
  assert flight.usual == pytest.approx(np.median(np.diff(
      [ns for ns, tag in job.machine.events[flight_rank(flight)] if tag & 0xFFFFF == 0])) / 1e9)


def flight_rank(flight):
  by_usual = sorted(flight.positions.values(), key=lambda one: one.usual)
  return by_usual[len(by_usual) // 2].rank


def test_a_run_that_was_never_observed_or_ended_well_says_nothing(job, watched, tmp_path_factory):
  empty = tmp_path_factory.mktemp("run")
  assert read_flight(empty) is None
  (empty / "marks").mkdir()
  assert read_flight(empty) is None
  for process in range(4):
    job.process(process, closed=1, closed_cleanly=True)
  assert job.told() == () and read_flight(job.path) is None
  job.process(2, closed=1, closed_cleanly=True, ended_by="ValueError: x")
  assert len(job.told()) == 1


def test_a_process_without_a_ring_leaves_its_rank_unknown(job, watched):
  os.unlink(job.path / "marks" / "3.ring")
  flight = read_flight(job.path)
  assert "1 process (3) left no ring here" in flight.left_out[0]
  cause, = describe(flight)
  assert (cause.cause.kind, cause.cause.ranks) == ("unknown", (3,))
  assert not cause.cause.waits[0].absent and 3 in numbers(cause.sentences[0])


@pytest.mark.parametrize("change, said", [
    ({"attempt": 2}, "attempt 2, not of attempt 0"), ({"run": "another"}, "is of another run")])
def test_rings_of_another_start_are_left_out(job, watched, change, said):
  job.process(3, **change)
  flight = read_flight(job.path)
  assert said in flight.left_out[0] and 3 not in flight.positions


def test_a_plan_that_is_missing_or_of_another_attempt_makes_the_marks_useless(job, watched):
  ring_file.write_plan(job.path, 3, "run", 1, job.machine.plan)
  os.unlink(ring_file.path_of(job.path, 2))
  said = " ".join(read_flight(job.path).left_out)
  assert "3.ring has a plan of another start" in said and "2.ring has no plan beside it" in said


def test_an_older_attempt_is_left_out_when_the_job_has_started_again(job, watched):
  job.info({"schema_version": 1, "run": "run", "attempt": 1, "processes": 4})
  flight = read_flight(job.path)
  assert not flight.positions and ("The rings of processes 0-3 each is of attempt 0, not of "
                                   "attempt 1") in " ".join(
                                       flight.left_out)


def codes(flight):
  return [[each.code for each in one.sentences] for one in describe(flight)]


def test_who_writes_while_the_rings_are_watched_is_there_whatever_the_clocks_say(job, watched):
  """The wall clock was set by a day, the pid is another container's: neither is asked."""
  for process in range(4):
    job.process(process, wall=1, pid=GONE, hostname=socket.gethostname())
  flight = read_flight(job.path)
  assert flight.running and {one.state for one in flight.positions.values()} == {"running"}
  assert codes(flight) == [["absent", "in_call"]]


def test_who_writes_nothing_may_have_ended_or_stand_still(job, watched):
  watched.living.pop(3)
  flight = read_flight(job.path)
  assert flight.running and flight.positions[3].state == "silent"
  assert flight.watched == pytest.approx(read_rings.WATCHED_SECONDS, abs=read_rings._GLANCE)
  (said,) = describe(flight)
  assert [each.code for each in said.sentences] == ["absent", "in_call", "silent"]
  assert "30 s before its process last wrote" in said.sentences[1]
  assert " was " in said.sentences[1] or " had " in said.sentences[1]
  assert "as far as its last timestamps show" in said.sentences[0]
  job.process(3, ended_by="SIGTERM")
  assert describe(read_flight(job.path))[0].sentences[2].endswith("gives a reason: SIGTERM.")
  watched.living.clear()
  assert not read_flight(job.path).running


def test_nobody_waits_who_has_gone_on_while_the_rings_were_watched(job, watched):
  """A checkpoint that is over at this moment."""
  watched.living.update({0: 1, 1: 1, 2: 1, 3: 1})
  assert describe(read_flight(job.path)) == ()


def test_the_late_rank_may_go_on_elsewhere_while_the_others_wait(job, watched):
  watched.living[3] = 1
  assert codes(read_flight(job.path)) == [["absent", "in_call"]]


def test_rings_are_watched_only_where_ranks_have_waited_for_seconds(job, watched):
  for process in range(4):
    job.process(process, alive=0.2)
  flight = read_flight(job.path)
  assert flight.running and (watched.asleep, flight.watched) == (0, 0.0)


def test_of_a_closed_recording_the_marks_tell_nothing_that_came_later(job, watched):
  for end in ({}, {"ended_by": "ValueError: no"}):
    job.process(3, alive=0.045, closed=1, closed_cleanly=True, **end)
    said, = describe(read_flight(job.path))
    assert [each.code for each in said.sentences] == ["absent", "in_call", "closed"]
    # It stays, however much later the report is made: 45 ms after the last event of all.
    assert re.search(r" (4\d|5\d) ms before its recording was closed", said.sentences[1])
    assert ("ValueError: no" in said.sentences[2]) is bool(end)


def test_own_marks_are_read_in_place(job):
  assert execution.unavailable() == ""
  ring = execution.current()
  from jaxpace.observation.clocks.native import library
  of = program([collective(0, [(0, 1)])], 2, number=execution.next_program())
  library.functions().jaxpace_mark_here(1, of.number, 0, 1)
  library.functions().jaxpace_mark_here(1, of.number, 2, 1)
  time.sleep(0.02)
  programs = ProgramsByKey()
  found = of_ring(ring.blocks["rank"], ring.blocks["head"], ring.events, 0,
                  type(job.machine.plan)((of,)), programs)
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
  places = st.integers(0, min(len(content), ring_layout.PAGE * 2 + 1600) - 1)
  for at, byte in data.draw(st.lists(st.tuples(places, st.integers(0, 255)), min_size=1,
                                     max_size=8)):
    content[at] = byte
  path.write_bytes(content[:data.draw(st.integers(0, len(content)))])
  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(read_rings, "time", Watched(job))
    flight = read_flight(job.path)
  for cause in describe(flight):
    assert all(isinstance(sentence, str) for sentence in cause.sentences)
    json.dumps(cause.document)
