"""When a job is said to hang: never while it runs as usual, always when ranks wait for long."""

import dataclasses
import json

import pytest

from jaxpace.diagnose.hang import find_hang
from jaxpace.diagnose.words.codes import HangCode as Code
from jaxpace.hang.describe import Flight
from jaxpace.hang.positions import ProgramsByKey, position
from tests.hang.machine import MS, Machine, collective, program

ALL = program([collective(0, [(0, 1, 2, 3)]), collective(1, [(0, 1), (2, 3)])], 4)


def flight(machine, seconds, *, states=None, ranks=range(4), **more):
  programs = ProgramsByKey()
  keys = programs.add(machine.plan)
  positions = {rank: position(rank, rank, *machine.tag_ns(rank), keys, programs,
                              machine.time + round(seconds * 1e9)) for rank in ranks}
  for rank, state in (states or {}).items():
    positions[rank] = dataclasses.replace(positions[rank], state=state)
  return Flight(positions, programs, **more)


def late(call=9):
  return Machine(ALL, 4, 20, stop={2: (call, 0)})


def test_nothing_is_said_without_rings_or_after_a_good_end():
  assert find_hang(None) is None and find_hang(Flight({}, ProgramsByKey(), clean=True)) is None


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
