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
  ring, buffer = Written(capacity), DeviceBuffer()
  for count in rounds:
    ring.write(count)
    newest, position = len(ring.all), buffer.position
    tag, ns, lost = buffer.take(ring.slots, ring.head)
    expected = [k for k in range(position, newest) if k >= newest - capacity]
    assert ns.tolist() == [ring.all[k][0] for k in expected]
    assert tag.tolist() == [ring.all[k][1] for k in expected]
    assert lost == max(0, newest - capacity - position)
    assert buffer.position == position + lost + len(ns)


@given(st.integers(0, 40), st.sets(st.integers(0, 39)), st.booleans())
def test_slots_that_are_not_finished_are_awaited_and_at_the_end_lost(count, torn, final):
  ring = Written(64)
  ring.write(count)
  for index in torn:
    ring.slots["seq"][index] = 0
  buffer = DeviceBuffer()
  _, ns, lost = buffer.take(ring.slots, ring.head, final=final)
  there = [k for k in range(count) if k not in torn]
  if not final:
    run = list(range(min([k for k in torn if k < count], default=count)))
    assert (ns.tolist() == [1000 + k for k in run] and lost == 0
            and buffer.position == len(run))
    return
  got = ns.tolist()
  while (position := buffer.position) < count:
    _, ns, more = buffer.take(ring.slots, ring.head, final=True)
    got, lost = got + ns.tolist(), lost + more
    assert buffer.position > position
  assert got == [1000 + k for k in there] and lost == count - len(there)


def test_a_slot_that_stays_unfinished_is_given_up_and_what_follows_comes():
  ring, buffer = Written(16), DeviceBuffer(patience=3)
  ring.write(5)
  ring.slots["seq"][2] = 0
  found = [buffer.take(ring.slots, ring.head) for _ in range(5)]
  assert [(ns.tolist(), lost) for _, ns, lost in found] == [
      ([1000, 1001], 0), *[([], 0)] * 3, ([1003, 1004], 1)]


def test_what_is_written_over_while_it_is_copied_is_not_believed():
  ring = Written(8)
  ring.write(8)
  heads = iter([8, 11, 11])  # three more were begun between the copy and the second look
  _, ns, lost = DeviceBuffer().take(ring.slots, lambda: next(heads))
  assert lost == 3 and ns.tolist() == [1003, 1004, 1005, 1006, 1007]


@given(st.integers(0, 2**64 - 1), st.integers(0, 2**64 - 1), st.binary(min_size=128, max_size=128),
       st.booleans())
def test_any_content_is_read_in_bounds(head, position, content, final):
  slots = np.frombuffer(content, ring_layout.EVENT)
  buffer = DeviceBuffer(position)
  tag, ns, lost = buffer.take(slots, lambda: head, final=final)
  assert len(ns) <= len(slots) and len(ns) == len(tag)
  assert position <= buffer.position <= max(head, position)
  assert lost >= 0 and lost + len(ns) == buffer.position - position


def test_numbers_beyond_32_bits_are_followed():
  slots = np.zeros(4, ring_layout.EVENT)
  for index in range(2**32 - 2, 2**32 + 2):
    slots[index % 4] = (index, 5, (index + 1) % 2**32)
  _, ns, _ = DeviceBuffer(2**32 - 2).take(slots, lambda: 2**32 + 2)
  assert ns.tolist() == list(range(2**32 - 2, 2**32 + 2))


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
    tag, ns, lost = buffer.take(ring.events[3], lambda: int(ring.blocks["head"][3]))
    assert (tag == (program << 20 | 9)).all()
    count += len(ns) + lost
    if ns.size:
      assert ns[0] >= newest and (np.diff(ns) >= 0).all()
      newest = int(ns[-1])
  assert count == 3_000_000
