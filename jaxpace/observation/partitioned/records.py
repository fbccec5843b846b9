"""Files of records, in which XLA writes programs for GPUs: Riegeli's format, read and written.

A file is a list of chunks with records, cut by a header at the beginning of each block of 64 KiB
(https://github.com/google/riegeli, doc/riegeli_records_file_format.md). What is written here is
one chunk that is not compressed.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence

import pyarrow as pa

from jaxpace.observation.partitioned import wire
from jaxpace.observation.partitioned.wire import WireError

_BLOCK, _BLOCK_HEADER, _CHUNK_HEADER = 1 << 16, 24, 40
_USABLE = _BLOCK - _BLOCK_HEADER
_SIGNATURE = bytes.fromhex(
    "83af70d10d884a3f0000000000000000400000000000000091bac23c9287e1a9"
    "0000000000000000e19f13c0e9b1c37273000000000000000000000000000000")
"""How each file begins: a block's header, and a chunk without records."""
_SIMPLE = ord("r")
_CODECS = {ord("s"): "snappy", ord("b"): "brotli", ord("z"): "zstd"}

Hash = Callable[[bytes], int]


def is_file(data: bytes) -> bool:
  """Whether data is such a file."""
  return data.startswith(_SIGNATURE)


def read(data: bytes) -> list[bytes]:
  """Reads a file's records.

  Raises:
    WireError: it is cut short, or in a form that XLA does not write.
  """
  chunks = b"".join(data[at + _BLOCK_HEADER:at + _BLOCK] for at in range(0, len(data), _BLOCK))
  place, found = 0, []
  while place < len(chunks):
    if place + _CHUNK_HEADER > len(chunks):
      raise WireError("a file of records is cut short")
    _, size, _, kind, decoded = struct.unpack_from("<5Q", chunks, place)
    kind, count = kind & 255, kind >> 8
    place += _CHUNK_HEADER
    if kind == _SIMPLE:
      found += _records(chunks[place:place + size], count, decoded)
    elif count:
      raise WireError(f"a file of records has a chunk of kind {chr(kind)!r}")
    place += size
  return found


def _records(data: bytes, count: int, decoded: int) -> list[bytes]:
  """Records of a chunk."""
  size, place = wire.varint(data, 1)
  sizes, values = data[place:place + size], data[place + size:]
  if data[0]:
    if data[0] not in _CODECS:
      raise WireError(f"records are compressed in an unknown way, {data[0]}")
    sizes, values = (_expanded(each, _CODECS[data[0]]) for each in (sizes, values))
  lengths = wire.packed(sizes)
  if len(lengths) != count or sum(lengths) != decoded or len(values) != decoded:
    raise WireError("records are not as long as said")
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
    raise WireError(f"records can't be expanded: {error}") from error


def written(records: Sequence[bytes], hash_of: Hash) -> bytes:
  """Inverse of `read`.

  Args:
    records: of any length.
    hash_of: HighwayHash with 64 bits, by Riegeli's key.
  """
  sizes = b"".join(wire.of_number(len(record)) for record in records)
  data = b"".join([b"\0", wire.of_number(len(sizes)), sizes, *records])
  said = struct.pack("<4Q", len(data), hash_of(data), _SIMPLE | len(records) << 8,
                     sum(map(len, records)))
  chunk = struct.pack("<Q", hash_of(said)) + said + data
  begin = len(_SIGNATURE)
  end = max(_behind(begin, len(chunk)), begin + len(records))
  chunk = chunk.ljust(len(records), b"\0")
  parts, place, at = [_SIGNATURE], begin, 0
  while at < len(chunk):
    if place % _BLOCK == 0:
      around = struct.pack("<2Q", place - begin, end - place)
      parts.append(struct.pack("<Q", hash_of(around)) + around)
      place += _BLOCK_HEADER
    step = min(_BLOCK - place % _BLOCK, len(chunk) - at)
    parts.append(chunk[at:at + step])
    at, place = at + step, place + step
  return b"".join(parts)


def _behind(begin: int, size: int) -> int:
  """Where bytes that begin at a place end, with the headers of the blocks that they reach into."""
  return begin + size + (size + (begin + _USABLE - 1) % _BLOCK) // _USABLE * _BLOCK_HEADER
