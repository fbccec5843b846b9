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
from collections.abc import Callable, Container, Iterable, Mapping, Sequence

from jaxpace.core.ring_layout import END_TAG, FIRST_TAG, START_TAG
from jaxpace.observation.clocks.native import cuda
from jaxpace.observation.clocks.native.library import MARK
from jaxpace.observation.partitioned import records, wire
from jaxpace.observation.partitioned.collectives import TimestampError
from jaxpace.observation.partitioned.thunks import Tags

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
  of start and end that jaxlib 0.10 runs as one.

  Args:
    kind: of collective, such as "all-reduce".
  """
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
    if records.is_file(rest):
      # Since jaxlib 0.11: a file of records, one of which is the file with the program.
      outer = records.read(rest)
      rest = _written([lists.in_file(each) if records.is_file(each) else each for each in outer])
    else:
      rest = wire.written(wire.changed(wire.read(rest), [_EXECUTABLE], lists.in_file))
  except wire.WireError as error:
    raise TimestampError(f"the compiler's program can't be read: {error}") from error
  if not lists.found_program:
    raise TimestampError("the compiler's program is in a form that jaxpace doesn't know")
  return header + rest, lists.enter_tags


def _written(each: Sequence[bytes]) -> bytes:
  return records.written(each, cuda.riegeli_hash)


class _Lists(Tags):
  """Puts timestamps into lists of thunks."""

  found_program = False
  # Above what the compiler numbers.
  _id = 1 << 40

  def in_file(self, data: bytes) -> bytes:
    """A program as a file of records, with timestamps: the last record is all but its code."""
    if not records.is_file(data):
      raise wire.WireError("it is not a file of records")
    *others, program = records.read(data)
    fields = wire.read(program)
    thunks = wire.every(fields, _PROGRAM_THUNKS)
    if not thunks:
      raise wire.WireError("it lists nothing to run")
    self.found_program = True
    now = self._around(thunks)
    if self._ends:
      now = [self._mark(thunks[0], START_TAG), *now, self._mark(thunks[-1], END_TAG)]
    # Order of different fields means nothing; that of the thunks does.
    fields = [field for field in fields if field.number != _PROGRAM_THUNKS]
    return _written([*others, wire.written(
        [*fields, *(wire.text(_PROGRAM_THUNKS, thunk) for thunk in now)])])

  def _around(self, thunks: Iterable[bytes]) -> list[bytes]:
    """Thunks of a list, with timestamps around each collective, and in the lists in them."""
    found: list[bytes] = []
    for thunk in thunks:
      parts = wire.read(thunk)
      kinds, name = {field.number for field in parts}, _name(parts)
      if name in self._names and _ASYNC_START in kinds:
        pair = functools.partial(_in_list, functools.partial(self._with_pair, name))
        found.append(wire.written(wire.changed(parts, _OF_ASYNC, pair)))
      elif name in self._names and _ASYNC_DONE not in kinds:
        found += self._with_pair(name, [thunk])
      elif self._ends and (kind := next((_KINDS[each] for each in kinds if each in _KINDS), "")):
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
    mark = wire.message(2, wire.message(1, wire.whole(5, self._program << 32 | tag)))
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
