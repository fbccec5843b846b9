"""Whether a shared library is there as a whole: loading a part of one would kill the process."""

from __future__ import annotations

import pathlib
import struct

_NO_BITS = 8
"""Type of a section that takes no room in the file."""
_LARGEST = 1 << 28


def whole(path: pathlib.Path) -> bool:
  """Returns whether all that the library's own tables speak of is in the file.

  The dynamic linker maps what the headers say. Where the file ends sooner, the first touch of a
  page beyond its end is a SIGBUS, which no `except` catches. Linkers write the table of sections
  last: with any piece of the end missing, or left as zeros, that table is wrong.

  Args:
    path: the library.

  Returns:
    True as well for what is no 64-bit ELF file: other systems' loaders check for themselves, and
    anything else is refused by the loader with an error.
  """
  try:
    if not path.is_file() or path.stat().st_size > _LARGEST:
      return False
    data = path.read_bytes()
  except OSError:
    return True
  if len(data) < 20 or data[:4] != b"\x7fELF" or data[4] != 2:
    return data[:4] != b"\x7fELF" or len(data) >= 20
  order = "<" if data[5] == 1 else ">"
  try:
    return _tables(data, order)
  except struct.error:
    return False


def _tables(data: bytes, order: str) -> bool:
  """Whether segments and sections lie inside `data`; `struct.error` where a table doesn't."""
  at_segments, at_sections = struct.unpack_from(f"{order}QQ", data, 32)
  segment_size, segments, section_size, sections, names = struct.unpack_from(
      f"{order}HHHHH", data, 54)
  if not segments:
    return False
  for number in range(segments):
    begin = struct.unpack_from(f"{order}Q", data, at_segments + number * segment_size + 8)[0]
    size = struct.unpack_from(f"{order}Q", data, at_segments + number * segment_size + 32)[0]
    if begin + size > len(data):
      return False
  if not at_sections:
    return True
  for number in range(1, sections):
    at = at_sections + number * section_size
    kind = struct.unpack_from(f"{order}I", data, at + 4)[0]
    begin, size = struct.unpack_from(f"{order}QQ", data, at + 24)
    if kind == 0 or (kind != _NO_BITS and begin + size > len(data)):
      return False
    if number == names and not any(data[begin:begin + size]):
      return False
  return at_sections + sections * section_size <= len(data)
