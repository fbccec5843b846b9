"""The collectives of a compiled program, as its text has them."""

from __future__ import annotations

import math
import re

from jaxpace.core.observed import KINDS
from jaxpace.core.plan import COMPUTE, Collective
from jaxpace.observation import source_lines
from jaxpace.observation.partitioned import groups, text

_DTYPES = {"pred": "bool", "bf16": "bfloat16", "f16": "float16", "f32": "float32", "f64": "float64",
           "c64": "complex64", "c128": "complex128"}


class TimestampError(ValueError):
  """Timestamps can't be put into this program; the message says why, as the end of a sentence."""


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


def found_in(compiled: str, partitions: int) -> list[Collective]:
  """Collectives of a compiled program, in the order of its text: what that says of them alone, so
  without tags, axes and phases; who meets is told by numbers of partitions.

  Args:
    compiled: text of the program.
    partitions: how many there are.

  Raises:
    GroupsError: the groups of one are written in a form that is not known.
  """
  program = text.CompiledText(compiled)
  return [_found(program, placed, kind, partitions) for placed in program.run()
          if (kind := placed.instruction.opcode.removesuffix("-start")) in KINDS]


def _found(program: text.CompiledText, placed: text.Placed, kind: str, partitions: int
           ) -> Collective:
  one = placed.instruction
  body = program.computations[placed.computation]
  pairs = one.attribute("source_target_pairs")
  said = one.attribute("replica_groups")
  operation = re.search(r'op_name="([^"]*)"', one.rest)
  # Element type and sizes of each operand.
  types = [array for operand in one.operands if operand in body
           for array in text.arrays(body[operand].shape)]
  return Collective(
      index=0, name=one.name, kind=kind, axes=(), phase=COMPUTE, enter_tag=-1,
      bytes=sum(math.prod(sizes) * _bits(kind) for kind, sizes in types) // 8, operands=len(types),
      dtypes=tuple(dict.fromkeys(dtype(kind) for kind, _ in types)),
      groups=groups.parse(said or "{}", partitions) if pairs is None else (),
      pairs=_pairs(pairs) if pairs is not None else (),
      loops=placed.loops, conditional=placed.conditional,
      source=source_lines.innermost(program.frames(one)),
      operation=operation[1] if operation else None)


def _pairs(said: str) -> tuple[tuple[int, int], ...]:
  return tuple((int(source), int(target))
               for source, target in re.findall(r"\{(\d+)\s*,\s*(\d+)\}", said))
