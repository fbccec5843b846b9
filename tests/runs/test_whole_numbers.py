"""Whole numbers of Arrow columns, held against `pyarrow.compute`."""

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from hypothesis import given
from hypothesis import strategies as st

from jaxpace.files.schemas import TIME
from jaxpace.runs.columns import whole_numbers
from jaxpace.runs.run import MISSING


@st.composite
def _columns(draw):
  """Columns in chunks that are slices of longer ones, some of their numbers null."""
  bits, signed = draw(st.sampled_from((8, 16, 32, 64))), draw(st.booleans())
  low, high = (-(1 << bits - 1), (1 << bits - 1) - 1) if signed else (0, (1 << min(bits, 63)) - 1)
  kind = getattr(pa, f"{'' if signed else 'u'}int{bits}")()
  numbers = st.lists(st.none() | st.integers(low, high), max_size=20)
  chunks = []
  for values in draw(st.lists(numbers, max_size=3)):
    begin = draw(st.integers(0, len(values)))
    chunks.append(pa.array(values, kind)[begin:draw(st.integers(begin, len(values)))])
  return pa.chunked_array(chunks, kind)


@given(_columns())
def test_values_are_those_of_arrow_and_null_is_missing(column):
  want = pc.fill_null(column.cast(pa.int64()), MISSING).to_numpy()
  found = whole_numbers(column)
  assert found.dtype == np.int64
  np.testing.assert_array_equal(found, want)


def test_what_int64_does_not_hold_becomes_no_other_number():
  column = pa.chunked_array([pa.array([1 << 63, None, 7], pa.uint64())])
  assert whole_numbers(column).tolist() == [TIME, MISSING, 7]
