"""Puts timestamps into a program that XLA has compiled for CPUs: calls between what it runs.

XLA compiles a program for CPUs to machine code and a list of thunks: kernels to call, collectives,
loops with lists of their own. Its executables can be written as bytes and loaded again, which is
how JAX's compilation cache keeps them. Timestamps are put into the list of thunks: the machine
code, the order of everything else and each piece of memory stay as they were, and so do the
results, bit for bit.

A thunk runs when those before it that touch the same memory are done, on one of several threads,
and in a list of at most eight when the one before it is done. So a collective becomes a call of a
list of three: enter timestamp, collective, exit timestamp. The list that it is in keeps its length,
and what waits for what. The whole program becomes a call between the start and the end timestamp.
Timestamps name memory as operands and results, which keeps these lists in order, and don't touch
it.

Collectives of one list run in its order, for which XLA has more than memory. It loses that between
a list and those in it when it loads a program, and gloo mixes up collectives that run at the same
time. So all enter timestamps write to a piece of memory of their own, which keeps them in order.

Numbers of fields are those of XLA's `CompilationResultProto`, `ThunkSequenceProto` and
`BufferAssignmentProto` (xla/service/cpu/executable.proto, xla/backends/cpu/runtime/thunk.proto,
xla/service/hlo.proto), the same in jaxlib 0.10 to 0.12.
"""

from __future__ import annotations

import functools
from collections.abc import Container, Iterable, Mapping, Sequence

from jaxpace.core.ring_layout import END_TAG, FIRST_TAG, LAST_TAG, START_TAG
from jaxpace.observation.clocks.native.library import MARK
from jaxpace.observation.partitioned import wire
from jaxpace.observation.partitioned.wire import TimestampError

_EXECUTABLE = 1
"""In what `serialize` writes after its header: the compiled program."""
_BUFFERS, _SEQUENCE = 2, 6
"""In a compiled program: its memory, and its thunks."""
_THUNKS, _USERS = 1, 2
"""In a list of thunks: thunks, and what else than memory keeps some of them in order."""
_PLACES = 1
"""In the latter: places in the list."""
_KIND, _INFO, _CALL, _CUSTOM_CALL, _COLLECTIVE = 1, 2, 3, 16, 18
_NAME = 1
"""In a thunk's information: the instruction that it runs."""
_LISTS = (_CALL, 1), (4, 1), (10, 1), (10, 2)
"""Where thunks that call, choose and loop have lists of thunks."""
_OPERANDS, _DESTINATIONS = 2, 2
"""In a collective: its memory, and what it writes of that."""
_ALLOCATIONS, _INDEX, _SIZE = 3, 1, 2
"""In a program's memory: its pieces, and of each its number and its bytes."""
_NOT_TEMPORARY = 3, 5, 7, 11, 12
"""In a piece of memory: that it is a thread's, an argument, a result, a tuple or a constant."""
_TYPED_FFI, _BYTE = 4, 6
"""XLA's numbers of a call's kind and of a type."""
_NOBODY = 0
"""Program of a call that only waits: the handler writes no event."""
_TOKEN_BYTES = 64
"""Of the piece of memory that keeps collectives in order."""


class Tags:
  """Numbers the timestamps that a program gets."""

  def __init__(self, program: int, names: Container[str], first_tag: int, ends: bool):
    """See `timestamped`."""
    self.program, self.names, self.ends, self._next = program, names, ends, first_tag
    self.enter_tags: dict[str, list[int]] = {}

  def take(self, name: str) -> int:
    """Tag of the enter timestamp at a place where a collective of this name runs; the exit
    timestamp's is the next number."""
    tag, self._next = self._next, self._next + 2
    if self._next > LAST_TAG:
      raise TimestampError("it has more collectives than tags can number")
    self.enter_tags.setdefault(name, []).append(tag)
    return tag


def timestamped(data: bytes, program: int, names: Container[str] = (), first_tag: int = FIRST_TAG,
                ends: bool = True) -> tuple[bytes, Mapping[str, Sequence[int]]]:
  """Puts timestamps into a compiled program.

  Args:
    data: what an executable's `serialize()` returned.
    program: number that its timestamps carry.
    names: of the instructions of collectives that get timestamps.
    first_tag: tag of the first timestamp at a collective.
    ends: whether the program gets timestamps at its start and end, and at collectives of other
      names, too.

  Returns:
    The program with timestamps, and for the name of each collective's instruction the tag of its
    enter timestamp, once for each place where it runs. The exit timestamp's tag is the next number.

  Raises:
    TimestampError: it is no such program, or has more collectives than there are tags.
  """
  try:
    length, begin = wire.varint(data, 0)
    header, outer = data[:begin + length], wire.read(data[begin + length:])
    executable = wire.read(wire.first(outer, _EXECUTABLE))
    tags = Tags(program, names, first_tag, ends)
    memory, token = _with_token(wire.first(executable, _BUFFERS))
    sequence = _whole(tags, token, wire.first(executable, _SEQUENCE))
  except wire.WireError as error:
    raise TimestampError(f"the compiler's program can't be read: {error}") from error
  executable = wire.changed(executable, [_BUFFERS], lambda _: memory)
  executable = wire.changed(executable, [_SEQUENCE], lambda _: sequence)
  outer = wire.changed(outer, [_EXECUTABLE], lambda _: wire.written(executable))
  return header + wire.written(outer), tags.enter_tags


def _whole(tags: Tags, token: bytes, sequence: bytes) -> bytes:
  """The program's list with timestamps; `token` is what keeps collectives in order, as an
  operand."""
  thunks = wire.every(wire.read(sequence), _THUNKS)
  if not thunks:
    raise TimestampError("it runs nothing")
  sequence = _around(tags, token, sequence)
  if not tags.ends:
    return sequence
  info = wire.first(wire.read(thunks[0]), _INFO)
  start, end = (_mark(info, tags.program, tag, [], [token]) for tag in (START_TAG, END_TAG))
  return _list([start, _call(info, sequence), end])


def _around(tags: Tags, token: bytes, sequence: bytes) -> bytes:
  """Timestamps around each collective of a list, and of the lists in it."""
  fields = wire.read(sequence)
  users = wire.every(fields, _USERS)
  thunks = []
  for place, thunk in enumerate(wire.every(fields, _THUNKS)):
    parts = wire.read(thunk)
    if wire.every(parts, _COLLECTIVE):
      own = [_of_second(each, place) for each in users]
      thunks.append(_timed(tags, token, thunk, parts, own))
    else:
      for path in _LISTS:
        parts = wire.changed(parts, path, functools.partial(_around, tags, token))
      thunks.append(wire.written(parts))
  return _list(thunks, users)


def _timed(tags: Tags, token: bytes, thunk: bytes, parts: list[wire.Field], users: Iterable[bytes]
           ) -> bytes:
  """A call of a collective between its timestamps."""
  info = wire.first(parts, _INFO)
  name = _name(info)
  operands = wire.read(wire.first(wire.read(wire.first(parts, _COLLECTIVE)), _OPERANDS))
  result = wire.every(operands, _DESTINATIONS)[:1]
  before = [token, *result]
  if not tags.ends and name not in tags.names:
    return _call(info, _list([_mark(info, _NOBODY, 0, [], before), thunk], users))
  tag = tags.take(name)
  enter = _mark(info, tags.program, tag, [], before)
  leave = _mark(info, tags.program, tag + 1, result, [])
  return _call(info, _list([enter, thunk, leave], users))


def _mark(info: bytes, program: int, tag: int, read: Iterable[bytes], written: Iterable[bytes]
          ) -> bytes:
  """A thunk that calls the handler, for which it reads and writes this memory; `info` is that of
  the thunk beside it."""
  memory = [*(wire.text(1, each) for each in read), *(wire.text(2, each) for each in written)]
  call = [wire.whole(1, _TYPED_FFI), wire.text(2, MARK),
          wire.text(3, f"{{mark = {program << 32 | tag} : i64}}"), wire.message(4, *memory)]
  return _thunk("custom-call", f"{MARK}.{tag}", info, wire.message(_CUSTOM_CALL, *call))


def _call(info: bytes, sequence: bytes) -> bytes:
  """A thunk that calls a list; `info` is that of one in it."""
  return _thunk("call", f"jaxpace_call.{_name(info)}", info,
                wire.message(_CALL, wire.text(1, sequence)))


def _thunk(kind: str, name: str, info: bytes, what: wire.Field) -> bytes:
  said = [wire.text(_NAME, name), *(each for each in wire.read(info) if each.number != _NAME)]
  return wire.written([wire.text(_KIND, kind), wire.message(_INFO, *said), what])


def _name(info: bytes) -> str:
  return wire.first(wire.read(info), _NAME).decode()


def _list(thunks: Iterable[bytes], users: Iterable[bytes] = ()) -> bytes:
  return wire.written([*(wire.text(_THUNKS, thunk) for thunk in thunks),
                       *(wire.text(_USERS, each) for each in users)])


def _of_second(users: bytes, place: int) -> bytes:
  """What keeps a list in order, for one whose second thunk was at this place."""
  fields = wire.read(users)
  others = [field for field in fields if field.number != _PLACES]
  second = [wire.whole(_PLACES, 1)] if place in wire.numbers(fields, _PLACES) else []
  return wire.written([*others, *second])


def _with_token(buffers: bytes) -> tuple[bytes, bytes]:
  """A program's memory with room for the token, and that as an operand: an array of bytes."""
  fields = wire.read(buffers)
  pieces = [wire.read(piece) for piece in wire.every(fields, _ALLOCATIONS)]
  # XLA writes no program that has two pieces of temporary memory.
  index = next((place for place, piece in enumerate(pieces)
                if not any(field.number in _NOT_TEMPORARY and field.value for field in piece)),
               len(pieces))
  piece = pieces[index] if index < len(pieces) else [wire.whole(_INDEX, index)]
  [size] = wire.numbers(piece, _SIZE) or [0]
  begin = -(-size // _TOKEN_BYTES) * _TOKEN_BYTES
  pieces[index:index + 1] = [[*(field for field in piece if field.number != _SIZE),
                              wire.whole(_SIZE, begin + _TOKEN_BYTES)]]
  shape = wire.message(1, wire.whole(2, _BYTE), wire.text(3, wire.of_number(_TOKEN_BYTES)),
                       wire.message(5, wire.text(1, b"\0")), wire.text(6, b"\0"))
  place = wire.message(2, wire.whole(1, begin), wire.whole(2, _TOKEN_BYTES), wire.whole(3, index))
  return wire.written([*(field for field in fields if field.number != _ALLOCATIONS),
                       *(wire.message(_ALLOCATIONS, *each) for each in pieces)]
                      ), wire.written([shape, place])
