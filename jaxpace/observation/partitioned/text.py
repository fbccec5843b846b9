"""Reads the text of a compiled program: its computations, instructions, loops and source lines."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

from jaxpace.core.plan import Loop


class Instruction(NamedTuple):
  """One line of a computation."""

  name: str
  shape: str
  """Type of its result, with layouts, as printed."""
  opcode: str
  operands: tuple[str, ...]
  rest: str
  """What follows its operands."""

  def attribute(self, name: str) -> str | None:
    """The value printed after `name=`; None where there is none."""
    found = re.search(rf"(?:^|[\s,]){re.escape(name)}=", self.rest)
    if found is None:
      return None
    value = self.rest[found.end():]
    if value.startswith("mesh["):
      return value[:value.index("}", _closing(value, 4)) + 1]
    return value[:_end(value)]


class Placed(NamedTuple):
  """An instruction, and where in the program it runs."""

  instruction: Instruction
  computation: str
  loops: tuple[Loop, ...]
  conditional: bool


class CompiledText:
  """A compiled program, read from its text."""

  def __init__(self, text: str):
    self.computations: dict[str, dict[str, Instruction]] = {}
    self.entry = ""
    self._tables: dict[str, dict[int, str]] = {}
    self._read(text)

  def _read(self, text: str) -> None:
    current: dict[str, Instruction] | None = None
    table: dict[int, str] | None = None
    for line in text.splitlines():
      stripped = line.strip()
      if stripped in ("FileNames", "FunctionNames", "FileLocations", "StackFrames"):
        table = self._tables.setdefault(stripped, {})
      elif current is None and (header := _HEADER.match(stripped)):
        table = None
        current = self.computations.setdefault(header[2], {})
        if header[1]:
          self.entry = header[2]
      elif stripped.startswith("}"):
        if current is not None:
          _write_out_elements(current)
        current = None
      elif current is not None:
        if (found := instruction(stripped)) is not None:
          current[found.name] = found
      elif table is not None and (row := re.match(r"(\d+) (.*)", stripped)):
        table[int(row[1])] = row[2]

  def run(self) -> Iterator[Placed]:
    """Yields every instruction that runs, but those inside fusions, in the order of the text."""
    yield from self._run(self.entry, (), False, ())

  def _run(self, name: str, loops: tuple[Loop, ...], conditional: bool, above: tuple[str, ...]
           ) -> Iterator[Placed]:
    if name in above:
      return
    above = (*above, name)
    for one in self.computations.get(name, {}).values():
      yield Placed(one, name, loops, conditional)
      if one.opcode == "while":
        inside = (*loops, Loop(one.name, _trips(one)))
        for part in ("condition", "body"):
          for called in _names(one.attribute(part)):
            yield from self._run(called, inside, conditional, above)
      elif one.opcode == "conditional":
        for part in ("branch_computations", "true_computation", "false_computation"):
          for called in _names(one.attribute(part)):
            yield from self._run(called, loops, True, above)
      elif one.opcode in ("call", "async-start"):
        for called in _names(one.attribute("to_apply")) + _names(one.attribute("calls")):
          yield from self._run(called, loops, conditional, above)

  def frames(self, one: Instruction) -> list[tuple[str, int]]:
    """Files and lines of the calls an instruction comes from, the innermost first."""
    if found := re.search(r'source_file="([^"]*)"(?: source_line=(\d+))?', one.rest):
      return [(found[1], int(found[2] or 0))]
    frame = re.search(r"stack_frame_id=(\d+)", one.rest)
    place = int(frame[1]) if frame else 0
    frames: list[tuple[str, int]] = []
    seen: set[int] = set()
    while place and place not in seen:
      seen.add(place)
      row = _numbers(self._tables.get("StackFrames", {}).get(place, ""))
      where = _numbers(self._tables.get("FileLocations",
                                        {}).get(row.get("file_location_id", 0), ""))
      file = self._tables.get("FileNames", {}).get(where.get("file_name_id", 0), "").strip('"')
      if file:
        frames.append((file, where.get("line", 0)))
      # The outermost frame is printed as its own parent.
      place = row.get("parent_frame_id", 0)
    return frames


_HEADER = re.compile(r"(ENTRY\s+)?%?([\w.~$-]+)\s*(?:\(.*\)\s*->.*)?\{$")


def instruction(line: str) -> Instruction | None:
  """Reads one line of a computation; None where it is none."""
  line = line.removeprefix("ROOT ")
  name, equals, rest = line.partition(" = ")
  if not equals or not re.fullmatch(r"%?[\w.~$-]+", name):
    return None
  rest = re.sub(r"/\*.*?\*/", "", rest)
  end = _closing(rest, 0) + 1 if rest.startswith("(") else rest.find(" ")
  shape, call = rest[:end], rest[end:].strip()
  opening = call.find("(")
  if end <= 0 or opening <= 0:
    return None
  closing = _closing(call, opening)
  operands = tuple(part.split()[-1].lstrip("%") for part in parts(call[opening + 1:closing])
                   if part.split())
  return Instruction(name.lstrip("%"), shape, call[:opening].strip(), operands,
                     call[closing + 1:].lstrip(", "))


def _write_out_elements(body: dict[str, Instruction]) -> None:
  """Gives elements of tuples that are named where they are used, `%while.2#1`, lines of their own.

  What jaxlib 0.11 and 0.12 dump has no `%x = f32[] get-tuple-element(%while.2), index=1`.
  """
  written: dict[str, Instruction] = {}
  for one in body.values():
    for operand in one.operands:
      whole, *places = operand.split("#")
      for place in places:
        element = f"{whole}#{place}"
        tuple_of = written.get(whole) or body.get(whole)
        if tuple_of is None or not place.isdecimal():
          break
        if element not in body:
          shapes = parts(tuple_of.shape[1:-1])
          shape = shapes[int(place)] if int(place) < len(shapes) else ""
          written[element] = Instruction(
              element, shape, "get-tuple-element", (whole,), f"index={place}")
        whole = element
    written[one.name] = one
  body.clear()
  body.update(written)


def arrays(shape: str) -> list[tuple[str, tuple[int, ...]]]:
  """Element types and sizes of the arrays in a printed shape: `(f32[2,3]{1,0}, s32[])`."""
  return [(kind, tuple(int(size) for size in re.findall(r"\d+", sizes)))
          for kind, sizes in re.findall(r"([a-z]+\d*[a-z0-9]*)\[([\d,<=]*)\]", shape)]


def _trips(loop: Instruction) -> int | None:
  found = re.search(r'"known_trip_count":\{"n":"(\d+)"', loop.rest.replace(" ", ""))
  return int(found[1]) if found else None


def _names(text: str | None) -> list[str]:
  return re.findall(r"%?([\w.~$-]+)", text) if text else []


def _numbers(row: str) -> dict[str, int]:
  return {name: int(value) for name, value in re.findall(r"(\w+)=(\d+)", row)}


_PAIRS = {"(": ")", "[": "]", "{": "}"}


def _closing(text: str, place: int) -> int:
  """Place of the bracket that closes the one at `place`; the last place where none does."""
  depth, quoted = 0, False
  for at in range(place, len(text)):
    letter = text[at]
    if letter == '"' and text[at - 1] != "\\":
      quoted = not quoted
    elif quoted:
      continue
    elif letter in _PAIRS:
      depth += 1
    elif letter in ")]}":
      depth -= 1
      if depth == 0:
        return at
  return len(text) - 1


def _end(text: str) -> int:
  """Length of what stands before the next comma outside brackets and quotes."""
  at = 0
  while at < len(text):
    if text[at] in _PAIRS:
      at = _closing(text, at)
    elif text[at] == '"':
      closing = text.find('"', at + 1)
      at = closing if closing > 0 else len(text)
    elif text[at] == ",":
      return at
    at += 1
  return len(text)


def parts(text: str) -> list[str]:
  """What stands between commas outside brackets and quotes."""
  found = []
  while text:
    end = _end(text)
    found.append(text[:end].strip())
    text = text[end + 1:]
  return found
