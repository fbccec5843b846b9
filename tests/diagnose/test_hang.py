"""When a job is said to hang: never while it runs as usual, always when ranks wait for long. And
what is said: situations that look alike, and differ; hangs that watchdogs found."""

import dataclasses
import json

import numpy as np
import pytest

from jaxpace.diagnose.diagnose import diagnose
from jaxpace.diagnose.diagnosis import to_json
from jaxpace.diagnose.hang import find_hang
from jaxpace.diagnose.notes import hung
from jaxpace.diagnose.words.codes import HangCode as Code
from jaxpace.diagnose.words.notes import Note
from jaxpace.hang.alarms import Late, LateProcess, read_events
from jaxpace.hang.describe import Flight
from jaxpace.hang.positions import ProgramsByKey, position
from tests.diagnose.synthetic import run_of
from tests.hang.machine import MS, Machine, collective, program
from tests.lib.said import numbers
from tests.synthetic.synthetic_runs import SyntheticJob

TRAIN = program([collective(0, [(0, 1, 2, 3)]), collective(1, [(0, 1, 2, 3)])], 4)
ALL = program([collective(0, [(0, 1, 2, 3)]), collective(1, [(0, 1), (2, 3)])], 4)
EVALUATION = program([collective(0, [(2, 3)], name="all-gather.0")], 4, number=4, name="evaluation")
PAIRS = program([collective(0, [(0,), (1,), (2, 3)]), collective(1, [(0,), (1, 2), (3,)]),
                 collective(2, [(0, 1), (2,), (3,)])], 4)
CALL = 9


def flight(machine, seconds=30.0, *, after=None, per_process=1, ranks=range(4), states=None,
           watched=0.0, running=True, left_out=(), **changes):
  """Where the ranks are; `changes` of rank 2, `after` a machine that ran when the first stopped."""
  programs = ProgramsByKey()
  keys = programs.add(type(machine.plan)((machine.program, EVALUATION)))
  positions = {}
  for rank in ranks:
    tag, ns = machine.tag_ns(rank)
    if after and rank in after.events:
      more = after.tag_ns(rank)
      # An event before a start counts executions: it has no time.
      times = more[1] + np.where((more[0] & 0xFFFFF) == 0xFFFFE, 0, machine.time)
      tag, ns = np.concatenate([tag, more[0]]), np.concatenate([ns, times])
    positions[rank] = position(rank, rank // per_process, tag, ns, keys, programs,
                               machine.time + round(seconds * 1e9))
  if changes:
    positions[2] = dataclasses.replace(positions[2], **changes)
  for rank, state in (states or {}).items():
    positions[rank] = dataclasses.replace(positions[rank], state=state)
  return Flight(positions, programs, running=running, watched=watched, left_out=left_out)


def stopped_at(operation, **more):
  """Rank 2 stops before an operation of a call, -1 before the call."""
  return flight(Machine(TRAIN, 4, 20, stop={2: (CALL, operation)}), **more)


def evaluating(stop):
  """Rank 2 runs an evaluation with timestamps instead of the next call."""
  evaluation = Machine(EVALUATION, 4, 2, stop=stop)
  evaluation.events = {2: evaluation.events[2]}
  return flight(Machine(TRAIN, 4, 20, stop={2: (CALL, -1)}), after=evaluation)


def killed():
  """Rank 2 was killed, and the others gave up; its file ends inside of an earlier collective."""
  machine = Machine(TRAIN, 4, 20, stop={2: (CALL, -1)})
  enter = TRAIN.number << 20 | TRAIN.collectives[1].enter_tag
  last = [i for i, (_, tag) in enumerate(machine.events[2]) if tag == enter][-2]
  del machine.events[2][last + 1:]
  return flight(machine, 5.0, running=False, watched=3.0,
                states={0: "closed", 1: "closed", 2: "silent", 3: "closed"})


INSIDE = [(CALL, 0, 0, (0, 1, 2, 3))]
SITUATIONS = {
    "a healthy job": lambda: stopped_at(0, seconds=0.02),
    "a checkpoint of 6 s": lambda: stopped_at(-1, seconds=6.0),
    "between two calls": lambda: stopped_at(-1),
    "in the call": lambda: stopped_at(1),
    "at the call's beginning": lambda: stopped_at(0),
    "in what follows the last collective": lambda: stopped_at(2),
    "in an evaluation": lambda: evaluating({2: (1, 1)}),
    "after an evaluation": lambda: evaluating({}),
    # Calls that run ahead on forced devices: the process has made the call.
    "devices of a process": lambda: stopped_at(-1, per_process=4),
    "a peer stopped inside": lambda: flight(
        Machine(TRAIN, 4, 20, dead=INSIDE), state="silent", watched=3.0),
    "a network that hangs": lambda: flight(Machine(TRAIN, 4, 20, dead=INSIDE), watched=3.0),
    "stopped between two calls": lambda: stopped_at(-1, state="silent", watched=3.0),
    "killed": killed,
    "after SIGTERM": lambda: stopped_at(-1, state="silent", watched=3.0, ended_by="SIGTERM"),
    # Raised inside of the recorder's `with`, caught outside: the process lives.
    "an error that was caught": lambda: stopped_at(-1, state="closed", ended_by="ValueError: no",
                                                   watched=3.0),
    "a loop that ended": lambda: stopped_at(-1, state="closed", watched=3.0),
    "a heartbeat without marks": lambda: stopped_at(-1, state="silent"),
    "a barrier that is over": lambda: dataclasses.replace(
        (found := stopped_at(-1)), positions={rank: dataclasses.replace(one, moving=True)
                                              for rank, one in found.positions.items()}),
    "different orders": lambda: flight(Machine(TRAIN, 4, 20, orders={2: [(1, 0), (0, 0)]}),
                                       seconds=100.0),
    "a chain of groups": lambda: flight(Machine(PAIRS, 4, 20, stop={3: (CALL, 0)})),
    "no ring": lambda: stopped_at(-1, ranks=(0, 1, 3)),
}
"""Rank 2 is late, or rank 3 at the end of a chain."""
QUIET = ("a healthy job", "a checkpoint of 6 s", "a barrier that is over")
SAID = {
    Code.ABSENT: ("between two calls", "a chain of groups", "killed"),
    Code.ORDER: ("different orders",),
    Code.STUCK: ("a network that hangs", "a peer stopped inside"),
    Code.UNKNOWN: ("no ring",),
    Code.IN_CALL: ("in the call", "at the call's beginning"),
    Code.EARLIER_CALL: ("in what follows the last collective", "killed"),
    Code.OTHER_PROGRAM: ("in an evaluation",),
    Code.DEVICE_BEHIND: ("devices of a process",),
    Code.NOT_BEGUN: ("between two calls", "after an evaluation", "stopped between two calls"),
    Code.CLOSED: ("an error that was caught", "a loop that ended"),
    Code.SILENT: ("a peer stopped inside", "stopped between two calls", "after SIGTERM", "killed"),
}
NOT_SAID = {
    Code.ABSENT: ("different orders", "a network that hangs", "a peer stopped inside", "no ring"),
    Code.ORDER: ("a chain of groups", "between two calls"),
    Code.STUCK: ("between two calls", "different orders", "no ring", "a chain of groups", "killed"),
    Code.UNKNOWN: ("between two calls", "stopped between two calls", "a loop that ended"),
    Code.IN_CALL: ("between two calls", "in what follows the last collective", "in an evaluation"),
    Code.EARLIER_CALL: ("in the call", "between two calls", "devices of a process"),
    Code.OTHER_PROGRAM: ("after an evaluation", "between two calls", "in the call"),
    Code.DEVICE_BEHIND: ("between two calls", "in the call", "in what follows the last collective"),
    Code.NOT_BEGUN: ("devices of a process", "in the call", "in an evaluation",
                     "in what follows the last collective", "at the call's beginning"),
    Code.CLOSED: ("after SIGTERM", "stopped between two calls", "between two calls"),
    Code.SILENT: ("between two calls", "an error that was caught", "a loop that ended",
                  "a heartbeat without marks", "a network that hangs"),
}


def said(name):
  found = find_hang(SITUATIONS[name]())
  return () if found is None else found.sentences


@pytest.mark.parametrize("code, name", [(code, name) for code, names in SAID.items()
                                        for name in names])
def test_it_is_said_where_it_is_so(code, name):
  assert code in [sentence.code for sentence in said(name)], said(name)


@pytest.mark.parametrize("code, name", [(code, name) for code, names in NOT_SAID.items()
                                        for name in names])
def test_it_is_not_said_where_it_only_looks_so(code, name):
  sentences = said(name)
  assert sentences and code not in [sentence.code for sentence in sentences], sentences


@pytest.mark.parametrize("name", QUIET)
def test_nothing_is_said_of_a_job_that_goes_on(name):
  assert said(name) == ()


@pytest.mark.parametrize("name", [
    "devices of a process", "in what follows the last collective", "in an evaluation",
    "stopped between two calls", "after SIGTERM", "an error that was caught", "a loop that ended"])
def test_where_marks_tell_otherwise_or_nothing_no_process_is_in_python(name):
  assert "Python" not in " ".join(said(name))


def test_where_marks_cannot_tell_both_are_said():
  for name in ("between two calls", "after an evaluation"):
    where, = (sentence for sentence in said(name) if sentence.code == Code.NOT_BEGUN)
    assert "in Python" in where and "in a program without timestamps" in where
  for name in ("a network that hangs", "a peer stopped inside"):
    first = said(name)[0]
    assert all(words in first for words in ("network", "stands still", "it takes this long"))
  for name in ("a peer stopped inside", "after SIGTERM"):
    last = next(sentence for sentence in said(name) if sentence.code == Code.SILENT)
    assert all(words in last for words in ("has ended", "stands still", "can't write"))


def test_the_last_mark_is_of_the_program_that_wrote_it():
  assert "its last timestamp, of call 1 of evaluation," in said("after an evaluation")[1]
  assert "its last timestamp, of call 8," in said("between two calls")[1]


@pytest.mark.parametrize("name", SITUATIONS)
def test_a_wait_is_no_hang_and_no_end_of_the_job(name):
  found = find_hang(SITUATIONS[name]())
  words = " ".join((*said(name), found.title if found else ""))
  assert not any(word in words for word in ("hangs", "hung", "ended without", "is late"))


def test_what_a_process_wrote_of_its_end_is_quoted():
  assert said("after SIGTERM")[-1].endswith("gives a reason: SIGTERM.")
  assert said("an error that was caught")[-1].endswith("gives a reason: ValueError: no.")


# When it is said at all.

def late(call=9):
  return Machine(ALL, 4, 20, stop={2: (call, 0)})


def test_nothing_is_said_without_rings_or_after_a_good_end():
  assert find_hang(None) is None and find_hang(Flight({}, ProgramsByKey())) is None


@pytest.mark.parametrize("seconds, running, call, said", [
    # A healthy job at any moment.
    (0.01, True, 9, False), (9.0, True, 9, False), (2.9, False, 9, False),
    # Before any step has shown how long it takes.
    (50.0, True, 0, False), (61.0, True, 0, True), (3.5, False, 0, True),
    (11.0, True, 9, True), (3.5, False, 9, True)])
def test_only_long_waits_are_said(seconds, running, call, said):
  found = find_hang(flight(late(call), seconds, running=running))
  assert (found is not None) is said
  if found:
    assert found.running is running and found.seconds == pytest.approx(seconds, abs=0.1)
    assert found.sentences[0].code is Code.ABSENT and found.causes[0].cause.ranks == (2,)


def test_long_steps_need_long_waits():
  slow = late()
  for events in slow.events.values():
    # A hundred times as slow: 17 timestamps of 100 ms per step.
    events[:] = [(ns if tag & 0xFFFFF == 0xFFFFE else ns * 100, tag) for ns, tag in events]
  slow.time *= 100
  usual = flight(slow, 0).usual
  assert usual > 1.0
  assert (find_hang(flight(slow, 19 * usual)) is None
          and find_hang(flight(slow, 21 * usual)) is not None)


def test_a_process_that_died_is_said_however_soon_the_others_failed():
  states = {0: "closed", 1: "closed", 3: "closed", 2: "silent"}
  found = find_hang(flight(late(), 0.05, states=states, running=False, watched=3.0))
  assert found.causes[0].cause.ranks == (2,) and found.sentences[-1].code is Code.SILENT
  # All have closed alike: none is silent.
  assert find_hang(flight(late(), 0.05, states=dict.fromkeys(range(4), "closed"),
                          running=False)) is None


@pytest.mark.parametrize("machine, ranks, code", [
    (Machine(ALL, 4, 20, stop={2: (3, -1)}), range(4), Code.ABSENT),
    (Machine(ALL, 4, 20, dead=[(4, 1, 0, (2, 3))]), range(4), Code.STUCK),
    (Machine(ALL, 4, 20, orders={3: [(1, 0), (0, 0)]}), range(4), Code.ORDER),
    (Machine(ALL, 4, 20, stop={2: (3, -1)}), (0, 1, 3), Code.UNKNOWN)])
def test_every_kind_has_its_code_and_is_plain_json(machine, ranks, code):
  found = find_hang(flight(machine, 100.0, ranks=ranks, left_out=("One is left out.",)))
  document = json.loads(json.dumps(found.to_json(), allow_nan=False))
  assert document["causes"][0]["code"] == code == found.sentences[0].code
  assert document["causes"][0]["sentences"][0] == found.sentences[0]
  assert document["left_out"] == ["One is left out."] and document["running"] is True
  assert document["seconds"] >= 99.9 and machine.time < 1000 * MS


# Hangs that watchdogs found, in the notes.

def event(step, waited, *late, arrived=(0, 1)):
  return {"event": "late", "when_unix_ns": step, **Late(step, waited, late, arrived, 0).to_json()}


def test_a_hang_is_told_once_with_the_time_it_took():
  late = LateProcess(2, "outside", host="h2", phase="checkpoint", seconds=30.0)
  events = [event(812, 10.0, late), event(812, 30.0, late),
            {"event": "resumed", "when_unix_ns": 900, "process": 0, "seconds": 41.2}]
  ((over,), (still,)) = hung(events), hung(events[:2])
  assert over.code == still.code == Note.HUNG and "(h2)" in over
  assert numbers(over)[:3] == [812, 41, 2] and numbers(still)[:3] == [812, 30, 2]


def test_states_are_told_apart():
  states = [LateProcess(1, "absent"), LateProcess(1, "left"),
            LateProcess(1, "outside", phase="data"), LateProcess(1, "silent", phase="data")]
  told = {hung([event(1, 5.0, late)])[0] for late in states} | {hung([event(1, 5.0)])[0]}
  assert len(told) == 5 and sum("process 1" in sentence for sentence in told) == 4


def test_what_says_too_little_is_left_out_and_many_are_cut():
  assert hung([{}, {"event": "late"}, {"event": "resumed", "seconds": 3.0}]) == []
  assert len(hung([event(step, 5.0) for step in range(20)])) == 11


def test_they_reach_the_report(tmp_path):
  run, _ = run_of(SyntheticJob(ranks=4, steps=60, processes=2))
  (tmp_path / "watchdog").mkdir()
  line = {**event(30, 12.0, LateProcess(1, "outside", phase="data")), "run": run.id}
  (tmp_path / "watchdog" / "0.jsonl").write_text(json.dumps(line) + "\n"
                                                 + json.dumps({**line, "run": "other"}) + "\n")
  document = to_json(diagnose(dataclasses.replace(run), events=read_events(tmp_path, run.id)))
  assert document["note_codes"][-1] == Note.HUNG and numbers(document["notes"][-1]) == [30, 12, 1]
  assert len(document["hangs"]) == 1 and document["hangs"][0]["late"][0]["phase"] == "data"
  assert document["link_probe"] is None
