"""Which execution each call was, from marks alone: several programs, some devices, events lost."""

import pytest

from jaxpace.execution import marks
from jaxpace.execution.native import library
from jaxpace.trace.marks.collect import CallOrder, Collector


@pytest.fixture
def programs():
  assert marks.unavailable() == ""
  return {name: marks.next_program() for name in ("a", "b", "other")}


def ran(programs, names, lanes):
  """Marks of executions, one after the other, on each of the lanes that a program has."""
  for name in names:
    for lane in lanes[name]:
      for tag in (0, 1):
        library.functions().jaxpace_mark_here(lane, programs[name], tag, 1)


def begun(programs, lanes, calls=0):
  collector = Collector()
  return collector, CallOrder(
      collector, {programs[name]: on for name, on in lanes.items()}, calls)


def settled(collector, order, programs, lanes):
  collector.collect(lambda: set(programs.values()))
  order.settle({programs[name]: on for name, on in lanes.items()})


def names_of(order, programs, begin, end):
  by_number = {number: name for name, number in programs.items()}
  return "".join(by_number[one.program] * (one.end - one.begin)
                 for one in order.ranges(begin, end))


BOTH = {"a": [0, 1], "b": [0, 1]}


@pytest.mark.parametrize("lanes", [BOTH, {"a": [0, 1], "b": [1]}, {"a": [0], "b": [0, 1]}])
def test_the_kth_execution_is_of_the_kth_call(programs, lanes):
  ran(programs, "ab", lanes)
  collector, order = begun(programs, lanes, 2)
  assert order.known == 2
  said = "abbabaab"
  for name in said:
    ran(programs, name, lanes)
    settled(collector, order, programs, lanes)
  assert order.known == 2 + len(said)
  assert names_of(order, programs, 2, 5) == "abb" and names_of(order, programs, 5, 10) == "abaab"
  # All at once, read later.
  ran(programs, said, lanes)
  settled(collector, order, programs, lanes)
  assert names_of(order, programs, 10, 18) == said


def test_a_call_is_not_known_before_all_devices_have_ended_it(programs):
  collector, order = begun(programs, BOTH)
  ran(programs, "a", {"a": [0]})
  settled(collector, order, programs, BOTH)
  assert order.known == 0
  ran(programs, "a", {"a": [1]})
  settled(collector, order, programs, BOTH)
  assert order.known == 1


@pytest.mark.parametrize("before", ["", "a", "ab", "bba"])
@pytest.mark.parametrize("lost", ["ab", "bab", "b", "aa"])
def test_lost_events_shift_no_call(programs, before, lost):
  collector, order = begun(programs, BOTH)
  known = "ba" + before
  ran(programs, known, BOTH)
  settled(collector, order, programs, BOTH)
  ran(programs, lost, BOTH)
  for lane in (0, 1):
    # More than the ring holds, before anybody reads it.
    library.functions().jaxpace_mark_here(lane, programs["other"], 2, 70_000)
  after = "aab"
  for name in after:
    ran(programs, name, BOTH)
    settled(collector, order, programs, BOTH)
  total = len(known) + len(lost)
  assert order.known == total + len(after)
  assert names_of(order, programs, 0, len(known)) == known
  assert sorted(names_of(order, programs, len(known), total)) == sorted(lost)
  assert names_of(order, programs, total, total + len(after)) == after


def test_a_call_that_raised_after_it_was_dispatched_shifts_no_call(programs):
  ran(programs, "aab", BOTH)
  collector, order = begun(programs, BOTH, calls=2)
  assert order.known == 2
  ran(programs, "ba", BOTH)
  settled(collector, order, programs, BOTH)
  assert names_of(order, programs, 2, 4) == "ba"
