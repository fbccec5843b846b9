"""What a recorded run says of the programs that its timestamps are of, and the slots of their
collectives: a place for each iteration of each, in unrolled order."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from jaxpace.core.observed import Loop, ObservedCollective, ObservedProgram
from jaxpace.record.ring.executions import COMPUTE, PHASES

CLOCK, STREAM_CLOCK = "marks", "stream marks"


class PlannedProgram:
  """A program with timestamps: where its collectives lie in the table, and what to add up."""

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
    """Whether it has collectives in loops whose iterations are not known."""
    return any(each.iterations is None for each in self.program.collectives)


class TimestampPlan:
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
    """Ranks that a program with timestamps runs on."""
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
    self._plan: TimestampPlan | None = None

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
    """Says which steps are written in detail, for `run.json`."""
    if detail != self._detail:
      self._detail = detail
      self._plan = None

  def tell_step(self, step: dict[str, Any]) -> None:
    """Says which programs were found to be the step, for `run.json`."""
    self._step, self._plan = step, None

  @property
  def plan(self) -> TimestampPlan:
    """The plan of now; the same object as long as nothing is new."""
    if self._plan is None:
      self._plan = TimestampPlan(list(self.by_number.values()), self._ranks, self._detail,
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


MOST = 4096
"""Slots of a program: what readers take of a step."""
UNKNOWN_ITERATIONS = 64
"""Turns that have slots in a loop whose iterations the compiler does not know."""


class Unrolled:
  """The slots of one program; the same in every process, since the program is."""

  def __init__(self, program: ObservedProgram, most: int = MOST):
    """Lays them out. Where there would be more than `most`, only the first iterations of loops have
    slots."""
    self.program = program
    self.turns_kept: int | None = None
    if _size(program.collectives, None) > most:
      self.turns_kept = 1 << 20
      while self.turns_kept > 1 and _size(program.collectives, self.turns_kept) > most:
        self.turns_kept //= 2
    self.slots = _unroll(program.collectives, self.turns_kept)[:most]
    """(place of the collective, turn) of each slot."""
    iterations = max((iteration for _, iteration in self.slots), default=0) + 1
    self._slot = np.full((len(program.collectives) + 1, iterations + 1), -1, np.int64)
    for slot, (place, iteration) in enumerate(self.slots):
      self._slot[place, iteration] = slot
    self._place = {each.index: place for place, each in enumerate(program.collectives)}
    size = max(self._place, default=-1) + 2
    self._place_of = np.full(size, len(program.collectives), np.int64)
    for index, place in self._place.items():
      self._place_of[index] = place

  def __len__(self) -> int:
    return len(self.slots)

  def slot(self, collective: np.ndarray, iteration: np.ndarray) -> np.ndarray:
    """[m] slots of occurrences, by index of their collective and turn; -1 where there is none."""
    place = self._place_of[np.clip(collective, 0, len(self._place_of) - 1)]
    return self._slot[place, np.minimum(iteration, self._slot.shape[1] - 1)]

  def entry(self, slot: int, at: int, call: int = 0, of: int = 0) -> dict[str, Any]:
    """Describes a slot for `run.json`.

    Args:
      slot: place in `slots`.
      at: number of the slot in the table.
      call: how many executions of the program come before, in a step that has several.
      of: what to add to the collective's index, in a run of several programs.
    """
    place, iteration = self.slots[slot]
    each = self.program.collectives[place]
    groups = each.groups or _together(each.pairs)
    return {
        "slot": at, "name": slot_name(each.name, iteration, call), "primitives": [each.kind],
        "kind": each.kind, "axis": ",".join(each.axes), "bytes": each.bytes,
        "operands": each.operands, "dtypes": list(each.dtypes), "phase": each.phase,
        "groups": [list(members) for members in groups],
        "rank_pairs": [list(pair) for pair in each.pairs] or None,
        "operation": each.operation, "source": each.source,
        "loops": [*([["call", call, None]] if call else []), *iterations_of(each.loops, iteration)],
        "of": of + each.index, "program": self.program.number, "conditional": each.conditional,
    }


def slot_name(name: str, iteration: int, call: int = 0) -> str:
  """Name of a collective in one iteration of its loops and one of several executions.

  >>> slot_name("all-gather.11", 0), slot_name("all-gather.11", 3), slot_name("all-reduce.2", 1, 2)
  ('all-gather.11', 'all-gather.11@3', 'all-reduce.2@1#2')
  """
  return f"{name}{f'@{iteration}' if iteration else ''}{f'#{call}' if call else ''}"


def iterations_of(loops: Sequence[Loop], iteration: int) -> list[list[Any]]:
  """[name, turn, iterations in all] of each loop, outermost first, at the iteration-th time in all.

  Where a loop's iterations are not known, which iteration of the loops around it this is can't be
  told: those are left out.

  >>> iterations_of([Loop("a", 3), Loop("b", 4)], 6)
  [['a', 1, 3], ['b', 2, 4]]
  >>> iterations_of([Loop("a", None), Loop("b", 4)], 6)
  [['a', 1, None], ['b', 2, 4]]
  >>> iterations_of([Loop("a", 3), Loop("b", None)], 6)
  [['b', 6, None]]
  """
  found: list[list[Any]] = []
  for depth, loop in reversed(list(enumerate(loops))):
    if depth == 0 or not loop.trips:
      found.append([loop.name, iteration, loop.trips])
      break
    found.append([loop.name, iteration % loop.trips, loop.trips])
    iteration //= loop.trips
  return found[::-1]


def iterations_in_words(iterations: Iterable[Sequence[Any]]) -> str:
  """Puts what `iterations_of` gives into words; empty outside of loops.

  >>> iterations_in_words([["while.1", 2, 4], ["while.2", 17, None]])
  'iteration 2 of 4, in it iteration 17'
  """
  return ", in it ".join(f"iteration {iteration}" + ("" if trips is None else f" of {trips}")
                         for _, iteration, trips in iterations)


def _trips(loop: Loop) -> int:
  return UNKNOWN_ITERATIONS if loop.trips is None else max(0, loop.trips)


def _size(collectives: Sequence[ObservedCollective], kept: int | None) -> int:
  total = 0
  for each in collectives:
    iterations = 1
    for loop in each.loops:
      iterations *= _trips(loop) if kept is None else min(kept, _trips(loop))
    total += iterations
  return total


def _unroll(collectives: Sequence[ObservedCollective], kept: int | None) -> list[tuple[int, int]]:
  """(place, turn) in the order in which they run; iterations of a loop from `kept` on are left
  out."""
  slots: list[tuple[int, int]] = []
  # Turn of each collective's whole nest, as far as the loops around have come.
  def body(places: Sequence[int], depth: int, before: dict[int, int]) -> None:
    at = 0
    while at < len(places):
      place = places[at]
      loops = collectives[place].loops
      if len(loops) <= depth:
        slots.append((place, before[place]))
        at += 1
        continue
      loop = loops[depth]
      inside = [place]
      while at + len(inside) < len(places):
        other = collectives[places[at + len(inside)]].loops
        if len(other) <= depth or other[depth].name != loop.name:
          break
        inside.append(places[at + len(inside)])
      trips = _trips(loop)
      for iteration in range(trips if kept is None else min(kept, trips)):
        body(inside, depth + 1, {each: before[each] * trips + iteration for each in inside})
      at += len(inside)

  body(range(len(collectives)), 0, dict.fromkeys(range(len(collectives)), 0))
  return slots


def _together(pairs: Sequence[tuple[int, int]]) -> list[tuple[int, ...]]:
  """Ranks that pairs of source and target connect."""
  groups: dict[int, set[int]] = {}
  for source, target in pairs:
    joined = groups.get(source, {source}) | groups.get(target, {target})
    for rank in joined:
      groups[rank] = joined
  return sorted({tuple(sorted(group)) for group in groups.values()})
