"""Positions in a heartbeat: they come back as they were, in the space that there is."""

import dataclasses
import json

from hypothesis import given
from hypothesis import strategies as st

from jaxpace.hang.positions import ProgramsByKey, from_text, to_text
from jaxpace.hang.waits import unfinished
from tests.hang.machine import LOOP, Machine, collective, program
from tests.hang.test_waits import flight_of, jobs


@given(jobs(), st.data())
def test_positions_come_back_and_tell_the_same(job, data):
  of, ranks = job
  machine = Machine(of, ranks, 3,
                    stop={data.draw(st.integers(0, ranks - 1)): (data.draw(st.integers(0, 2)), 0)})
  flight = flight_of(machine)
  text = to_text(flight.positions.values(), 10_000)
  back = {one.rank: one for one in from_text(text, 5, "a host", flight.programs, silence=2.0)}
  assert unfinished(back, flight.programs) == unfinished(flight.positions, flight.programs)
  for rank, one in flight.positions.items():
    assert back[rank].executions == one.executions[-2:] and back[rank].host == "a host"
    assert abs(back[rank].quiet - one.quiet - 2.0) < 0.011


def test_ranks_at_the_same_place_share_an_entry_and_what_does_not_fit_is_left_out():
  of = program([collective(i, [range(8)], loops=(LOOP,)) for i in range(20)], 8)
  flight = flight_of(Machine(of, 8, 3, stop={7: (2, 30)}))
  alike = [dataclasses.replace(flight.positions[0], rank=rank) for rank in range(1000)]
  # No counts are the same but those of ranks that wait: 999 of them take hardly more than one.
  assert (len(to_text(alike, 10_000)) < 4600
          and len(from_text(to_text(alike, 10_000), 0, "", flight.programs)) == 1000)
  one = to_text([flight.positions[0]], 10_000)
  assert (to_text([flight.positions[0]], len(one)) == one
          and to_text([flight.positions[0]], len(one) - 1) == "")
  assert to_text([], 100) == ""


@given(st.text() | st.recursive(st.none() | st.integers() | st.text(max_size=3),
                                lambda x: st.lists(x, max_size=4)).map(
                                    json.dumps))
def test_anything_else_is_no_position(text):
  found = from_text(text, 0, "", ProgramsByKey())
  assert found == [] or all(not one.executions for one in found)


def test_programs_that_are_not_known_here_are_left_out():
  machine = Machine(program([collective(0, [(0, 1)])], 2), 2, 3, stop={1: (2, 0)})
  text = to_text(flight_of(machine).positions.values(), 10_000)
  assert from_text(text, 0, "", ProgramsByKey()) == []
