"""The garbage collector under the housekeeper, against what the interpreter itself says."""

import gc
import sys
import weakref

import pytest

from jaxpace.live.housekeeper import GarbageCollector, resident_bytes

old_generation = pytest.mark.skipif(sys.version_info >= (3, 14),
                                    reason="no threshold of an oldest generation")


class Node:
  pass


def cycle():
  """A cycle of garbage; the returned reference tells whether it is still there."""
  node = Node()
  node.itself = node
  return weakref.ref(node)


def aged_cycle():
  """The same, in the oldest generation."""
  node = Node()
  node.itself = node
  gc.collect()
  return weakref.ref(node)


def fill(count):
  """Survivors by the thousand, as a program makes them that builds up its heap."""
  return [[i] for i in range(count)]


@pytest.fixture
def collector():
  one = GarbageCollector()
  one.take()
  yield one
  one.restore()


@old_generation
def test_held_back_there_is_no_full_collection_and_young_garbage_still_goes(collector):
  collector.hold_back()
  old = aged_cycle()
  collector_runs = collector.full
  young = cycle()
  heap = fill(300_000)
  assert collector.full == collector_runs and old() is not None and young() is None
  assert collector.withholds
  collector.collect()
  assert old() is None and len(heap) == 300_000 and collector.full == collector_runs + 1


@old_generation
def test_left_alone_the_interpreter_collects_by_itself_and_that_is_counted(collector):
  assert not collector.withholds
  # The interpreter waits until the oldest generation has grown by a quarter, and this process's may
  # be large.
  gc.freeze()
  try:
    gc.collect()
    before = collector.full
    heap = fill(300_000)
    assert heap and collector.full > before and collector.full_ns > 0
  finally:
    gc.unfreeze()


def test_frozen_objects_are_out_of_collections_until_a_collection_is_asked_for(collector):
  heap, node = fill(5000), Node()
  node.itself = node
  gone = weakref.ref(node)
  collector.freeze()
  assert gc.get_freeze_count() > 1000
  del node
  gc.collect()
  assert gone() is not None
  collector.collect()
  assert gone() is None and gc.get_freeze_count() > 1000  # and frozen again
  collector.restore()
  assert gc.get_freeze_count() == 0 and heap


@pytest.mark.parametrize("mode", ["hold_back", "freeze"])
@pytest.mark.parametrize("enabled", [True, False])
def test_settings_are_restored_whatever_they_were(mode, enabled):
  thresholds = gc.get_threshold()
  try:
    gc.set_threshold(500, 7, 5)
    (gc.enable if enabled else gc.disable)()
    collector = GarbageCollector()
    collector.take()
    getattr(collector, mode)()
    assert enabled or not gc.isenabled(), "what the user switched off stays so"
    collector.restore()
    assert gc.isenabled() == enabled and gc.get_freeze_count() == 0
    assert gc.get_threshold()[:2] == (500, 7)
  finally:
    gc.set_threshold(*thresholds)
    gc.enable()


def test_what_the_user_froze_stays_frozen():
  heap = fill(5000)
  gc.freeze()
  frozen = gc.get_freeze_count()
  collector = GarbageCollector()
  collector.take()
  collector.freeze()
  collector.collect()
  collector.restore()
  assert gc.get_freeze_count() >= frozen > 1000 and heap
  gc.unfreeze()


MIB = 1 << 20


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="elsewhere unknown")
def test_resident_bytes_grow_with_memory_that_is_written():
  grown = []
  for _ in range(3):
    before = resident_bytes()
    block = bytearray(b"x") * (64 * MIB)
    grown.append(resident_bytes() - before)
    del block
  # Threads of tests before it may give memory back meanwhile.
  assert any(60 * MIB < each < 100 * MIB for each in grown)
