"""The ceilings, on memory that the test makes up; and the resident bytes, on memory that is really
there."""

import sys

import pytest

from jaxpace.live.housekeeping.collector import Ceiling, resident_bytes
from tests.lib.said import numbers

MIB = 1 << 20


class Machine:
  """Resident bytes and a clock, both settable."""

  def __init__(self):
    self.bytes, self.now, self.looks = 100 * MIB, 0.0, 0

  def resident(self):
    self.looks += 1
    return self.bytes

  def later(self, mib):
    self.now, self.bytes = self.now + 1, mib * MIB


@pytest.fixture
def machine():
  return Machine()


def ceiling(machine, max_bytes=None, max_growth=None, max_objects=None):
  return Ceiling(max_bytes, max_growth, max_objects, machine.resident, lambda: machine.now)


def test_growth_counts_from_the_last_collection(machine):
  one = ceiling(machine, max_growth=10 * MIB)
  one.collected()
  machine.later(110)
  assert one.reached(0) is None
  machine.later(111)
  assert "11 MiB more" in one.reached(0)
  one.collected()
  machine.later(121)
  assert one.reached(0) is None


def test_without_a_collection_yet_growth_counts_from_the_first_look(machine):
  one = ceiling(machine, max_growth=10 * MIB)
  assert one.reached(0) is None
  machine.later(120)
  assert one.reached(0)


def test_a_heap_that_is_simply_large_is_not_collected_over_and_over(machine):
  one = ceiling(machine, max_bytes=200 * MIB)
  one.collected()
  machine.later(201)
  assert "201 MiB resident" in one.reached(0)
  one.collected()  # which freed nothing
  machine.later(210)
  assert one.reached(0) is None
  machine.later(212)
  assert one.reached(0)


def test_objects_are_looked_at_every_time_and_memory_seldom(machine):
  one = ceiling(machine, max_bytes=200 * MIB, max_objects=1000)
  for _ in range(50):
    assert one.reached(1000) is None
  assert machine.looks == 1
  assert numbers(one.reached(1001))[0] == 1001


def test_none_means_no_ceiling(machine):
  one = ceiling(machine)
  machine.later(10**6)
  assert one.reached(10**9) is None


def test_where_the_system_tells_nothing_only_objects_count(machine):
  one = Ceiling(1, 1, 10, lambda: None, lambda: 0.0)
  one.collected()
  assert one.reached(10) is None and one.reached(11)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="elsewhere unknown")
def test_resident_bytes_grow_with_memory_that_is_written():
  before = resident_bytes()
  block = bytearray(b"x") * (64 * MIB)
  after = resident_bytes()
  assert 60 * MIB < after - before < 100 * MIB and block
