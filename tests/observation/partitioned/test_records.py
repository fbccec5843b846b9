"""Riegeli's files of records: what is written is read, and bears the hashes that XLA looks at."""

import pathlib
import struct

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxpace.observation.clocks.native import cuda
from jaxpace.observation.partitioned import gpu_thunks, wire
from tests.quick import examples

BLOCK, HEADER = 1 << 16, 24
# Of XLA's own making: compressed, of several records.
WRITTEN_BY_XLA = pathlib.Path(__file__).parent / "gpu_program_0.11.2.bin"


def file_of_xla():
  data = WRITTEN_BY_XLA.read_bytes()
  length, begin = wire.varint(data, 0)
  return data[begin + length:]


def chunks(data):
  """(header, data) of each chunk, headers of blocks taken out."""
  stream = b"".join(data[at + HEADER:at + BLOCK] for at in range(0, len(data), BLOCK))
  place = 0
  while place < len(stream):
    size = struct.unpack_from("<Q", stream, place + 8)[0]
    yield stream[place:place + 40], stream[place + 40:place + 40 + size]
    place += 40 + size


def assert_hashes_hold(data):
  for at in range(0, len(data), BLOCK):
    assert struct.unpack_from("<Q", data, at)[0] == cuda.riegeli_hash(data[at + 8:at + HEADER])
  count = 0
  for header, content in chunks(data):
    said, _, of_content = struct.unpack_from("<3Q", header)
    assert said == cuda.riegeli_hash(header[8:])
    assert of_content == cuda.riegeli_hash(content)
    count += 1
  return count


def test_hashes_are_those_that_xla_wrote():
  # 0, 16, 32 bytes, and two lengths that are no multiple of 32.
  assert assert_hashes_hold(file_of_xla()) == 2
  (inner,) = filter(gpu_thunks.is_records, gpu_thunks.read_records(file_of_xla()))
  assert assert_hashes_hold(inner) >= 2


@given(st.integers(0, 100))
def test_a_hash_depends_on_every_byte(length):
  data = bytes(range(length))
  changed = [bytes([*data[:at], data[at] ^ 1, *data[at + 1:]]) for at in range(length)]
  assert len({cuda.riegeli_hash(each) for each in (data, data + b"\0", *changed)}) == length + 2


@settings(max_examples=examples(60), deadline=None)
@given(st.lists(st.one_of(
    st.binary(max_size=40), st.integers(BLOCK - 200, BLOCK + 200).map(lambda size: b"x" * size)),
    max_size=8))
def test_records_come_back_as_they_were(wanted):
  data = gpu_thunks.write_records(wanted)
  assert gpu_thunks.is_records(data)
  assert gpu_thunks.read_records(data) == wanted
  assert assert_hashes_hold(data) == 2
  # Each block says how far the chunk that it cuts reaches.
  for at in range(BLOCK, len(data), BLOCK):
    before, after = struct.unpack_from("<2Q", data, at + 8)
    assert (at - before, at + after) == (64, len(data))


def test_files_of_xla_come_back_as_they_were():
  wanted = gpu_thunks.read_records(file_of_xla())
  assert gpu_thunks.read_records(gpu_thunks.write_records(wanted)) == wanted


@pytest.mark.parametrize("cut", [1, 100, 3000])
def test_a_file_that_is_cut_short_is_refused(cut):
  with pytest.raises(wire.WireError):
    gpu_thunks.read_records(file_of_xla()[:-cut])
