"""Executions in their order, from timestamps alone: several programs, some devices, events lost."""

import numpy as np
import pytest

from jaxpace.observation.clocks import host_ring
from jaxpace.observation.clocks.native import library
from jaxpace.record.ring.collect import Collector
from jaxpace.record.ring.executions import Executions


@pytest.fixture
def programs():
  assert host_ring.unavailable() == ""
  return {name: host_ring.next_program() for name in ("a", "b", "other")}


def ran(programs, names, buffers):
  """Timestamps of executions, one after the other, on each of the device buffers that a program
  has."""
  for name in names:
    for buffer in buffers[name]:
      for tag in (0, 1):
        library.functions().jaxpace_mark_here(buffer, programs[name], tag, 1)


def begun(programs, buffers):
  collector = Collector()
  collector.skip({programs[name]: on for name, on in buffers.items()})
  return collector


def settled(collector, programs, buffers):
  """Names of what has ended since the last call."""
  collector.collect(lambda: set(programs.values()))
  by_number = {number: name for name, number in programs.items()}
  return "".join(by_number[program] for program, _ in collector.settle(
      {programs[name]: on for name, on in buffers.items()}))


BOTH = {"a": [0, 1], "b": [0, 1]}


@pytest.mark.parametrize("buffers", [BOTH, {"a": [0, 1], "b": [1]}, {"a": [0], "b": [0, 1]}])
def test_executions_come_in_their_order_without_those_before(programs, buffers):
  ran(programs, "ab", buffers)
  collector = begun(programs, buffers)
  said = "abbabaab"
  for name in said:
    ran(programs, name, buffers)
    assert settled(collector, programs, buffers) == name
  # All at once, read later.
  ran(programs, said, buffers)
  assert settled(collector, programs, buffers) == said


def test_an_execution_is_not_over_before_all_devices_have_ended_it(programs):
  collector = begun(programs, BOTH)
  ran(programs, "a", {"a": [0]})
  assert settled(collector, programs, BOTH) == ""
  ran(programs, "a", {"a": [1]})
  assert settled(collector, programs, BOTH) == "a"


@pytest.mark.parametrize("before", ["", "a", "ab", "bba"])
@pytest.mark.parametrize("lost", ["ab", "bab", "b", "aa"])
def test_lost_events_shift_no_execution(programs, before, lost):
  collector = begun(programs, BOTH)
  known = "ba" + before
  ran(programs, known, BOTH)
  assert settled(collector, programs, BOTH) == known
  ran(programs, lost, BOTH)
  for buffer in (0, 1):
    # More than the ring holds, before anybody reads it.
    library.functions().jaxpace_mark_here(buffer, programs["other"], 2, 70_000)
  found = ""
  after = "aab"
  for name in after:
    ran(programs, name, BOTH)
    found += settled(collector, programs, BOTH)
  assert sorted(found[:len(lost)]) == sorted(lost) and found[len(lost):] == after


def test_a_first_execution_that_warms_up_counts_like_the_median():
  assert host_ring.unavailable() == ""
  collector, at = Collector(), np.arange(5)
  nothing = np.zeros(0, np.int64)
  begin, took = at * 1_000, np.array([900, 10, 10, 10, 20])
  collector._ended[0, 1] = [
      Executions(at[part], begin[part], (begin + took)[part], nothing, nothing, nothing)
      for part in (slice(0, 2), slice(2, 5))]
  assert collector.seconds(1) == pytest.approx(60e-9)
  assert collector.seconds(2) == 0
