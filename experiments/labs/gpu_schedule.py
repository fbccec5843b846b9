"""Reads what XLA made of a step for a GPU: the scheduled program and, dumped, the thunks it runs
as."""

from __future__ import annotations

import collections
import math
import pathlib
import re
from typing import NamedTuple

_INSTRUCTION = re.compile(
    r"^\s*(?:ROOT )?%(?P<name>[\w.\-]+) = (?P<type>.*?) (?P<kind>[a-z][a-z0-9\-]*)\(")
_NO_WORK = {"parameter", "constant", "bitcast", "get-tuple-element", "tuple", "after-all"}
_HOST = ("callback", "outfeed", "infeed", "SendToHost", "RecvFromHost", "MoveToHost",
         "MoveToDevice")
_SHAPE = re.compile(r"\w\[([0-9,]*)\]")
_COMPUTATION = re.compile(r"^%(?P<name>[\w.\-]+) (?P<body>\(.*?\) -> .*? \{\n.*?^\})",
                          re.MULTILINE | re.DOTALL)
_CALLED = re.compile(r"calls=%([\w.\-]+)")
_KIND = re.compile(r"kind=\w+")
_NAME = re.compile(r"%[\w.\-]+|(?<=[(,] )\w[\w.]*(?=: )|(?<=\()\w[\w.]*(?=: )")
_ARITHMETIC = re.compile(
    r" (?:add|subtract|multiply|divide|dot|reduce|negate|power|rsqrt|exponential|log|tanh)\(")
_METADATA = re.compile(r", metadata=\{[^}]*\}|, backend_config=\{.*?\}(?=\n)")
_THUNK = re.compile(r"^(?P<indent>\s*)\d+: (?P<kind>k\w+)(?:\s.*?\][^\S\n]*(?P<name>\S*))?")


class Operation(NamedTuple):
  """Something the device does, in the order of the schedule."""

  kind: str  # stamp, delay, hold, copy, start or done of a collective, product, other
  name: str


class Schedule(NamedTuple):
  """One compiled step."""

  operations: list[Operation]
  branches: int  # conditionals and loops, for which the host may have to wait
  host: int  # operations that go to the host
  reduced: int  # numbers in all collectives

  def count(self, *kinds: str) -> int:
    return sum(operation.kind in kinds for operation in self.operations)

  def starts(self) -> list[float]:
    """For each collective the share of the step's matrix products that are scheduled before it
    starts."""
    products = max(self.count("product"), 1)
    done, shares = 0, []
    for operation in self.operations:
      done += operation.kind == "product"
      if operation.kind == "start":
        shares.append(done / products)
    return shares

  def beside_collectives(self) -> int:
    """Kernels of the step's own that are scheduled while a collective is under way."""
    under_way, found = 0, 0
    for operation in self.operations:
      under_way += (operation.kind == "start") - (operation.kind == "done")
      found += under_way > 0 and operation.kind in ("product", "other")
    return found

  def before_exit(self) -> int | None:
    """The step's own kernels between the end of its last collective and the stamp that tells of
    it."""
    kinds = [operation.kind for operation in self.operations]
    after = kinds[len(kinds) - kinds[::-1].index("done"):] if "done" in kinds else []
    return (sum(kind in ("product", "other") for kind in after[:after.index("stamp")])
            if "stamp" in after else None)

  def problems(self, delayed: bool) -> list[str]:
    """What is out of order: a stamp that would tell a lie, a delay that would come too late."""
    kinds = [operation.kind for operation in self.operations]
    stamps = [i for i, kind in enumerate(kinds) if kind in ("stamp", "delay")]
    products = [i for i, kind in enumerate(kinds) if kind == "product"]
    starts = [i for i, kind in enumerate(kinds) if kind == "start"]
    done = [i for i, kind in enumerate(kinds) if kind == "done"]
    found = []
    if not stamps or not products or not starts:
      return ["no stamps, no matrix products or no collectives"]
    if stamps[0] > products[0]:
      found.append("a matrix product is scheduled before the first stamp")
    if delayed and kinds[stamps[0]] != "delay":
      found.append("the delay is not the first timer")
    if not any(products[-1] < stamp < starts[-1] for stamp in stamps):
      found.append("no stamp between the last matrix product and the start of the last collective")
    if not any(stamp > done[-1] for stamp in stamps[:-1]):
      found.append("no stamp after the last collective but the one at the end of the step")
    return found


def schedule(text: str) -> Schedule:
  """Parses the text of a compiled and scheduled program."""
  entry = text[text.index("\nENTRY "):].split("\n}")[0].splitlines()[2:]
  operations, branches, host, reduced = [], 0, 0, 0
  for line in entry:
    match = _INSTRUCTION.match(line)
    if match is None or match["kind"] in _NO_WORK:
      continue
    branches += match["kind"] in ("conditional", "while")
    host += any(word in line for word in _HOST)
    kind = _kind(match["kind"], match["name"], line)
    if kind == "done":
      reduced += sum(math.prod(map(int, filter(None, shape.split(","))))
                     for shape in _SHAPE.findall(match["type"]))
    operations.append(Operation(kind, match["name"]))
  return Schedule(operations, branches, host, reduced)


def _kind(kind: str, name: str, line: str) -> str:
  for own in ("stamp", "delay", "hold"):
    if kind == "custom-call" and f"jaxpace_{own}" in line:
      return own
  if kind.endswith(("-start", "-done")):
    return kind.rpartition("-")[2]
  if kind in ("copy", "slice", "dynamic-slice") or name.startswith("wrapped_slice"):
    return "copy"
  if "gemm" in name or "cublas" in line or "__triton_nested_gemm" in line or kind == "dot":
    return "product"
  return "other"


def kernels(text: str) -> collections.Counter[str]:
  """What each fused kernel of a compiled program computes, without the names in it, and how
  often."""
  bodies = {match["name"]: match["body"] for match in _COMPUTATION.finditer(text)}
  entry = text[text.index("\nENTRY "):]
  return collections.Counter(_nameless(bodies.get(called, called)) + _KIND.search(line)[0]  # type: ignore[index]
                             for line in entry.splitlines() if " fusion(" in line
                             for called in _CALLED.findall(line))


def changed(bare: str, instrumented: str) -> int:
  """How many fused kernels that calculate the bare program has and the other lacks.

  Those that only cut, join or move what another made are left out: with an operand more in a
  collective, its buffer is cut elsewhere.
  """
  missing = kernels(bare) - kernels(instrumented)
  return sum(count for body, count in missing.items() if _ARITHMETIC.search(body))


def _nameless(body: str) -> str:
  names: dict[str, str] = {}
  return _NAME.sub(lambda match: names.setdefault(match[0], f"%{len(names)}"),
                   _METADATA.sub("", body))


class Thunk(NamedTuple):
  """One line of a sequence of thunks that XLA dumped."""

  kind: str  # kCustomKernel, kCopy, kCommandBuffer, ...
  name: str  # a kernel's
  in_graph: bool  # whether a command buffer holds it


def sequence(text: str) -> list[Thunk]:
  """Reads a dumped sequence; XLA indents what a command buffer holds, and what an asynchronous
  start does."""
  found: list[Thunk] = []
  buffer: int | None = None  # how far the command buffer is indented that the lines may belong to
  for line in text.splitlines():
    if match := _THUNK.match(line):
      indent = len(match["indent"])
      held = buffer is not None and indent > buffer
      if match["kind"] == "kCommandBuffer":
        buffer, held = indent, False
      elif not held:
        buffer = None
      found.append(Thunk(match["kind"], match["name"] or "", held))
  return found


class Thunks(NamedTuple):
  """How the runtime launches a step."""

  graphs: int  # command buffers, each of them one launch
  inside: int  # thunks in them
  outside: list[str]  # kinds of the others


def thunks(folder: pathlib.Path, module: str) -> Thunks | None:
  """Reads the sequence of thunks that XLA dumped for a module; None if it dumped none."""
  files = sorted(folder.glob(f"*{module}*thunk_sequence_after_thunk_passes.txt"))
  if not files:
    return None
  found = sequence(files[-1].read_text())
  alone = [thunk.kind for thunk in found if not thunk.in_graph]
  return Thunks(alone.count("kCommandBuffer"), len(found) - len(alone),
                [kind for kind in alone if kind != "kCommandBuffer"])
