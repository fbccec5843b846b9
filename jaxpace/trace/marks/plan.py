"""What a recorded run says of the programs that its marks are of, and the slots of their
collectives."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from jaxpace.core.observed import ObservedProgram
from jaxpace.trace.marks.slots import MOST, Unrolled
from jaxpace.trace.marks.sums import COMPUTE, PHASES

CLOCK, STREAM_CLOCK = "marks", "stream marks"


class PlannedProgram:
  """A program with marks: where its collectives lie in the table, and what to add up."""

  def __init__(self, program: ObservedProgram, of: int, alike: PlannedProgram | None = None):
    """Prepares; `of` is added to the indices of its collectives, in a run of several programs.

    A program with the same collectives as one before has the same slots: a step is often compiled
    twice, since what the first call is given is laid out in another way than what it returns.
    """
    self.program = program
    self.of: int = of if alike is None else alike.of
    self.first: int = program.number if alike is None else alike.first
    """Number of the first program that it is like; its own, if there is none."""
    self.unrolled = Unrolled(program)
    self.blocks: list[int] = [] if alike is None else alike.blocks
    """First slot, by how many executions of programs like it come before in the step."""
    self.phase = np.array([PHASES.get(each.phase, COMPUTE) for each in program.collectives],
                          np.int64)
    self.ranks = frozenset(program.ranks)

  @property
  def loops_unknown(self) -> bool:
    """Whether it has collectives in loops whose turns are not known."""
    return any(each.turns is None for each in self.program.collectives)


class MarkedPlan:
  """The plan of `run.json` for marked steps; made anew whenever a program or an execution is new.

  Attributes:
    names: [slots] names in the table.
    axes: [slots]
    bytes: [slots] int64, -1 where not known.
  """

  def __init__(self, programs: Sequence[PlannedProgram], ranks: int, detail: dict[str, Any],
               step: dict[str, Any] | None = None):
    """Lays the slots' descriptions out; `ranks` is that of all devices, `detail` says which steps
    have them, `step` which programs were found to be the step."""
    self.used = sorted({rank for each in programs if not each.program.bare for rank in each.ranks})
    """Ranks that a program with marks runs on."""
    ranks = self.used[-1] + 1 if self.used else ranks
    streamed = any(each.program.clock == "stream" for each in programs)
    self.clock, self.ranks, self._detail = STREAM_CLOCK if streamed else CLOCK, ranks, detail
    self._programs = tuple(programs)
    programs = [each for each in programs if each.first == each.program.number]
    size = max((base + len(each.unrolled) for each in programs for base in each.blocks), default=0)
    entries: list[dict[str, Any] | None] = [None] * size
    for each in programs:
      for call, base in enumerate(each.blocks):
        for slot in range(len(each.unrolled)):
          entries[base + slot] = each.unrolled.entry(slot, base + slot, call, each.of)
    self.collectives = [entry for entry in entries if entry is not None]
    self.names = np.array([entry["name"] for entry in self.collectives], np.str_)
    self.axes = np.array([entry["axis"] for entry in self.collectives], np.str_)
    self.bytes = np.array([-1 if entry["bytes"] is None else entry["bytes"]
                           for entry in self.collectives], np.int64)
    mesh = _mesh(programs, ranks)
    self.axis = ",".join(mesh) if mesh else ",".join(dict.fromkeys(
        axis for each in programs for axis in each.program.mesh_axes))
    self.settings: dict[str, Any] = {"mesh": mesh, "axis": list(mesh)} if mesh else {}
    if step:
      self.settings["step"] = step

  def to_json(self) -> dict[str, Any]:
    """Returns plain lists, dicts and scalars, with the keys that readers know of other plans."""
    notices = list(dict.fromkeys(notice for each in self._programs
                                 for notice in each.program.notices))
    unstamped = [vars(one) for each in self._programs for one in each.program.unstamped]
    for each in self._programs:
      if each.program.bare:
        notices.append(f"{each.program.name} runs unmodified: {each.program.bare}")
      if each.unrolled.turns_kept is not None:
        notices.append(f"{each.program.name} has more than {MOST} collectives per step, iterations "
                       f"of loops counted: of each loop the first {each.unrolled.turns_kept} "
                       "iterations are recorded one by one, all in the sums.")
    return {"axis": self.axis, "ranks": self.ranks, "clock": self.clock, "marks": [],
            "collectives": self.collectives, "unstamped": unstamped, "share": False,
            "share_reason": "", "carrier": None, "decisions": [], "overflow": 0,
            "notices": notices, "source": "observe", "detail": self._detail}


class PlannedPrograms:
  """The programs of observed functions as they are met, and the slots they are given."""

  def __init__(self, ranks: int):
    """Begins with none; `ranks` is that of all devices."""
    self._ranks, self._slots, self._of = ranks, 0, 0
    self._detail: dict[str, Any] = {}
    self._step: dict[str, Any] = {}
    self.by_number: dict[int, PlannedProgram] = {}
    self._plan: MarkedPlan | None = None

  def meet(self, programs: Iterable[ObservedProgram]) -> bool:
    """Takes note of programs; says whether one was new."""
    fresh = [each for each in programs if each.number not in self.by_number]
    for each in fresh:
      alike = next((one for one in self.by_number.values() if _same(one.program, each)), None)
      self.by_number[each.number] = PlannedProgram(each, self._of, alike)
      self._of += len(each.collectives) if alike is None else 0
      self._plan = None
    return bool(fresh)

  def block(self, number: int, call: int) -> int:
    """First slot of the call-th execution of a program, or one like it, in a step; -1 where no
    slots are left.

    In every process steps have the same executions in the same order, and so the same slots.
    """
    program = self.by_number[number]
    while len(program.blocks) <= call:
      size = len(program.unrolled)
      if self._slots + size > MOST and self._slots:
        return -1
      program.blocks.append(self._slots)
      self._slots += size
      self._plan = None
    return program.blocks[call]

  def tell_detail(self, detail: dict[str, Any]) -> None:
    """Says which steps are written in full, for `run.json`."""
    if detail != self._detail:
      self._detail = detail
      self._plan = None

  def tell_step(self, step: dict[str, Any]) -> None:
    """Says which programs were found to be the step, for `run.json`."""
    self._step, self._plan = step, None

  @property
  def plan(self) -> MarkedPlan:
    """The plan of now; the same object as long as nothing is new."""
    if self._plan is None:
      self._plan = MarkedPlan(list(self.by_number.values()), self._ranks, self._detail,
                              self._step)
    return self._plan


def _same(one: ObservedProgram, other: ObservedProgram) -> bool:
  """Whether two programs have the same collectives, each in the same place."""
  def key(program: ObservedProgram) -> tuple[Any, ...]:
    return program.name, program.ranks, program.bare, [
        (each.index, each.kind, each.bytes, each.dtypes, each.groups, each.pairs, each.phase,
         each.loops and
         [loop.trips for loop in each.loops]) for each in program.collectives]
  return key(one) == key(other)


def _mesh(programs: Sequence[PlannedProgram], ranks: int) -> dict[str, int]:
  """The mesh, where it has all devices in their order; else {}."""
  for each in programs:
    if each.program.mesh_axes and each.program.ranks == tuple(range(ranks)):
      return dict(each.program.mesh_axes)
  return {}

