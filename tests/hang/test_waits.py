"""Who waits for whom: synthetic jobs that stop at a known place."""

import dataclasses
import itertools
import json

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from jaxpace.core.plan import Loop
from jaxpace.hang.describe import Flight, describe
from jaxpace.hang.positions import ProgramsByKey, from_text, position, to_text
from jaxpace.hang.waits import causes, unfinished
from tests.hang.machine import LOOP, MS, Machine, collective, program, script
from tests.lib.said import numbers


def flight_of(machine, ranks=None, per_process=2):
  programs = ProgramsByKey()
  keys = programs.add(machine.plan)
  positions = {rank: position(rank, rank // per_process, *machine.tag_ns(rank), keys, programs,
                              machine.time + 5000 * MS)
               for rank in (range(machine.ranks) if ranks is None else ranks)}
  return Flight(positions, programs)


def found(machine, ranks=None):
  flight = flight_of(machine, ranks)
  return causes(unfinished(flight.positions, flight.programs), flight.programs)


@st.composite
def jobs(draw):
  """A program over 2 to 8 ranks: collectives along either axis of a mesh or over all, in loops or
  not."""
  rows, columns = draw(st.sampled_from([(1, 2), (2, 2), (1, 4), (2, 3), (2, 4), (4, 2)]))
  ranks = rows * columns
  choices = [
      [range(r * columns, (r + 1) * columns) for r in range(rows)],
      [range(c, ranks, columns) for c in range(columns)],
      [range(ranks)]]
  outer, inner = Loop("outer", draw(st.integers(1, 3))), Loop("inner", draw(st.integers(1, 2)))
  made = []
  for index in range(draw(st.integers(1, 4))):
    loops = draw(st.sampled_from([(), (outer,), (outer, inner)]))
    if draw(st.integers(0, 3)) == 0:
      made.append(collective(index, (), pairs=[(r, (r + 1) % ranks) for r in range(ranks)],
                             loops=loops))
    else:
      made.append(collective(index, draw(st.sampled_from(choices)), loops=loops))
  return program(made, ranks), ranks


@given(jobs(), st.data())
def test_the_ranks_that_stopped_are_the_ends_of_all_chains(job, data):
  of, ranks = job
  steps = len(script(of))
  stopped = data.draw(st.sets(st.integers(0, ranks - 1), min_size=1, max_size=2))
  stop = {rank: (data.draw(st.integers(0, 2)), data.draw(st.integers(-1, steps)))
          for rank in stopped}
  machine = Machine(of, ranks, 3, stop)
  result = found(machine)
  blocked = {rank for rank in range(ranks) if machine.inside[rank]}
  # By the machine's own books: who came to where it stops, and is lacking where somebody waits.
  lacking = {rank for meeting in filter(None, machine.inside.values())
             for rank in set(meeting[3]) - machine.entered[meeting]} & stopped - blocked
  assert {cause.kind for cause in result} <= {"absent"}
  assert {rank for cause in result for rank in cause.ranks} == lacking
  assert ({rank for cause in result for wait in (*cause.waits,
                                                 *cause.behind) for rank in wait.waiting}
          == blocked)
  for cause in result:
    for wait in cause.waits:
      call, place, iteration, group = wait.meeting[1:]
      assert (set(wait.waiting) == {r for r in range(ranks)
                                    if machine.inside[r] == (call, place, iteration, group)})
      assert set(wait.absent) == set(group) - machine.entered[call, place, iteration, group]
      assert set(cause.ranks) <= set(wait.absent)
  assert [c.held for c in result] == sorted((c.held for c in result), reverse=True)


@given(jobs(), st.data())
def test_a_network_that_hangs_is_no_ranks_fault(job, data):
  of, ranks = job
  place, iteration = data.draw(st.sampled_from(script(of)))
  rank = data.draw(st.integers(0, ranks - 1))
  empty = Machine(of, ranks, 0)
  dead = (data.draw(st.integers(0, 1)), place, iteration, empty.group(rank, place))
  result = found(Machine(of, ranks, 2, dead=[dead]))
  assert [cause.kind for cause in result] == ["stuck"]
  assert result[0].waits[0].meeting[1:] == dead and result[0].ranks == dead[3]


@given(jobs())
def test_nobody_waits_in_a_job_that_runs_to_its_end(job):
  assert found(Machine(*job, 2)) == ()


def test_ranks_that_enter_different_collectives_wait_in_a_circle():
  of = program([collective(0, [(0, 1, 2, 3)]), collective(1, [(0, 1, 2, 3)])], 4)
  machine = Machine(of, 4, 1, orders={3: [(1, 0), (0, 0)]})
  cause, = found(machine)
  assert cause.kind == "order" and cause.ranks == (0, 1, 2, 3)
  assert {(wait.meeting.place, wait.waiting, wait.absent) for wait in cause.waits} == {
      (0, (0, 1, 2), (3,)), (1, (3,), (0, 1, 2))}
  said = describe(flight_of(machine))[0].sentences[0]
  assert "all-reduce.0" in said and "all-reduce.1" in said and {2, 3} <= {*numbers(said)}


def test_the_turn_of_the_loop_the_line_and_the_place_of_the_late_rank_are_said():
  of = program([collective(0, [(0, 1), (2, 3)], name="all-gather.7", kind="all-gather",
                           loops=(LOOP,), axes=("fsdp",)),
                collective(1, [(0, 2), (1, 3)], loops=(LOOP,))], 4)
  machine = Machine(of, 4, 9, stop={3: (6, script(of).index((1, 2)))})
  first = describe(flight_of(machine))[0]
  # Call, rank, seconds, collective, turn of turns, line, the ranks that meet, others, and who is
  # missing.
  assert (numbers(first.sentences[0]) == [6, 1, 5, 1, 2, 4, 11, 1, 3, 1, 3]
          and " data " in first.sentences[0])
  _, place, behind = first.sentences
  assert numbers(place) == [3, 1, 7, 2, 4, 10, 5] and "all-gather.7" in place
  # 0 has gone on to the next layer, where 1 keeps it; 2 likewise, kept by 3.
  waits = {tuple(one["group"]): one for one in first.document["waits"]}
  assert waits[1, 3]["loops"] == [["while.12", 2, 4]] and waits[1, 3]["source"] == "model.py:11"
  assert waits[2, 3]["turn"] == 3 and waits[2, 3]["waiting"] == [2] and waits[2, 3]["absent"] == [3]
  assert numbers(behind) == [0, 7, 3, 4, 10, 0, 1] and " fsdp " in behind
  assert (first.document["places"][0]["last"] == {"collective": "all-gather.7", "turn": 2,
                                                  "left": True})


def test_between_two_calls_a_process_may_be_in_python_or_in_a_program_without_marks():
  of = program([collective(0, [(0, 1)])], 2)
  machine = Machine(of, 2, 9, stop={1: (4, -1)})
  first = describe(flight_of(machine, per_process=1))[0]
  assert numbers(first.sentences[0])[:8] == [4, 0, 5, 0, 10, 0, 1, 1]
  assert numbers(first.sentences[1])[:4] == [1, 1, 3, 5] and first.sentences[1].code == "not_begun"
  assert first.document["places"][0]["between_calls"] is True


def test_two_processes_may_number_the_same_program_differently():
  of = program([collective(0, [(0, 1)])], 2)
  machine = Machine(of, 2, 3, stop={1: (2, 0)})
  programs = ProgramsByKey()
  positions = {}
  for rank, number in ((0, 3), (1, 9)):
    tag, ns = machine.tag_ns(rank)
    own = program(of.collectives, 2, number=number)
    keys = programs.add(type(machine.plan)((own,)))
    positions[rank] = position(rank, rank, (tag & 0xFFFFF) + (number << 20), ns, keys,
                               programs, None)
  cause, = causes(unfinished(positions, programs), programs)
  assert ((cause.kind, cause.ranks) == ("absent", (1,))
          and Flight(positions, programs).waited(cause) is None)
  assert 5 not in numbers(describe(Flight(positions,
                                      programs))[0].sentences[0]), "for how long, nobody knows"


def test_a_step_that_was_given_up_is_not_waited_in():
  """Its timestamps end in the middle; another program has run to its end since."""
  train = program([collective(0, [(0, 1)])], 2)
  evaluation = program([collective(0, [(0, 1)], name="all-gather.0")], 2, number=4,
                       name="evaluation")
  given_up, after = Machine(train, 2, 3, stop={1: (2, 0)}), Machine(evaluation, 2, 2)
  programs = ProgramsByKey()
  keys = programs.add(type(given_up.plan)((train, evaluation)))
  tag, ns = zip(given_up.tag_ns(0), after.tag_ns(0), strict=True)
  both = position(0, 0, np.concatenate(tag), np.concatenate([ns[0], ns[1] + given_up.time]), keys,
                  programs, None)
  assert [execution.program for execution in both.executions] == [keys[4]]


def test_a_step_whose_beginning_is_written_over_tells_nothing_of_turns():
  of = program([collective(0, [(0, 1)], loops=(LOOP,))], 2)
  machine = Machine(of, 2, 1, stop={1: (0, 2)})
  programs = ProgramsByKey()
  keys = programs.add(machine.plan)
  tag, ns = machine.tag_ns(0)
  one = position(0, 0, tag[4:], ns[4:], keys, programs, None)
  assert one.current.number is None and unfinished({0: one}, programs) == ()


def test_causes_cover_all_waits_in_any_graph():
  """Every rank in a collective is behind a cause, whatever each rank does: no machine could even
  run some of these."""
  of = program([collective(0, [(0, 1, 2)]), collective(1, [(0, 1, 2)]), collective(2, [(0, 1, 2)])],
               3)
  for places in itertools.product([None, 0, 1, 2], repeat=3):
    orders = {rank: [] if place is None else [(place, 0)] for rank, place in enumerate(places)}
    machine = Machine(of, 3, 1, orders=orders,
                      dead=[(0, place, 0, (0, 1, 2)) for place in range(3)])
    result = found(machine)
    covered = {rank for cause in result for wait in (*cause.waits, *cause.behind)
               for rank in wait.waiting}
    assert covered == {rank for rank in range(3) if places[rank] is not None}
    if None not in places:
      assert {cause.kind for cause in result} == ({"stuck"} if len(set(places)) == 1 else {"order"})


# Positions in a heartbeat: they come back as they were, in the space that there is.

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
