"""Small parts, read in one go, and large ones: the same rows, the same said of what is wrong."""

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxpace.files.schemas import TIME
from jaxpace.runs import columns, growing, table_reader
from jaxpace.runs.columns import whole_numbers
from jaxpace.runs.run import MISSING
from jaxpace.runs.table_reader import Part, TableFiles
from tests.quick import examples

WANTED = (*growing.STEPS_COLUMNS, *growing.GUARD_COLUMNS)
LONG = st.integers(-2**40, 2**40)
STEP = st.integers(0, 2**40)


def table(rows, steps, ranks, attempt, gaps):
  return pa.table({
      "step": pa.array(steps[:rows], pa.int64()), "rank": pa.array(ranks[:rows], pa.int32()),
      "process": pa.array([3] * rows, pa.int32()),
      "attempt": pa.array([attempt] * rows, pa.int32()),
      "gap_ns": pa.array(gaps[:rows], pa.int64()),
      "decision_guard_on": pa.array([0.5] * rows, pa.float32())})


def read(path, small, monkeypatch):
  """(columns, range of steps, problems, names of parts that vanished)."""
  monkeypatch.setattr(table_reader, "_SMALL", small)
  found = TableFiles("steps", [Part("run", 0, 0, 0, path)])
  rows = [{name: values.tolist() for name, values in data.items()} for data in found.read(WANTED)]
  return rows, found.step_range, found.problems, found.vanished


@pytest.fixture(scope="module")
def path(tmp_path_factory):
  return tmp_path_factory.mktemp("small") / "part.parquet"


@settings(max_examples=examples(40), deadline=None)
@given(rows=st.integers(1, 12), steps=st.lists(STEP, min_size=12, max_size=12),
       ranks=st.lists(st.integers(0, 2), min_size=12, max_size=12), attempt=st.integers(0, 5),
       gaps=st.lists(st.none() | LONG, min_size=12, max_size=12), statistics=st.booleans())
def test_the_numbers_of_a_small_part(path, rows, steps, ranks, attempt, gaps, statistics):
  pq.write_table(table(rows, steps, ranks, attempt, gaps), path, write_statistics=statistics)
  (found,) = TableFiles("steps", [Part("run", 0, 0, 0, path)]).read(WANTED)
  assert (set(found) == {"step", "rank", "process", "attempt", "gap_ns", "decision_guard_on"})
  assert {values.dtype for values in found.values()} == {np.dtype(np.int64), np.dtype(np.float32)}
  expected = {"step": steps[:rows], "rank": ranks[:rows], "attempt": [attempt] * rows,
              "gap_ns": [MISSING if gap is None else gap for gap in gaps[:rows]]}
  for name, values in expected.items():
    np.testing.assert_array_equal(found[name], values)


@pytest.mark.parametrize("change", [
    lambda t: t.set_column(0, "step", pa.array([1, None, 3], pa.int64())),
    lambda t: t.set_column(3, "attempt", pa.array([0.0, 0.0, 0.0])),
    lambda t: t.set_column(4, "gap_ns", pa.array(["a", "b", "c"])),
    lambda t: t.set_column(4, "gap_ns", pa.array([1, 2, 3], pa.timestamp("ns"))),
    lambda t: t.set_column(0, "step", pa.array([1, -2, 3])),
    lambda t: t.set_column(0, "step", pa.array([1, 2, 2**64 - 1], pa.uint64())),
    lambda t: t.set_column(4, "gap_ns", pa.array([1, 2, 2**63 - 1])),
    lambda t: t.append_column("rank", t.column("rank")),
    lambda t: t.drop_columns(["rank"]),
    lambda t: t.slice(0, 0),
])
def test_what_no_recorder_writes_is_read_alike_whatever_its_size(path, change, monkeypatch):
  pq.write_table(change(table(3, [1, 2, 3], [0, 1, 2], 0, [5, 6, 7])), path)
  assert read(path, 0, monkeypatch) == read(path, 1 << 18, monkeypatch)


def test_torn_and_missing_files_are_left_out_whatever_their_size(path, monkeypatch):
  pq.write_table(table(3, [1, 2, 3], [0, 1, 2], 0, [5, 6, 7]), path)
  whole = path.read_bytes()
  for data in (b"", whole[:-4], whole[:50], b"PAR1" + whole[4:-9] + b"PAR1"):
    path.write_bytes(data)
    large, small = (read(path, most, monkeypatch) for most in (0, 1 << 18))
    assert not small[0] and large[:2] == small[:2] and len(large[2]) == len(small[2]) == 1
  path.write_bytes(whole)
  monkeypatch.setattr(table_reader, "_MOST_HELD", len(whole) - 1)  # no room: read by its path
  (rows,), *_ = read(path, 1 << 18, monkeypatch)
  assert rows["step"] == [1, 2, 3]
  assert read(path.with_name("gone"), 1 << 18, monkeypatch)[3] == {"gone"}


def test_rows_of_the_same_columns_are_put_together_in_their_order():
  a = {"step": np.array([1, 2]), "gap_ns": np.array([3, 4])}
  b = {"step": np.array([5])}
  c = {"step": np.array([6]), "gap_ns": np.array([7])}
  both, alone = columns.joined([a, b, c])
  assert both["step"].tolist() == [1, 2, 6] and both["gap_ns"].tolist() == [3, 4, 7]
  assert alone["step"].tolist() == [5] and columns.joined([]) == []


# Whole numbers of Arrow columns, held against `pyarrow.compute`.

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
