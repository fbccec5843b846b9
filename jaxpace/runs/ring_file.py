"""Reads what each process leaves in the folder `marks`: its ring, in whatever state, and what the
timestamps mean, `<process>.plan.json`.

Programs are numbered by the process that compiled them. The plan is written as soon as a program is
compiled, so that it is there should the first step never end.
"""

from __future__ import annotations

import collections
import contextlib
import json
import pathlib
import re
from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec
import numpy as np

from jaxpace.core import ring_layout
from jaxpace.core.observed import TAG_BITS, ObservedPlan, ObservedProgram
from jaxpace.files.folders import Folder
from jaxpace.files.reading import UnreadableError, check_regular, parse, read_bytes
from jaxpace.files.schemas import RANKS, TIME, ProcessFile
from jaxpace.runs.run import Process

FOLDER = "marks"
"""Of a run directory; one file a process in it, `<process>.ring`."""

_NAME = re.compile(r"^(\d+)(\.previous)?\.(ring|plan\.json)$")
_MOST_CAPACITY = 1 << 22
_MOST = (2 * ring_layout.PAGE + ring_layout.MOST_BUFFERS * ring_layout.BLOCK
         + 2 * ring_layout.MOST_BYTES)


class RingFile(NamedTuple):
  """A ring as it was found. Every value of it may be anything; arrays have the shapes said."""

  run: str
  attempt: int
  closed: bool
  """Whether a recorder closed it; else its process was killed, or still runs."""
  alive_ns: int
  """When the process last said that it lives, on its monotonic clock; 0: not said."""
  # [buffers] int32
  ranks: np.ndarray
  # [buffers] uint64
  heads: np.ndarray
  # [buffers, capacity] ring_layout.EVENT
  events: np.ndarray


def name(process: int) -> str:
  """Returns the name of a process's ring in `FOLDER`."""
  return f"{process}.ring"


def process_of(file_name: str) -> int | None:
  """Process that a file of the folder belongs to; None for one that is not a recorder's.

  >>> process_of("3.ring"), process_of("3.previous.plan.json"), process_of("notes.txt")
  (3, 3, None)
  """
  match = _NAME.match(file_name)
  return int(match[1]) if match else None


def keep_unclosed(folder: Folder, process: int) -> None:
  """Gives the ring of a process that was killed, and what its timestamps mean, another name:
  `<process>.previous.ring`."""
  found = header(folder.path / name(process))
  if found is None or found["closed"]:
    return
  for kind in ("ring", "plan.json"):
    with contextlib.suppress(OSError):
      folder.rename(f"{process}.{kind}", f"{process}.previous.{kind}")


def run_of(path: pathlib.Path) -> str | None:
  """Id of the run that a ring's file says it is of; None where it can't be read."""
  found = header(path)
  return None if found is None else found["run"].decode("utf-8", "replace")


def read_pulse(path: pathlib.Path) -> tuple[int, np.ndarray] | None:
  """Reads what shows whether a process still writes: `alive_ns` and `heads` of a `RingFile`; None
  where it can't be read."""
  found = header(path)
  if found is None or not 1 <= found["lanes"] <= ring_layout.MOST_BUFFERS:
    return None
  blocks = np.zeros(int(found["lanes"]), ring_layout.BUFFER)
  try:
    there = np.fromfile(path, ring_layout.BUFFER, len(blocks), offset=ring_layout.PAGE)
  except OSError:
    return None
  blocks[:len(there)] = there
  return int(found["alive_ns"]), blocks["head"]


def header(path: pathlib.Path) -> np.void | None:
  """Returns what a ring's file begins with, a `ring_layout.HEADER`; None where it can't be read."""
  try:
    check_regular(path)
    with open(path, "rb") as file:
      data = file.read(ring_layout.HEADER.itemsize)
  except (OSError, UnreadableError):
    return None
  magic = ring_layout.MAGIC.rstrip(b"\n")
  if len(data) < ring_layout.HEADER.itemsize or not data.startswith(magic):
    return None
  return np.frombuffer(data, ring_layout.HEADER, 1)[0]


def read_ring(path: str | pathlib.Path) -> RingFile:
  """Reads a ring's file; what is cut off at its end counts as never written. Raises UnreadableError
  where it is no ring of timestamps."""
  data = read_bytes(path, _MOST)
  if len(data) < ring_layout.PAGE or not data.startswith(ring_layout.MAGIC.rstrip(b"\n")):
    raise UnreadableError("is no ring of timestamps")
  label = np.frombuffer(data, ring_layout.HEADER, 1)[0]
  buffers, capacity = int(label["lanes"]), int(label["capacity"])
  try:
    where = ring_layout.layout(buffers, min(capacity, 1 << 31))
  except ValueError as error:
    raise UnreadableError(f"has a damaged header: {error}") from None
  if capacity > _MOST_CAPACITY or where.size > _MOST:
    raise UnreadableError(
        f"says that it has {buffers} device buffers of {capacity} events, more than any ring")
  _, blocks, events = ring_layout.views(data.ljust(where.size, b"\0"), where)
  return RingFile(
      label["run"].decode("utf-8", "replace"), int(label["attempt"]), bool(label["closed"]),
      int(label["alive_ns"]), np.array(blocks["rank"]), np.array(blocks["head"]), events)


LARGEST = 64 << 20
"""Bytes of a plan that is read."""
_LONGEST = 4096
"""Characters of a name in it."""


def path_of(directory: pathlib.Path, process: int) -> pathlib.Path:
  """Where the plan of a process lies."""
  return directory / FOLDER / f"{process}.plan.json"


def write_plan(directory: pathlib.Path | Folder, process: int, run: str, attempt: int,
               plan: ObservedPlan) -> None:
  """Replaces a process's plan as a whole, in a run directory or its folder `FOLDER`, held open; it
  is on the disk when this returns."""
  document = {"run": run, "attempt": attempt, "process": process, "plan": plan.to_json()}
  folder = directory if isinstance(directory, Folder) else Folder(directory, FOLDER)
  folder.write_text(f"{process}.plan.json", json.dumps(document), fsync=True)


def read_plan(directory: pathlib.Path, process: int) -> tuple[str | None, int, ObservedPlan]:
  """Reads a process's plan: the run and the attempt that it belongs to, and its programs. Raises
  UnreadableError where it is no such file."""
  value = parse(read_bytes(path_of(directory, process), LARGEST))
  try:
    said = msgspec.convert(value, ProcessFile)
    programs = msgspec.convert(value["plan"]["programs"], tuple[ObservedProgram, ...])
  except (KeyError, TypeError, ValueError):
    raise UnreadableError("holds no plan of an observed step") from None
  if not all(map(_sound, programs)):
    raise UnreadableError("has numbers that no recorder writes")
  return said.run, said.attempt or 0, ObservedPlan(programs)


def with_all_groups(directory: pathlib.Path, info: dict[str, Any], processes: Sequence[Process]
                    ) -> dict[str, Any]:
  """`run.json` with the groups in which ranks meet that process 0 knows nothing of: where each
  process trains on its own devices, its program is one of them alone.

  Args:
    directory: run directory.
    info: `run.json`, whose plan has the groups of process 0's programs.
    processes: as they described themselves.
  """
  plan = info.get("plan") or {}
  entries = plan.get("collectives") or []
  known = {rank for entry in entries for group in entry.get("groups") or () for rank in group}
  others = [one for one in processes if not known.issuperset(one.ranks)]
  if not known or not others:
    return info
  found: dict[tuple[Any, ...], list[list[int]]] = collections.defaultdict(list)
  for process in others:
    with contextlib.suppress(OSError, UnreadableError):
      run, _, own = read_plan(directory, process.process)
      for program in own.programs if run == info.get("run") else ():
        for each in program.collectives:
          found[each.name, each.kind, each.bytes] += map(list, each.groups)
  completed = []
  for entry in entries:
    groups = list(entry.get("groups") or ())
    inside = {rank for group in groups for rank in group}
    name = entry.get("name", "").partition("@")[0].partition("#")[0]
    for group in found[name, entry.get("kind"), entry.get("bytes")] if groups else ():
      if inside.isdisjoint(group):
        groups.append(group)
        inside |= set(group)
    completed.append({**entry, "groups": groups} if groups else entry)
  return {**info, "plan": {**plan, "collectives": completed}}


def _sound(program: ObservedProgram) -> bool:
  """Whether every number is one that a recorder writes: none asks for more memory than there is."""
  ranks, counts = set(program.ranks), set(program.mesh_axes.values())
  tags: set[int] = set()
  names = {program.name, program.bare}
  for each in program.collectives:
    ranks.update(*each.groups, *each.pairs)
    tags.update((each.enter_tag, each.exit_tag))
    counts.update((each.index, each.operands, each.bytes or 0,
                   *(loop.trips or 0 for loop in each.loops)))
    names.update((each.name, each.kind, each.source or "", each.operation or ""))
  limits = ((ranks, RANKS), (tags, 1 << TAG_BITS), (counts, TIME), ({program.number}, 1 << 12),
            (map(len, names), _LONGEST + 1))
  return all(0 <= number < most for numbers, most in limits for number in numbers)
