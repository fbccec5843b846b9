"""The collectives of a compiled program, and the timestamps around each."""

from __future__ import annotations

import collections
import math
import re
from collections.abc import Iterable
from typing import NamedTuple

from jaxpace.core.observed import KINDS
from jaxpace.core.plan import Loop
from jaxpace.core.ring_layout import FIRST_TAG
from jaxpace.observation.clocks import kernels
from jaxpace.observation.partitioned import groups, text

_DTYPES = {"pred": "bool", "bf16": "bfloat16", "f16": "float16", "f32": "float32", "f64": "float64",
           "c64": "complex64", "c128": "complex128"}
_FAR = 12


class TimestampError(ValueError):
  """Timestamps can't be put into this program; the message says why, as the end of a sentence."""


class Found(NamedTuple):
  """A collective of a compiled program."""

  name: str
  kind: str
  channel: int | None
  groups: groups.Groups
  """Partitions that meet; () for permutes."""
  pairs: tuple[tuple[int, int], ...]
  types: tuple[tuple[str, tuple[int, ...]], ...]
  """Element type and sizes of each operand."""
  loops: tuple[Loop, ...]
  conditional: bool
  operation: str | None
  frames: tuple[tuple[str, int], ...]
  enter_tags: tuple[int, ...]
  exit_tags: tuple[int, ...]

  @property
  def bytes(self) -> int:
    return sum(math.prod(sizes) * _bits(kind) for kind, sizes in self.types) // 8

  @property
  def dtypes(self) -> tuple[str, ...]:
    return tuple(dict.fromkeys(dtype(kind) for kind, _ in self.types))

  def same(self) -> tuple[object, ...]:
    """What must be equal in the program with timestamps and the one without."""
    return (self.kind, groups.canonical(self.groups), tuple(sorted(self.pairs)),
            tuple(sorted(self.types)), tuple(loop.trips for loop in self.loops), self.conditional)


def dtype(kind: str) -> str:
  """XLA's word for a type of elements in numpy's words.

  >>> dtype("f32"), dtype("s8"), dtype("bf16"), dtype("f8e4m3fn")
  ('float32', 'int8', 'bfloat16', 'float8_e4m3fn')
  """
  if kind in _DTYPES:
    return _DTYPES[kind]
  if found := re.fullmatch(r"([su])(\d+)", kind):
    return ("int" if found[1] == "s" else "uint") + found[2]
  if found := re.fullmatch(r"f(\d)(e.*)", kind):
    return f"float{found[1]}_{found[2]}"
  return kind


def _bits(kind: str) -> int:
  if kind == "pred":
    return 8
  found = re.search(r"\d+", kind)
  return int(found[0]) if found else 0


def found_in(compiled: str, partitions: int) -> list[Found]:
  """Collectives of a compiled program, in the order of its text.

  Args:
    compiled: text of the program.
    partitions: how many there are.

  Raises:
    GroupsError: the groups of one are written in a form that is not known.
  """
  program = text.CompiledText(compiled)
  return [_found(program, placed, kind, partitions) for placed in program.run()
          if (kind := _kind(placed.instruction)) is not None]


def timestamps_in(compiled: str) -> list[int]:
  """Tags of the timestamps in a compiled program, in the order of its text."""
  return [tag for placed in text.CompiledText(compiled).run()
          if (tag := _tag(placed.instruction)) is not None]


ARITHMETIC = frozenset({
    "add", "subtract", "multiply", "divide", "dot", "convolution", "reduce", "exponential",
    "exponential-minus-one", "log", "log-plus-one", "logistic", "tanh", "sqrt", "rsqrt", "cbrt",
    "power", "convert", "reduce-window", "scatter"})
"""Operations that round."""


def arithmetic_in(compiled: str) -> collections.Counter[str]:
  """How often a compiled program has each operation that rounds, those in fusions too.

  Operations on single numbers are left out: most are bodies of sums, which are shared or not.
  """
  counted: collections.Counter[str] = collections.Counter()
  for body in text.CompiledText(compiled).computations.values():
    for one in body.values():
      if one.opcode in ARITHMETIC and any(sizes for _, sizes in text.arrays(one.shape)):
        counted[one.opcode] += 1
  return counted


def _kind(one: text.Instruction) -> str | None:
  kind = one.opcode.removesuffix("-start")
  return kind if kind in KINDS else None


def _tag(one: text.Instruction | None) -> int | None:
  if one is None or one.opcode != "custom-call":
    return None
  found = re.search(rf'\bname\s*=\s*"{kernels.MARK}(\d+)"', one.rest)
  return int(found[1]) if found else None


def _found(program: text.CompiledText, placed: text.Placed, kind: str, partitions: int) -> Found:
  one = placed.instruction
  body = program.computations[placed.computation]
  channel = one.attribute("channel_id")
  pairs = one.attribute("source_target_pairs")
  said = one.attribute("replica_groups")
  operation = re.search(r'op_name="([^"]*)"', one.rest)
  return Found(
      name=one.name, kind=kind, channel=int(channel) if channel else None,
      groups=groups.parse(said or "{}", partitions) if pairs is None else (),
      pairs=_pairs(pairs) if pairs is not None else (),
      types=tuple(array for operand in one.operands if operand in body
                  for array in text.arrays(body[operand].shape)),
      loops=placed.loops, conditional=placed.conditional,
      operation=operation[1] if operation else None, frames=tuple(program.frames(one)),
      enter_tags=_reached(program, placed, forward=False),
      exit_tags=_reached(program, placed, forward=True))


def _pairs(said: str) -> tuple[tuple[int, int], ...]:
  return tuple((int(source), int(target))
               for source, target in re.findall(r"\{(\d+)\s*,\s*(\d+)\}", said))


def _reached(program: text.CompiledText, placed: text.Placed, *, forward: bool) -> tuple[int, ...]:
  """Tags of the nearest timestamps before or after an instruction, along what it reads or gives.

  Between them the compiler may have put changes of type or layout, and tuples. Enter timestamps
  have even tags, exit timestamps odd ones.
  """
  body = program.computations[placed.computation]
  uses = program.users[placed.computation]
  tags: set[int] = set()
  seen: set[str] = set()
  edge = [placed.instruction.name]
  for _ in range(_FAR):
    following: list[str] = []
    for name in edge:
      near: Iterable[str] = uses.get(name, ()) if forward else body[name].operands
      for other in near:
        if other in seen or other not in body:
          continue
        seen.add(other)
        one = body[other]
        tag = _tag(one)
        if tag is not None:
          if tag >= FIRST_TAG and tag % 2 == forward:
            tags.add(tag)
        elif _kind(one) is None and one.opcode not in ("while", "conditional", "parameter"):
          following.append(other)
    edge = following
  return tuple(sorted(tags))
