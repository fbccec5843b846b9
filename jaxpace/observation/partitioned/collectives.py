"""The collectives of a compiled program: what each does, in which loops it runs, who meets in it,
and which line it comes from.

XLA writes a program as a message, of which only what runs is read. Numbers of fields are those of
its `HloModuleProto` (xla/service/hlo.proto, xla/xla_data.proto), the same in jaxlib 0.10 to 0.12.
"""

from __future__ import annotations

import functools
import itertools
import math
import os
import re
import sys
import sysconfig
from collections.abc import Iterator, Sequence
from pathlib import PurePath
from typing import NamedTuple

from jaxpace.core.observed import KINDS
from jaxpace.core.plan import COMPUTE, Collective, Loop
from jaxpace.observation.partitioned import groups, wire
from jaxpace.observation.partitioned.compiling import MACHINERY

_COMPUTATIONS, _SIGNATURE, _ENTRY, _SCHEDULE, _FRAMES, _CONFIGS = 3, 4, 6, 7, 17, 22
"""In a program; the last are what instructions may have in place of a `_CONFIG` of their own."""
_INSTRUCTIONS, _COMPUTATION_ID = 2, 5
"""In a computation."""
_NAME, _OPCODE, _SHAPE, _METADATA, _ID, _OPERANDS, _CALLED, _CONFIG, _PAIRS, _CONFIG_AT = (
    1, 2, 3, 7, 35, 36, 38, 43, 52, 99)
"""In an instruction."""
_OPERATION, _FILE, _LINE, _FRAME = 2, 3, 4, 15
"""In what it says of where it comes from."""
_TYPE, _SIZES, _ELEMENTS = 2, 3, 4
"""In a shape: type of its elements and how many there are along each axis; of a tuple, shapes."""
_TYPES = (
    "none", "bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64",
    "float16", "float32", "float64", "tuple", "opaque", "complex64", "bfloat16", "token",
    "complex128", "float8_e5m2", "float8_e4m3fn", "int4", "uint4", "float8_e4m3b11fnuz",
    "float8_e5m2fnuz", "float8_e4m3fnuz", "int2", "uint2", "float8_e4m3", "float8_e3m4", "int1",
    "uint1", "float4_e2m1fn", "float8_e8m0fnu", "buffer", "float6_e3m2fn", "float6_e2m3fn")
"""Types of elements by XLA's number, in numpy's words."""
_TRIPS = re.compile(rb'"known_trip_count":\s*\{\s*"n":\s*"(\d+)"')
_INSTALLED = ("site-packages", "dist-packages")
"""Folders that hold packages in every environment, whichever of them this Python searches."""
_NAMELESS = ("", "fun", "lambda", "<lambda>", "fn", "wrapped", "wrapper", "inner", "decorated",
             "call")

Message = list[wire.Field]


class Placed(NamedTuple):
  """An instruction that runs, and where in the program."""

  name: str
  instruction: Message
  opcode: str
  # Of its computation, by number.
  beside: dict[int, Message]
  loops: tuple[Loop, ...]
  conditional: bool


class Frame(NamedTuple):
  """A call that an instruction comes from."""

  file: str
  line: int
  # Name of the Python function that the line is in; "" where it isn't said.
  function: str = ""


class Program:
  """A compiled program."""

  def __init__(self, module: bytes):
    """Reads its outline.

    Raises:
      WireError: it is no message.
    """
    program = wire.read(module)
    self._computations = {wire.number(each, _COMPUTATION_ID): each for each in map(
        wire.read, wire.every(program, _COMPUTATIONS))}
    self._entry = wire.number(program, _ENTRY)
    # By computation, the numbers of its instructions in the order in which they run.
    self._order = {wire.number(each, 1): wire.numbers(wire.inside(each, 2), 1) for each in map(
        wire.read, wire.every(wire.inside(program, _SCHEDULE), 1))}
    index = wire.inside(program, _FRAMES)
    self._configs = wire.every(program, _CONFIGS)
    self._files, self._functions, self._lines, self._frames = (
        wire.every(index, place) for place in (1, 2, 3, 4))
    self._signature = wire.inside(program, _SIGNATURE)

  @property
  def has_tokens(self) -> bool:
    """Whether it is given, or gives, what keeps effects in order."""
    shapes = [*wire.every(self._signature, 1), *wire.every(self._signature, 2)]
    return any(kind == "token" for shape in shapes for kind, _ in _arrays(wire.read(shape)))

  def run(self) -> Iterator[Placed]:
    """Yields every instruction that runs, but those inside fusions, in order."""
    return self._run(self._entry, (), False)

  def _run(self, number: int, loops: tuple[Loop, ...], conditional: bool) -> Iterator[Placed]:
    computation = self._computations.get(number, [])
    beside = {wire.number(each, _ID): each for each in map(
        wire.read, wire.every(computation, _INSTRUCTIONS))}
    for place in self._order.get(number, beside):
      one = beside[place]
      name, opcode = wire.string(one, _NAME), wire.string(one, _OPCODE)
      called, inside = wire.numbers(one, _CALLED), loops
      yield Placed(name, one, opcode, beside, loops, conditional)
      if opcode == "while":
        trips = _TRIPS.search(self._config(one))
        inside = (*loops, Loop(name, int(trips[1]) if trips else None))
        # The condition is the second, and runs first.
        called.reverse()
      elif opcode not in ("conditional", "call", "async-start"):
        continue
      for placed in itertools.chain.from_iterable(
          self._run(each, inside, conditional or opcode == "conditional") for each in called):
        # What is started on another stream goes by the name of its start.
        yield placed._replace(name=name) if opcode == "async-start" else placed

  def _config(self, one: Message) -> bytes:
    """What is said of an instruction to the backend alone."""
    elsewhere = wire.every(one, _CONFIG_AT)
    return b"".join(wire.every(one, _CONFIG)) if not elsewhere else (
        self._configs[wire.number(wire.read(elsewhere[0]), 2)])

  def frames(self, one: Message) -> list[Frame]:
    """The calls an instruction comes from, the innermost first."""
    said = wire.inside(one, _METADATA)
    if file := wire.string(said, _FILE):
      return [Frame(file, wire.number(said, _LINE))]
    place, found = wire.number(said, _FRAME), list[Frame]()
    while 0 < place <= len(self._frames) and len(found) < len(self._frames):
      frame = wire.read(self._frames[place - 1])
      line = wire.read(self._lines[wire.number(frame, 1) - 1])
      named = wire.number(line, 2)
      found.append(Frame(
          self._files[wire.number(line, 1) - 1].decode(), wire.number(line, 3),
          self._functions[named - 1].decode() if 0 < named <= len(self._functions) else ""))
      place = wire.number(frame, 2)
    return found


def found_in(program: Program, partitions: int, function: str = "") -> list[Collective]:
  """Collectives of a compiled program, in the order in which they run: what it says of them alone,
  so without tags, axes and phases; who meets is told by numbers of partitions. `function` is the
  name of what was compiled.

  Raises:
    TimestampError: the groups of one are written in a form that is not known.
    WireError: the program is cut short.
  """
  return [_found(program, placed, kind, partitions, function) for placed in program.run()
          if (kind := placed.opcode.removesuffix("-start")) in KINDS]


def function_of(program: Program, caller: tuple[str, int]) -> str:
  """Name of the Python function that was compiled: the outermost one within the call, of those that
  its collectives come from and that have a name of their own.

  Returns:
    The name; "" where no collective comes from within the call, as when the function was traced by
    another one before.
  """
  for placed in program.run():
    if placed.opcode.removesuffix("-start") in KINDS:
      frames = program.frames(placed.instruction)
      places = [frame[:2] for frame in frames]
      own = frames[:places.index(caller)] if caller in places else []
      for frame in reversed(own):
        name = frame.function.rsplit(".", 1)[-1]
        if not is_nameless(name):
          return name
  return ""


def is_nameless(name: str) -> bool:
  """Whether a function's name says nothing of it, as that of every program under `pmap` does, or
  that of a decorator's function.

  >>> [is_nameless(name) for name in ("_fun", "<lambda>", "__call__", "train_step")]
  [True, True, True, False]
  """
  return name.strip("_") in _NAMELESS


def _found(program: Program, placed: Placed, kind: str, partitions: int, function: str
           ) -> Collective:
  one = placed.instruction
  pairs = [wire.read(pair) for pair in wire.every(one, _PAIRS)]
  arrays = [array for operand in wire.numbers(one, _OPERANDS)
            for array in _arrays(wire.inside(placed.beside[operand], _SHAPE))]
  return Collective(
      index=0, name=placed.name, kind=kind, axes=(), phase=COMPUTE, enter_tag=-1,
      bytes=sum(count * _bits(dtype) for dtype, count in arrays) // 8, operands=len(arrays),
      dtypes=tuple(dict.fromkeys(dtype for dtype, _ in arrays)),
      groups=() if kind == "collective-permute" else groups.of_instruction(one, partitions),
      pairs=tuple((wire.number(pair, 1), wire.number(pair, 2)) for pair in pairs),
      loops=placed.loops, conditional=placed.conditional,
      source=source_line(program.frames(one), function),
      operation=wire.string(wire.inside(one, _METADATA), _OPERATION) or None)


def _arrays(shape: Message) -> Iterator[tuple[str, int]]:
  """Element types and sizes of the arrays of a shape."""
  number = wire.number(shape, _TYPE)
  dtype = _TYPES[number] if number < len(_TYPES) else f"type {number}"
  if dtype == "tuple":
    for each in wire.every(shape, _ELEMENTS):
      yield from _arrays(wire.read(each))
  else:
    yield dtype, math.prod(wire.numbers(shape, _SIZES))


def _bits(dtype: str) -> int:
  found = re.match(r"[a-z]+(\d+)", dtype)
  return 8 if dtype == "bool" else int(found[1]) if found else 0


def source_line(frames: Sequence[Frame], function: str = "") -> str | None:
  """The innermost line that is no installed package's, such as "models/layer.py:120", of those
  within the function of this name: what leads to its call is the same for all.

  A trainer that is installed itself has none: its innermost line outside of JAX then, such as
  "flax/linen/linear.py:287". Paths are those by which Python imports the file, so they say more
  than a name that many packages use.

  Returns:
    Path and line; None without frames.
  """
  if not frames:
    return None
  folders = tuple(sys.path)
  imported = {frame.file: _imported_from(frame.file, folders) for frame in frames}
  paths = [(*imported[frame.file], frame.line) for frame in frames]
  own = [at for at, frame in enumerate(frames, 1) if frame.function.rsplit(".", 1)[-1] == function]
  within = paths[:own[-1]] if function and own else []
  others = [each for each in within if not _is_machinery(each[0])] or [
      each for each in paths if not _is_machinery(each[0])]
  of_the_user = [each for each in others if not each[1]]
  path, _, line = (of_the_user or others or paths)[0]
  return f"{path}:{line}"


def _is_machinery(path: str) -> bool:
  return path.split("/")[0] in MACHINERY


# All collectives of a program come from a few files.
@functools.lru_cache(maxsize=1024)
def _imported_from(file: str, search: tuple[str, ...]) -> tuple[str, bool]:
  """The path of a file below the folder that Python imports it from, of those that it searches, and
  whether it is installed."""
  parts = PurePath(file).parts
  for index in reversed(range(len(parts))):
    if parts[index] in _INSTALLED:
      return "/".join(parts[index + 1:]), True
  standard = sysconfig.get_paths()["stdlib"]
  if file.startswith("<frozen "):  # of the standard library, too: what runs `python -m`
    return file, True
  if file.startswith(standard):
    return os.path.relpath(file, standard), True
  folders = [os.path.abspath(folder) + os.sep for folder in search]
  holding = max((folder for folder in folders if file.startswith(folder)), key=len, default=None)
  return (parts[-1] if holding is None else file[len(holding):]).replace(os.sep, "/"), False
