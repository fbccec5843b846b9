"""Puts timestamps into a program that XLA has compiled for NVIDIA GPUs: calls between what it
launches.

As on CPUs (see `thunks`), XLA writes a compiled program as a list of thunks: kernels, collectives,
loops with lists of their own. They are launched on the stream in the order of the list, so a
timestamp before or after a thunk is taken before or after it; it needs no memory to wait for.
Kernels, their order and all memory stay as they were, and so do the results, bit for bit.

A collective that runs beside computation has a list of its own, on a stream for communication. Its
timestamps are in that list: they tell when it began and ended there, whatever is computed
meanwhile, and computation does not wait for them.

Numbers of fields are those of XLA's `GpuExecutableProto` and `ThunkProto`
(xla/service/gpu/gpu_executable.proto, xla/backends/gpu/runtime/thunk.proto), the same in jaxlib
0.10.2 to 0.12.
"""

from __future__ import annotations

import functools
import struct
from collections.abc import Callable, Container, Iterable, Mapping, Sequence

import pyarrow as pa

from jaxpace.core.ring_layout import END_TAG, FIRST_TAG, START_TAG
from jaxpace.observation.clocks.native import cuda
from jaxpace.observation.clocks.native.library import MARK
from jaxpace.observation.partitioned import wire
from jaxpace.observation.partitioned.thunks import Tags
from jaxpace.observation.partitioned.wire import TimestampError

_EXECUTABLE = 1
"""In what `serialize` writes after its header, where that is one message: the compiled program."""
_PROGRAM_THUNKS = 13
"""In a compiled program: its thunks."""
_THUNKS = 1
"""In a list of thunks: a thunk."""
_INFO, _CUSTOM_CALL, _ASYNC_START, _ASYNC_DONE = 1, 30, 57, 58
_NAME, _ID = 1, 3
"""In a thunk's information: the instruction that it runs, and a number of its own."""
_KINDS = {38: "all-gather", 39: "all-reduce", 40: "reduce-scatter", 41: "all-to-all",
          42: "ragged-all-to-all", 43: "collective-permute", 46: "collective-broadcast"}
"""Thunks of a collective."""
_OF_ASYNC = _ASYNC_START, 3
_LISTS = (2,), (6, 2), (7, 2), (7, 3), _OF_ASYNC
"""Where thunks that run others, choose, loop, and start others on another stream have lists."""
_TYPED_FFI = 4


def unnamed(kind: str) -> str:
  """Under what collectives are counted whose thunk has another name than their instruction: pairs
  of start and end that jaxlib 0.10 runs as one."""
  return f"{kind} of another name"


def timestamped(data: bytes, program: int, names: Container[str], first_tag: int = FIRST_TAG,
                ends: bool = True) -> tuple[bytes, Mapping[str, Sequence[int]]]:
  """Puts timestamps into a compiled program, as `thunks.timestamped` does; see `unnamed` for
  collectives of other names.

  Raises:
    TimestampError: it is no such program, or has more collectives than there are tags.
  """
  lists = _Lists(program, names, first_tag, ends)
  try:
    length, begin = wire.varint(data, 0)
    header, rest = data[:begin + length], data[begin + length:]
    if is_records(rest):
      # Since jaxlib 0.11: a file of records, one of which is the file with the program.
      outer = read_records(rest)
      rest = write_records([lists.in_file(each) if is_records(each) else each for each in outer])
    else:
      rest = wire.written(wire.changed(wire.read(rest), [_EXECUTABLE], lists.in_file))
  except wire.WireError as error:
    raise TimestampError(f"the compiler's program can't be read: {error}") from error
  if not lists.found_program:
    raise TimestampError("the compiler's program is in a form that jaxpace doesn't know")
  return header + rest, lists.enter_tags


class _Lists(Tags):
  """Puts timestamps into lists of thunks."""

  found_program = False
  # Above what the compiler numbers.
  _id = 1 << 40

  def in_file(self, data: bytes) -> bytes:
    """A program as a file of records, with timestamps: the last record is all but its code."""
    if not is_records(data):
      raise wire.WireError("it is not a file of records")
    *others, program = read_records(data)
    fields = wire.read(program)
    thunks = wire.every(fields, _PROGRAM_THUNKS)
    if not thunks:
      raise wire.WireError("it lists nothing to run")
    self.found_program = True
    now = self._around(thunks)
    if self.ends:
      now = [self._mark(thunks[0], START_TAG), *now, self._mark(thunks[-1], END_TAG)]
    # Order of different fields means nothing; that of the thunks does.
    fields = [field for field in fields if field.number != _PROGRAM_THUNKS]
    return write_records([*others, wire.written(
        [*fields, *(wire.text(_PROGRAM_THUNKS, thunk) for thunk in now)])])

  def _around(self, thunks: Iterable[bytes]) -> list[bytes]:
    """Thunks of a list, with timestamps around each collective, and in the lists in them."""
    found: list[bytes] = []
    for thunk in thunks:
      parts = wire.read(thunk)
      kinds, name = {field.number for field in parts}, _name(parts)
      if name in self.names and _ASYNC_START in kinds:
        pair = functools.partial(_in_list, functools.partial(self._with_pair, name))
        found.append(wire.written(wire.changed(parts, _OF_ASYNC, pair)))
      elif name in self.names and _ASYNC_DONE not in kinds:
        found += self._with_pair(name, [thunk])
      elif self.ends and (kind := next((_KINDS[each] for each in kinds if each in _KINDS), "")):
        found += self._with_pair(unnamed(kind), [thunk])
      else:
        found.append(self._inside(parts))
    return found

  def _inside(self, parts: list[wire.Field]) -> bytes:
    for path in _LISTS:
      parts = wire.changed(parts, path, functools.partial(_in_list, self._around))
    return wire.written(parts)

  def _with_pair(self, name: str, thunks: Sequence[bytes]) -> list[bytes]:
    tag = self.take(name)
    return [self._mark(thunks[0], tag), *thunks, self._mark(thunks[-1], tag + 1)]

  def _mark(self, beside: bytes, tag: int) -> bytes:
    """A thunk that calls the handler, like one beside it in all else."""
    self._id += 1
    said = [field for field in wire.read(wire.first(wire.read(beside), _INFO))
            if field.number not in (_NAME, _ID)]
    mark = wire.message(2, wire.message(1, wire.whole(5, self.program << 32 | tag)))
    call = [wire.text(1, MARK), wire.whole(5, _TYPED_FFI),
            wire.message(6, wire.message(1, wire.text(1, "mark"), mark)), wire.text(8, b"")]
    return wire.written([
        wire.message(_INFO, wire.text(_NAME, f"{MARK}.{tag}"), wire.whole(_ID, self._id), *said),
        wire.message(_CUSTOM_CALL, *call)])


def _in_list(change: Callable[[list[bytes]], list[bytes]], sequence: bytes) -> bytes:
  """A list of thunks with others in their place."""
  thunks = change(wire.every(wire.read(sequence), _THUNKS))
  return wire.written([wire.text(_THUNKS, each) for each in thunks])


def _name(parts: Iterable[wire.Field]) -> str:
  infos = wire.every(parts, _INFO)
  names = wire.every(wire.read(infos[0]), _NAME) if infos else []
  return names[0].decode() if names else ""


# Files of records, in which XLA writes programs for GPUs: Riegeli's format, read and written.
#
# A file is a list of chunks with records, cut by a header at the beginning of each block of 64 KiB
# (https://github.com/google/riegeli, doc/riegeli_records_file_format.md). What is written here is
# one chunk that is not compressed.

_BLOCK, _BLOCK_HEADER, _CHUNK_HEADER = 1 << 16, 24, 40
_USABLE = _BLOCK - _BLOCK_HEADER
_SIGNATURE = bytes.fromhex(
    "83af70d10d884a3f0000000000000000400000000000000091bac23c9287e1a9"
    "0000000000000000e19f13c0e9b1c37273000000000000000000000000000000")
"""How each file begins: a block's header, and a chunk without records."""
_SIMPLE = ord("r")
_CODECS = {ord("s"): "snappy", ord("b"): "brotli", ord("z"): "zstd"}


def is_records(data: bytes) -> bool:
  """Whether data is such a file."""
  return data.startswith(_SIGNATURE)


def read_records(data: bytes) -> list[bytes]:
  """Reads a file's records.

  Raises:
    WireError: it is cut short, or in a form that XLA does not write.
  """
  chunks = b"".join(data[at + _BLOCK_HEADER:at + _BLOCK] for at in range(0, len(data), _BLOCK))
  place, found = 0, []
  while place < len(chunks):
    if place + _CHUNK_HEADER > len(chunks):
      raise wire.WireError("a file of records is cut short")
    _, size, _, kind, decoded = struct.unpack_from("<5Q", chunks, place)
    kind, count = kind & 255, kind >> 8
    place += _CHUNK_HEADER
    if kind == _SIMPLE:
      found += _records(chunks[place:place + size], count, decoded)
    elif count:
      raise wire.WireError(f"a file of records has a chunk of kind {chr(kind)!r}")
    place += size
  return found


def _records(data: bytes, count: int, decoded: int) -> list[bytes]:
  """Records of a chunk."""
  size, place = wire.varint(data, 1)
  sizes, values = data[place:place + size], data[place + size:]
  if data[0]:
    if data[0] not in _CODECS:
      raise wire.WireError(f"records are compressed in an unknown way, {data[0]}")
    sizes, values = (_expanded(each, _CODECS[data[0]]) for each in (sizes, values))
  lengths = wire.packed(sizes)
  if len(lengths) != count or sum(lengths) != decoded or len(values) != decoded:
    raise wire.WireError("records are not as long as said")
  place, found = 0, []
  for length in lengths:
    found.append(values[place:place + length])
    place += length
  return found


def _expanded(data: bytes, codec: str) -> bytes:
  size, place = wire.varint(data, 0)
  try:
    return bytes(pa.decompress(data[place:], size, codec=codec, asbytes=True))
  except (OSError, ValueError, NotImplementedError) as error:
    raise wire.WireError(f"records can't be expanded: {error}") from error


def write_records(records: Sequence[bytes]) -> bytes:
  """Inverse of `read_records`."""
  sizes = b"".join(wire.of_number(len(record)) for record in records)
  data = b"".join([b"\0", wire.of_number(len(sizes)), sizes, *records])
  said = struct.pack("<4Q", len(data), cuda.riegeli_hash(data), _SIMPLE | len(records) << 8,
                     sum(map(len, records)))
  chunk = struct.pack("<Q", cuda.riegeli_hash(said)) + said + data
  begin = len(_SIGNATURE)
  end = max(_behind(begin, len(chunk)), begin + len(records))
  chunk = chunk.ljust(len(records), b"\0")
  parts, place, at = [_SIGNATURE], begin, 0
  while at < len(chunk):
    if place % _BLOCK == 0:
      around = struct.pack("<2Q", place - begin, end - place)
      parts.append(struct.pack("<Q", cuda.riegeli_hash(around)) + around)
      place += _BLOCK_HEADER
    step = min(_BLOCK - place % _BLOCK, len(chunk) - at)
    parts.append(chunk[at:at + step])
    at, place = at + step, place + step
  return b"".join(parts)


def _behind(begin: int, size: int) -> int:
  """Where bytes that begin at a place end, with the headers of the blocks that they reach into."""
  return begin + size + (size + (begin + _USABLE - 1) % _BLOCK) // _USABLE * _BLOCK_HEADER
