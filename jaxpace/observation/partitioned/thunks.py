"""Puts timestamps into a program that XLA has compiled for CPUs: calls between what it runs.

XLA compiles a program for CPUs to machine code and a list of thunks: kernels to call, collectives,
loops with lists of their own. Its executables can be written as bytes and loaded again, which is
how JAX's compilation cache keeps them. Timestamps are put into the list of thunks: the machine
code, the order of everything else and each piece of memory stay as they were, and so do the
results, bit for bit.

A thunk runs when those before it that touch the same memory are done. A timestamp names the memory
that it stands before or after as its own operand and result, and does not change it: the enter
timestamp waits for all operands of its collective, which waits for the timestamp; what uses the
results waits for the exit timestamp. The start timestamp names all memory that the program writes,
so everything waits for it, and the end timestamp waits for everything.

Collectives of one list run in its order, which XLA keeps by more than memory, and loses between
the collectives of a list and those of a loop in it when it loads a program. So a timestamp also
waits for what the collective before it has written, if that is in another list.

XLA runs a list of at most eight thunks one after another, and the thunks of a longer one on several
threads as their memory allows. Where timestamps make a short list long, it becomes a list of calls
of short lists, so its thunks still run one after another.

Numbers of fields are those of XLA's `CompilationResultProto`, `ThunkSequenceProto` and
`BufferAssignmentProto` (xla/service/cpu/executable.proto, xla/backends/cpu/runtime/thunk.proto,
xla/service/hlo.proto), the same in jaxlib 0.10 to 0.12.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping, Sequence

from jaxpace.core.ring_layout import END_TAG, FIRST_TAG, LAST_TAG, START_TAG
from jaxpace.observation.clocks.native.library import MARK
from jaxpace.observation.partitioned import wire
from jaxpace.observation.partitioned.collectives import TimestampError

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
_LISTS = {_CALL: (1,), 4: (1,), 10: (1, 2)}
"""In thunks that call, choose and loop: fields with lists of thunks."""
_OPERANDS, _SOURCES, _DESTINATIONS = 2, 1, 2
"""In a collective: memory it reads, memory it writes."""
_ALLOCATIONS = 3
_INDEX, _SIZE, _OF_THREAD, _PARAMETER, _RESULT, _TUPLE, _CONSTANT, _DONATED = (
    1, 2, 3, 5, 7, 11, 12, 13)
"""In a piece of memory."""
_TYPED_FFI, _BYTE = 4, 6
"""XLA's numbers of a call's kind and of a type."""
_NOBODY = 0
"""Program of a call that only waits: the handler writes no event."""
_SHORT = 8
"""Thunks of a list that XLA runs one after another (`execute_sequential_num_thunks_threshold` in
xla/backends/cpu/runtime/thunk_executor.h)."""


def timestamped(data: bytes, program: int, only: Container[str] | None = None,
                first_tag: int = FIRST_TAG) -> tuple[bytes, Mapping[str, Sequence[int]]]:
  """Puts timestamps into a compiled program.

  Args:
    data: what an executable's `serialize()` returned.
    program: number that its timestamps carry.
    only: names of the instructions of collectives that get timestamps, in a program that has
      timestamps of its own at its start and end; None for all collectives, start and end.
    first_tag: tag of the first timestamp at a collective.

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
    lists = _Lists(program, only, first_tag)
    memory = _memory(wire.first(executable, _BUFFERS)) if only is None else None
    sequence = lists.around(wire.first(executable, _SEQUENCE), memory)
  except wire.WireError as error:
    raise TimestampError(f"the compiler's program can't be read: {error}") from error
  executable = wire.changed(executable, _SEQUENCE, lambda _: sequence)
  outer = wire.changed(outer, _EXECUTABLE, lambda _: wire.written(executable))
  return header + wire.written(outer), lists.enter_tags


class _Lists:
  """Puts timestamps into lists of thunks, and counts their tags."""

  def __init__(self, program: int, only: Container[str] | None, first_tag: int):
    self._program, self._only, self._next = program, only, first_tag
    self.enter_tags: dict[str, list[int]] = {}
    # Of the last collective: its list, and what it writes.
    self._last: tuple[list[wire.Field], list[bytes]] | None = None

  def around(self, sequence: bytes, memory: Sequence[bytes] | None = None) -> bytes:
    """Timestamps around each collective of a list, and of the lists in it; given the memory that
    the program writes, at its beginning and at its end, too."""
    fields = wire.read(sequence)
    before = wire.every(fields, _THUNKS)
    thunks: list[bytes] = []
    places: dict[int, int] = {}
    for place, thunk in enumerate(before):
      parts = wire.read(thunk)
      if wire.every(parts, _COLLECTIVE):
        enter, leave = self._beside(parts, fields)
      else:
        thunk, enter, leave = self._inside(parts), [], []
      places[place] = len(thunks) + len(enter)
      thunks += [*enter, thunk, *leave]
    if memory is not None:
      thunks = self._ends(thunks, memory)
      places = {old: new + 1 for old, new in places.items()}
    rest = [field for field in fields if field.number != _THUNKS]
    if len(before) <= _SHORT < len(thunks):
      return _in_calls(thunks, rest, places)
    return _list(thunks, rest, places)

  def _ends(self, thunks: list[bytes], memory: Sequence[bytes]) -> list[bytes]:
    if not thunks:
      raise TimestampError("it runs nothing")
    info = wire.first(wire.read(thunks[0]), _INFO)
    start, end = (_mark(info, self._program, tag, memory) for tag in (START_TAG, END_TAG))
    return [start, *thunks, end]

  def _inside(self, parts: list[wire.Field]) -> bytes:
    for number, lists in _LISTS.items():
      def in_lists(thunk: bytes, lists: Sequence[int] = lists) -> bytes:
        fields = wire.read(thunk)
        for each in lists:
          fields = wire.changed(fields, each, self.around)
        return wire.written(fields)
      parts = wire.changed(parts, number, in_lists)
    return wire.written(parts)

  def _beside(self, parts: list[wire.Field], of: list[wire.Field]
              ) -> tuple[list[bytes], list[bytes]]:
    """What comes before and after a collective of a list."""
    info = wire.first(parts, _INFO)
    operands = wire.read(wire.first(wire.read(wire.first(parts, _COLLECTIVE)), _OPERANDS))
    sources, destinations = (wire.every(operands, each) for each in (_SOURCES, _DESTINATIONS))
    last, self._last = self._last, (of, destinations[:1])
    waited = last[1] if last is not None and last[0] is not of else []
    # One operand is enough for the collective to wait by: what else reads the others need not.
    if self._only is not None and _name(info) not in self._only:
      return [_mark(info, _NOBODY, 0, sources[:1], waited)] if waited else [], []
    tag, self._next = self._next, self._next + 2
    if self._next > LAST_TAG:
      raise TimestampError("it has more collectives than tags can number")
    self.enter_tags.setdefault(_name(info), []).append(tag)
    return ([_mark(info, self._program, tag, sources[:1], [*sources[1:], *waited])],
            [_mark(info, self._program, tag + 1, destinations)])


def _mark(info: bytes, program: int, tag: int, handed_on: Sequence[bytes],
          waited: Sequence[bytes] = ()) -> bytes:
  """A thunk that calls the handler; `info` is that of the thunk beside it."""
  config = f"{{mark = {program << 32 | tag} : i64}}"
  operands = [wire.text(1, each) for each in (*handed_on, *waited)]
  call = [wire.whole(1, _TYPED_FFI), wire.text(2, MARK), wire.text(3, config),
          wire.message(4, *operands, *(wire.text(2, each) for each in handed_on))]
  return _thunk("custom-call", f"{MARK}.{tag}", info, wire.message(_CUSTOM_CALL, *call))


def _thunk(kind: str, name: str, info: bytes, what: wire.Field) -> bytes:
  """A thunk; `info` is that of one beside it."""
  said = [wire.text(_NAME, name), *(each for each in wire.read(info) if each.number != _NAME)]
  return wire.written([wire.text(_KIND, kind), wire.message(_INFO, *said), what])


def _name(info: bytes) -> str:
  return wire.first(wire.read(info), _NAME).decode()


def _list(thunks: Iterable[bytes], rest: Iterable[wire.Field], places: Mapping[int, int]) -> bytes:
  """A list of thunks with the rest of the list before it. `places` are the new ones of its thunks;
  of those that went elsewhere there is none."""
  def moved(users: bytes) -> bytes:
    fields = wire.read(users)
    now = b"".join(wire.of_number(places[place]) for place in wire.numbers(fields, _PLACES)
                   if place in places)
    return wire.written([*(field for field in fields if field.number != _PLACES),
                         wire.text(_PLACES, now)])

  return wire.written([*(wire.text(_THUNKS, thunk) for thunk in thunks),
                       *wire.changed(rest, _USERS, moved)])


def _in_calls(thunks: Sequence[bytes], rest: Iterable[wire.Field], places: Mapping[int, int]
              ) -> bytes:
  """A list of calls of short lists, which together have the thunks in their order."""
  calls = []
  for begin in range(0, len(thunks), _SHORT):
    part = thunks[begin:begin + _SHORT]
    own = {old: new - begin for old, new in places.items() if 0 <= new - begin < len(part)}
    info = wire.first(wire.read(part[0]), _INFO)
    calls.append(_thunk("call", f"jaxpace_call.{begin}", info, wire.message(
        _CALL, wire.text(1, _list(part, rest, own)))))
  return _list(calls, (), {})


def _memory(buffers: bytes) -> list[bytes]:
  """Operands that are each piece of memory that a program writes."""
  found = []
  for piece in wire.every(wire.read(buffers), _ALLOCATIONS):
    numbers = {field.number: field.value for field in wire.read(piece)}
    index, size = numbers.get(_INDEX, 0), numbers.get(_SIZE, 0)
    read_only = numbers.get(_PARAMETER) and not (numbers.get(_RESULT) or numbers.get(_DONATED))
    if (not isinstance(index, int) or not isinstance(size, int) or not size or read_only
        or any(numbers.get(kind) for kind in (_OF_THREAD, _TUPLE, _CONSTANT))):
      continue
    # An array of bytes, row-major.
    shape = wire.message(1, wire.whole(2, _BYTE), wire.text(3, wire.of_number(size)),
                         wire.message(5, wire.text(1, b"\0")), wire.text(6, b"\0"))
    found.append(wire.written([shape, wire.message(2, wire.whole(2, size), wire.whole(3, index))]))
  return found
