"""Whole numbers of Arrow columns, held against `pyarrow.compute`."""

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxpace.runs.columns import filled, values_and_known

_NULL = np.iinfo(np.int64).min


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
def test_values_and_nulls_are_those_of_arrow(column):
  values, known = values_and_known(column)
  np.testing.assert_array_equal(known, pc.is_valid(column).to_numpy())
  assert values[known].tolist() == [value for value in column.to_pylist() if value is not None]
  want = pc.fill_null(column.cast(pa.int64()), _NULL).to_numpy()
  np.testing.assert_array_equal(filled(column, _NULL), want)


def test_what_int64_does_not_hold_is_refused_where_it_would_become_another_number():
  with pytest.raises(pa.ArrowInvalid):
    filled(pa.chunked_array([pa.array([1 << 63, None], pa.uint64())]), 0)
