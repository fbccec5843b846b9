"""Taking events out of a ring, against a list of all that were written."""

import threading

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from jaxpace.core import ring_layout
from jaxpace.observation.clocks import host_ring as execution
from jaxpace.observation.clocks.native import library
from jaxpace.record.ring.executions import DeviceBuffer


class Written:
  """A ring as the native code writes it, and everything that was ever written."""

  def __init__(self, capacity):
    self.slots = np.zeros(capacity, ring_layout.EVENT)
    self.all = []

  def write(self, count):
    for _ in range(count):
      index = len(self.all)
      event = (1000 + index, index % 7, (index + 1) % 2**32)
      self.slots[index % len(self.slots)] = event
      self.all.append(event)

  def head(self):
    return len(self.all)


@given(st.integers(1, 5).map(lambda bits: 1 << bits),
       st.lists(st.integers(0, 80), max_size=12))
def test_every_event_is_taken_once_or_counted_as_lost(capacity, rounds):
  ring, buffer, got = Written(capacity), DeviceBuffer(), []
  for count in rounds:
    ring.write(count)
    newest, position = len(ring.all), buffer.position
    taken = buffer.take(ring.slots, ring.head)
    expected = [k for k in range(position, newest) if k >= newest - capacity]
    assert taken.ns.tolist() == [ring.all[k][0] for k in expected]
    assert taken.tag.tolist() == [ring.all[k][1] for k in expected]
    assert taken.lost == max(0, newest - capacity - position)
    assert buffer.position == position + taken.lost + len(taken.ns)
    got += taken.ns.tolist()
  assert len(got) + buffer.lost == buffer.position


@given(st.integers(0, 40), st.sets(st.integers(0, 39)), st.booleans())
def test_slots_that_are_not_finished_are_awaited_and_at_the_end_lost(count, torn, final):
  ring = Written(64)
  ring.write(count)
  for index in torn:
    ring.slots["seq"][index] = 0
  buffer = DeviceBuffer()
  taken = buffer.take(ring.slots, ring.head, final=final)
  there = [k for k in range(count) if k not in torn]
  if not final:
    run = list(range(min([k for k in torn if k < count], default=count)))
    assert (taken.ns.tolist() == [1000 + k for k in run] and taken.lost == 0
            and buffer.position == len(run))
    return
  got = taken.ns.tolist()
  while (position := buffer.position) < count:
    got += buffer.take(ring.slots, ring.head, final=True).ns.tolist()
    assert buffer.position > position
  assert got == [1000 + k for k in there] and buffer.lost == count - len(there)


def test_a_slot_that_stays_unfinished_is_given_up_and_what_follows_comes():
  ring, buffer = Written(16), DeviceBuffer(patience=3)
  ring.write(5)
  ring.slots["seq"][2] = 0
  assert buffer.take(ring.slots, ring.head).ns.tolist() == [1000, 1001]
  assert [len(buffer.take(ring.slots, ring.head).ns) for _ in range(3)] == [0, 0, 0]
  taken = buffer.take(ring.slots, ring.head)
  assert taken.ns.tolist() == [1003, 1004] and taken.lost == 1 and buffer.lost == 1


def test_what_is_written_over_while_it_is_copied_is_not_believed():
  ring = Written(8)
  ring.write(8)
  heads = iter([8, 11, 11])  # three more were begun between the copy and the second look
  taken = DeviceBuffer().take(ring.slots, lambda: next(heads))
  assert taken.lost == 3 and taken.ns.tolist() == [1003, 1004, 1005, 1006, 1007]


@given(st.integers(0, 2**64 - 1), st.integers(0, 2**64 - 1), st.binary(min_size=128, max_size=128),
       st.booleans())
def test_any_content_is_read_in_bounds(head, position, content, final):
  slots = np.frombuffer(content, ring_layout.EVENT)
  buffer = DeviceBuffer(position)
  taken = buffer.take(slots, lambda: head, final=final)
  assert len(taken.ns) <= len(slots) and len(taken.ns) == len(taken.tag)
  assert position <= buffer.position <= max(head, position)
  assert taken.lost >= 0 and taken.lost + len(taken.ns) == buffer.position - position


def test_numbers_beyond_32_bits_are_followed():
  slots = np.zeros(4, ring_layout.EVENT)
  for index in range(2**32 - 2, 2**32 + 2):
    slots[index % 4] = (index, 5, (index + 1) % 2**32)
  taken = DeviceBuffer(2**32 - 2).take(slots, lambda: 2**32 + 2)
  assert taken.ns.tolist() == list(range(2**32 - 2, 2**32 + 2))


def test_what_the_native_code_writes_meanwhile_is_taken_whole():
  assert execution.unavailable() == ""
  ring, program = execution.current(), execution.next_program()
  buffer = DeviceBuffer(int(ring.heads()[3]))
  thread = threading.Thread(target=library.functions().jaxpace_mark_here,
                            args=(3, program, 9, 3_000_000))
  thread.start()
  count, newest, alive = 0, 0, True
  while alive:
    alive = thread.is_alive()
    taken = buffer.take(ring.events[3], lambda: int(ring.blocks["head"][3]))
    assert (taken.tag == (program << 20 | 9)).all()
    if taken.ns.size:
      assert taken.ns[0] >= newest and (np.diff(taken.ns) >= 0).all()
      newest, count = int(taken.ns[-1]), count + len(taken.ns)
  assert count + buffer.lost == 3_000_000
