"""What a watchdog tells of an observed step: by its own ring, the others' heartbeats and rings."""

import pytest

from jaxpace.hang import positions, verdict
from jaxpace.hang.alarms import Late
from jaxpace.hang.heartbeat import Heartbeat, LastHeartbeat
from jaxpace.observation.clocks import host_ring
from jaxpace.observation.clocks.native import library
from jaxpace.runs import ring_file
from tests.hang.machine import Machine, collective, program
from tests.hang.test_waits import flight_of

NUMBER = host_ring.next_program()


@pytest.fixture
def of():
  """Ranks 0 to 7 are this process's; 8 and 9 the other's."""
  alone = [(rank,) for rank in range(2, 8)]
  return program([collective(0, [(0, 8), (1, 9), *alone]), collective(1, [range(10)])], 10,
                 number=NUMBER)


@pytest.fixture
def waiting(of):
  """Rank 0 enters the first collective of a new call; each test's is one call later than the last
  one's."""
  assert host_ring.unavailable() == ""
  library.functions().jaxpace_mark_here(0, NUMBER, 0, 1)
  library.functions().jaxpace_mark_here(0, NUMBER, 2, 1)
  return host_ring.executions(0, NUMBER) - 1


def heartbeat(process, text):
  return LastHeartbeat(Heartbeat(process, "b", 1, 1, 3, 2, "step", 1.0, 9.0, True, marks=text), 0.1)


def absent(causes, ranks):
  found = [one for one in causes if (one.cause.kind, one.cause.ranks) == ("absent", ranks)]
  assert len(found) == 1, [one.sentences for one in causes]
  return found[0]


def machine(of, call):
  return Machine(of, 10, call + 1, stop={8: (call, 0)})


def test_nothing_is_told_of_a_step_that_is_not_observed():
  assert verdict.find_in_step([], 0, {}, None) == () and verdict.own_text([], 0, 100) == ""


def test_the_others_are_known_by_their_heartbeats(of, waiting):
  found = flight_of(machine(of, waiting)).positions
  # The process with ranks 8 and 9 tells of them; programs have the same key in both.
  text = positions.to_text([found[8], found[9]], 2000)
  cause = absent(verdict.find_in_step([of], 0, {1: heartbeat(1, text)}, None), (8,))
  assert "all-reduce.0 (model.py:10)" in cause.sentences[0] and "on b" in cause.sentences[1]


def test_or_by_their_rings_in_the_directory(of, waiting, tmp_path):
  machine(of, waiting).write(tmp_path / "marks" / "1.ring", [8, 9], process=1, alive=3.0)
  ring_file.write_plan(tmp_path, 1, "run", 0, type(machine(of, 0).plan)((of,)))
  # Of a process that sends nothing, what its ring was last written shows, and no more.
  said = absent(verdict.find_in_step([of], 0, {}, tmp_path), (8,))
  assert "3.0 s before its process last wrote" in said.sentences[1]
  assert "silent" not in [each.code for each in said.sentences]


def test_or_not_at_all(of, waiting):
  kinds = {one.cause.ranks: one.cause.kind for one in verdict.find_in_step([of], 0, {}, None)}
  assert kinds[8,] == "unknown"


def test_the_account_is_short(of, waiting):
  text = verdict.own_text([of], 0, verdict.CHARACTERS[0])
  assert 0 < len(text) < verdict.CHARACTERS[0]
  assert Heartbeat.from_text(heartbeat(0, text).heartbeat.to_text()).marks == text
  assert Heartbeat.from_text(heartbeat(0, 3).heartbeat.to_text()) is None


def test_the_warning_holds_what_the_marks_tell():
  late = Late(5, 12.0, (), (0, 1), 0, marks=("Rank 1 is missing.", "It is there."))
  assert (late.text().splitlines()[1:] == ["  in the step: Rank 1 is missing.",
                                           "  and: It is there."])
