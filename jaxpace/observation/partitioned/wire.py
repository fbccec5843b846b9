"""Protocol buffers as lists of numbered fields: read, changed and written without their schema.

Fields that nobody knows stay where they are, so a message of a newer compiler is handed on whole.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple


class WireError(ValueError):
  """Bytes are no message, or it lacks a field; the message says which, in half a sentence."""


class TimestampError(ValueError):
  """Timestamps can't be put into this program; the message says why, as the end of a sentence."""


class Field(NamedTuple):
  """A field of a message as it was sent."""

  number: int
  kind: int
  """0: a whole number, 1: eight bytes, 2: bytes of any length, 5: four bytes."""
  value: int | bytes


_FIXED = {1: 8, 5: 4}


def read(message: bytes) -> list[Field]:
  """Reads a message's fields, in their order.

  Raises:
    WireError: it is cut short, or no message.

  >>> [(one.number, one.value) for one in read(bytes([8, 1, 18, 2, 65, 66]))]
  [(1, 1), (2, b'AB')]
  """
  place, fields = 0, []
  while place < len(message):
    key, place = varint(message, place)
    number, kind = key >> 3, key & 7
    if kind == 0:
      value, place = varint(message, place)
      fields.append(Field(number, kind, value))
      continue
    if kind == 2:
      length, place = varint(message, place)
    elif kind in _FIXED:
      length = _FIXED[kind]
    else:
      raise WireError(f"a field is of kind {kind}")
    if place + length > len(message):
      raise WireError("a message is cut short")
    fields.append(Field(number, kind, message[place:place + length]))
    place += length
  return fields


def written(fields: Iterable[Field]) -> bytes:
  """Inverse of `read`.

  >>> written(read(bytes([8, 1, 18, 2, 65, 66]))) == bytes([8, 1, 18, 2, 65, 66])
  True
  """
  parts = []
  for number, kind, value in fields:
    parts.append(of_number(number << 3 | kind))
    if isinstance(value, int):
      parts.append(of_number(value))
    else:
      parts += [of_number(len(value)), value] if kind == 2 else [value]
  return b"".join(parts)


def message(number: int, *fields: Field) -> Field:
  """A field that is a message."""
  return Field(number, 2, written(fields))


def text(number: int, value: str | bytes) -> Field:
  """A field of text or bytes."""
  return Field(number, 2, value.encode() if isinstance(value, str) else value)


def whole(number: int, value: int) -> Field:
  """A field that is a whole number, at least 0."""
  return Field(number, 0, value)


def first(fields: Iterable[Field], number: int) -> bytes:
  """Bytes of the first field with a number.

  Raises:
    WireError: there is none.
  """
  for field in fields:
    if field.number == number and isinstance(field.value, bytes):
      return field.value
  raise WireError(f"a message has no field {number}")


def every(fields: Iterable[Field], number: int) -> list[bytes]:
  """Bytes of all fields with a number, in their order."""
  return [field.value for field in fields
          if field.number == number and isinstance(field.value, bytes)]


def inside(fields: Iterable[Field], number: int) -> list[Field]:
  """Fields of the message with a number; none where there is none."""
  return read(b"".join(every(fields, number)))


def string(fields: Iterable[Field], number: int) -> str:
  """Text of the field with a number; empty where there is none."""
  return b"".join(every(fields, number)).decode()


def number(fields: Iterable[Field], number: int) -> int:
  """The whole number with a number; 0 where there is none."""
  return next(iter(numbers(fields, number)), 0)


def changed(fields: Iterable[Field], path: Sequence[int], change: Callable[[bytes], bytes]
            ) -> list[Field]:
  """The same fields, those changed that are found by one number after the other, each in what the
  one before it is."""
  number, *rest = path

  def within(data: bytes) -> bytes:
    return written(changed(read(data), rest, change)) if rest else change(data)

  return [Field(number, 2, within(field.value))
          if field.number == number and isinstance(field.value, bytes) else field
          for field in fields]


def numbers(fields: Iterable[Field], number: int) -> list[int]:
  """Whole numbers of a repeated field, packed or one by one."""
  found: list[int] = []
  for field in fields:
    if field.number == number and isinstance(field.value, int):
      found.append(field.value)
    elif field.number == number:
      found += packed(field.value)  # type: ignore[arg-type]
  return found


def packed(data: bytes) -> list[int]:
  """Whole numbers written one after another."""
  place, found = 0, []
  while place < len(data):
    value, place = varint(data, place)
    found.append(value)
  return found


def varint(data: bytes, place: int) -> tuple[int, int]:
  """A whole number at a place, and the place after it.

  Raises:
    WireError: it does not end.
  """
  value, shift = 0, 0
  while place < len(data) and shift < 70:
    byte = data[place]
    value |= (byte & 127) << shift
    place, shift = place + 1, shift + 7
    if byte < 128:
      return value, place
  raise WireError("a number does not end")


def of_number(value: int) -> bytes:
  """A whole number as it is sent.

  >>> of_number(300)
  b'\\xac\\x02'
  """
  parts = bytearray()
  while value > 127:
    parts.append(value & 127 | 128)
    value >>= 7
  parts.append(value)
  return bytes(parts)
