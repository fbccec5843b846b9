"""The layout of a ring of timestamps."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxpace.core import ring_layout


def test_events_and_blocks_have_the_sizes_that_the_native_code_writes():
  assert ring_layout.EVENT.itemsize == 16
  assert [ring_layout.EVENT.fields[name][1] for name in ("ns", "tag", "seq")] == [0, 8, 12]
  assert (ring_layout.BUFFER.itemsize == ring_layout.BLOCK == 64
          and ring_layout.BUFFER.fields["head"][1] == 0)
  assert ring_layout.HEADER.itemsize <= ring_layout.PAGE


@given(st.integers(1, ring_layout.MOST_BUFFERS),
       st.none() | st.integers(1, 14).map(lambda bits: 1 << bits))
def test_nothing_overlaps_and_pages_are_whole(buffers, capacity):
  where = ring_layout.layout(buffers, capacity)
  assert (where.events >= ring_layout.PAGE + buffers * ring_layout.BLOCK
          and where.events % ring_layout.PAGE == 0)
  assert where.size == where.events + buffers * where.capacity * 16
  assert where.capacity & (where.capacity - 1) == 0
  if capacity is None:
    assert (where.size - where.events <= ring_layout.MOST_BYTES
            or where.capacity == ring_layout.LEAST_CAPACITY)


@pytest.mark.parametrize("buffers, capacity",
                         [(0, None), (ring_layout.MOST_BUFFERS + 1, None), (1, 3), (1, 0), (1, 1),
                          (1, -8)])
def test_what_is_no_ring_is_refused(buffers, capacity):
  with pytest.raises(ValueError, match="device buffers|power of two"):
    ring_layout.layout(buffers, capacity)


def test_views_share_the_memory():
  where = ring_layout.layout(2, 8)
  memory = bytearray(where.size)
  header, blocks, events = ring_layout.views(memory, where)
  header["magic"] = ring_layout.MAGIC
  blocks["rank"] = [3, 4]
  events["ns"][1, 7] = 5
  assert bytes(memory[:16]) == ring_layout.MAGIC
  assert memory[ring_layout.PAGE + 8] == 3 and memory[ring_layout.PAGE + ring_layout.BLOCK + 8] == 4
  assert np.frombuffer(memory[where.size - 16:where.size - 8], "<i8") == 5
