"""The layout of a ring of marks."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxpace.core import marks


def test_events_and_blocks_have_the_sizes_that_the_native_code_writes():
  assert marks.EVENT.itemsize == 16
  assert [marks.EVENT.fields[name][1] for name in ("ns", "tag", "seq")] == [0, 8, 12]
  assert marks.LANE.itemsize == marks.BLOCK == 64 and marks.LANE.fields["head"][1] == 0
  assert marks.HEADER.itemsize <= marks.PAGE


@given(st.integers(1, marks.MOST_LANES), st.none() | st.integers(1, 14).map(lambda bits: 1 << bits))
def test_nothing_overlaps_and_pages_are_whole(lanes, capacity):
  where = marks.layout(lanes, capacity)
  assert where.events >= marks.PAGE + lanes * marks.BLOCK and where.events % marks.PAGE == 0
  assert where.size == where.events + lanes * where.capacity * 16
  assert where.capacity & (where.capacity - 1) == 0
  if capacity is None:
    assert where.size - where.events <= marks.MOST_BYTES or where.capacity == marks.LEAST_CAPACITY


@pytest.mark.parametrize("lanes, capacity",
                         [(0, None), (marks.MOST_LANES + 1, None), (1, 3), (1, 0), (1, 1), (1, -8)])
def test_what_is_no_ring_is_refused(lanes, capacity):
  with pytest.raises(ValueError, match="device buffers|power of two"):
    marks.layout(lanes, capacity)


def test_views_share_the_memory():
  where = marks.layout(2, 8)
  memory = bytearray(where.size)
  views = marks.views(memory, where)
  views.header["magic"] = marks.MAGIC
  views.blocks["rank"] = [3, 4]
  views.events["ns"][1, 7] = 5
  assert bytes(memory[:16]) == marks.MAGIC
  assert memory[marks.PAGE + 8] == 3 and memory[marks.PAGE + marks.BLOCK + 8] == 4
  assert np.frombuffer(memory[where.size - 16:where.size - 8], "<i8") == 5
