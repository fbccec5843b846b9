"""The slots of a program's collectives, a place for each iteration of each in unrolled order; and
what `run.json` says of them."""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from jaxpace.core.observed import ObservedProgram
from jaxpace.core.plan import Collective, Loop

CLOCK, STREAM_CLOCK = "marks", "stream marks"

MOST = 4096
"""Slots of a program: what readers take of a step."""
LOOPS = 4
"""Loops of a program, one after the other, whose steps have as many."""
UNKNOWN_ITERATIONS = 64
"""Iterations that have slots in a loop whose iterations the compiler does not know."""


class PlannedProgram:
  """A program and the slots of its collectives; the same in every process, since the program is."""

  def __init__(self, program: ObservedProgram, of: int | None = 0,
               alike: PlannedProgram | None = None):
    """Lays the slots out, by the indices of collectives. Where there would be more than `MOST`,
    only the first iterations of loops have slots.

    A program with the same collectives as one before has the same slots in a step: it is often
    compiled twice, since what the first call is given is laid out in another way than what it
    returns.

    Args:
      of: what is added to the indices of its collectives, in a run of several programs; None where
        none has more than one slot, so that nobody need know which are of the same.
      alike: a program before with the same collectives.
    """
    self.program = program
    self.of: int | None = of if alike is None else alike.of
    self.first: int = program.number if alike is None else alike.first
    """Number of the first program that it is like; its own, if there is none."""
    self.blocks: list[int] = [] if alike is None else alike.blocks
    """First slot, by how many executions of programs like it come before in the step."""
    self.turns_kept: int | None = None
    self._collectives = sorted(program.collectives, key=lambda one: one.index)
    if _size(self._collectives, math.inf) > MOST:
      self.turns_kept = 1 << 20
      while self.turns_kept > 1 and _size(self._collectives, self.turns_kept) > MOST:
        self.turns_kept //= 2
    self.slots = list(itertools.islice(
        _unroll(self._collectives, self.turns_kept or math.inf), MOST))
    """(place of the collective by its index, turn) of each slot."""
    iterations = max((iteration for _, iteration in self.slots), default=0) + 1
    size = max((each.index for each in self._collectives), default=-1) + 2
    self._slot = np.full((size, iterations + 1), -1, np.int64)
    for slot, (place, iteration) in enumerate(self.slots):
      self._slot[self._collectives[place].index, iteration] = slot

  def __len__(self) -> int:
    return len(self.slots)

  def copied(self, blocks: list[int]) -> PlannedProgram:
    """The same with other first slots."""
    other = copy.copy(self)
    other.blocks = blocks
    return other

  def slot(self, collective: np.ndarray, iteration: np.ndarray) -> np.ndarray:
    """[m] slots of occurrences, by index of their collective and turn; -1 where there is none."""
    rows, columns = self._slot.shape
    return self._slot[np.clip(collective, 0, rows - 1), np.minimum(iteration, columns - 1)]

  def entry(self, slot: int, at: int, call: int = 0) -> dict[str, Any]:
    """Describes a slot for `run.json`.

    Args:
      slot: place in `slots`.
      at: number of the slot in the table.
      call: how many executions of the program come before, in a step that has several.
    """
    place, iteration = self.slots[slot]
    each = self._collectives[place]
    told = {"slot": at, **each.to_json(), "name": slot_name(each.name, iteration, call)}
    if self.of is None:
      return told
    loops = [*([["call", call, None]] if call else []), *iterations_of(each.loops, iteration)]
    return {**told, "loops": loops, "of": self.of + each.index, "program": self.program.number}

  @property
  def notices(self) -> tuple[str, ...]:
    """What is worth knowing about it, in sentences."""
    said = self.program.notices
    if self.program.bare:
      said = (*said, f"{self.program.name} runs unmodified: {self.program.bare}")
    if self.turns_kept is not None:
      said = (*said, f"{self.program.name} has more than {MOST} collectives per step, iterations "
              f"of loops counted: of each loop the first {self.turns_kept} iterations are recorded "
              "one by one, all in the sums.")
    return said


class StepPlan:
  """The plan of `run.json`; made anew whenever a program or an execution is new.

  Attributes:
    collectives: [slots] what `run.json` says of each.
    columns: [slots] what the table `collectives` says of each.
  """

  def __init__(self, programs: Sequence[PlannedProgram], told: Mapping[str, Any],
               detail: Mapping[str, Any], settings: Mapping[str, Any] | None = None):
    """Lays the slots' descriptions out.

    Args:
      programs: those that the steps run.
      told: what else `run.json` says of the step, with its "clock", "axis" and "ranks".
      detail: which steps have their collectives one by one; empty where all have.
      settings: what is added to the settings of the run.
    """
    self._told, self._detail, self._programs = told, dict(detail), tuple(programs)
    self.clock, self.axis, self.ranks = told["clock"], told["axis"], told["ranks"]
    self.settings = dict(settings or {})
    self.detailed = bool(detail)
    """Whether not all steps need be written in detail."""
    firsts = [each for each in programs if each.first == each.program.number]
    by_slot = {base + slot: each.entry(slot, base + slot, call) for each in firsts
               for call, base in enumerate(each.blocks) for slot in range(len(each))}
    self.collectives = [entry for _, entry in sorted(by_slot.items())]
    self.columns = columns_of_slots(self.collectives)

  def to_json(self) -> dict[str, Any]:
    """Returns plain lists, dicts and scalars, with the keys that readers know of all plans."""
    notices = dict.fromkeys(notice for each in self._programs for notice in each.notices)
    return {**self._told, "collectives": self.collectives, "detail": self._detail,
            "notices": [*self._told.get("notices", ()), *notices]}


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


def _size(collectives: Sequence[Collective], kept: float) -> float:
  return sum(math.prod(min(kept, _trips(loop)) for loop in each.loops) for each in collectives)


def _unroll(collectives: Sequence[Collective], kept: float) -> Iterator[tuple[int, int]]:
  """(place, iteration in all) in the order in which they run; iterations of a loop from `kept` on
  are left out."""
  def body(places: Iterable[int], depth: int, turn: int) -> Iterator[tuple[int, int]]:
    def loop_of(place: int) -> str | None:
      loops = collectives[place].loops
      return loops[depth].name if len(loops) > depth else None

    for loop, inside in itertools.groupby(places, loop_of):
      own = list(inside)
      if loop is None:
        yield from ((place, turn) for place in own)
        continue
      trips = _trips(collectives[own[0]].loops[depth])
      for iteration in range(int(min(kept, trips))):
        yield from body(own, depth + 1, turn * trips + iteration)

  return body(range(len(collectives)), 0, 0)


def columns_of_slots(entries: Sequence[Mapping[str, Any]]) -> dict[str, np.ndarray]:
  """Returns what the table `collectives` says of each slot, [slots], from what `run.json` says;
  bytes are masked where they are not known."""
  names, axes = (np.array([entry[name] for entry in entries], np.str_) for name in ("name", "axis"))
  sizes = [entry["bytes"] for entry in entries]
  return {"collective": np.arange(len(entries), dtype=np.int32), "name": names, "axis": axes,
          "bytes": np.ma.masked_array(np.array([size or 0 for size in sizes], np.int64),
                                      [size is None for size in sizes])}
