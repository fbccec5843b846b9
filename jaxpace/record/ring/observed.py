"""The programs that make up a step: which are recorded, the slots of their collectives, and what
devices did in each step; where an instrumented step is in them, with what its pacer decided."""

from __future__ import annotations

import collections
import copy
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxpace.core import durations
from jaxpace.core import ring_layout as layout
from jaxpace.core.observed import ObservedFunction, ObservedProgram
from jaxpace.record.columns import Columns, DeviceSteps, Range, StepCalls, null
from jaxpace.record.ring.collect import Collector, Detail
from jaxpace.record.ring.executions import (
  BACKWARD,
  COMPUTE,
  FORWARD,
  NOTHING,
  PHASES,
  UPDATE,
  Executions,
  exposed,
  occurrences,
  sums,
)
from jaxpace.record.ring.plan import CLOCK, LOOPS, MOST, STREAM_CLOCK, PlannedProgram, StepPlan

_CLOCKS = {"stream": STREAM_CLOCK, "profiler": "profiler"}
"""Names in `run.json` of clocks that are not the host's."""
_PHASES = (("forward_ns", FORWARD), ("backward_ns", BACKWARD), ("compute_ns", COMPUTE),
           ("update_ns", UPDATE))


class PlannedPrograms:
  """What is recorded of observed functions whose programs make up a step: the programs as they are
  met, and the slots they are given. One of an instrumented function inherits."""

  def __init__(self, observed: Sequence[ObservedFunction]):
    """Begins with none; the functions are asked by the writer's thread."""
    self._observed = tuple(observed)
    self._slots = self._of = self._slots_before = 0
    self._detail: dict[str, Any] = {}
    self._step: dict[str, Any] = {}
    self._decisions: tuple[str, ...] = ()
    self.by_number: dict[int, PlannedProgram] = {}
    self._plan: StepPlan | None = None

  def copied(self) -> PlannedPrograms:
    """The same, so that slots given there are not given here."""
    other, blocks = copy.copy(self), dict[int, list[int]]()
    other.by_number = {number: each.copied(blocks.setdefault(each.first, [*each.blocks]))
                       for number, each in self.by_number.items()}
    return other

  @property
  def programs(self) -> list[ObservedProgram]:
    """All programs so far. From any thread."""
    plans = [one.plan for one in self._observed]
    return [program for plan in plans if plan is not None for program in plan.programs]

  @property
  def runs(self) -> frozenset[int]:
    """Numbers of the programs that steps may run. From any thread."""
    return frozenset[int]().union(*(one.runs for one in self._observed))

  @property
  def functions(self) -> list[ObservedFunction]:
    """Those whose calls run the steps' programs. From any thread."""
    return [each for one in self._observed for each in one.functions]

  @property
  def paced(self) -> dict[int, int]:
    """By number of a program with an instrumented step in it, that of the step's own events."""
    return {number: paced for number, each in list(self.by_number.items())
            if (paced := each.program.paced) is not None}

  def ranks(self, collector: Collector) -> dict[int, int]:
    """Rank of each device buffer's device, as far as the steps run there."""
    return dict(enumerate(collector.ranks))

  def used(self, collector: Collector) -> list[int]:
    """Ranks of this process that a program of the step runs on; any program with timestamps, where
    it isn't known what the step is."""
    used = _ranks_of(self._in_step())
    return [rank for rank in self.ranks(collector).values() if rank in used]

  def _in_step(self) -> list[PlannedProgram]:
    """The programs that make up the step, or did before: an evaluation may run elsewhere."""
    met = list(self.by_number.values())
    if not self._step:
      return met
    names = {name for one in (self._step, *self._step["before"]) for name in one["programs"]}
    return [each for each in met if each.program.title in names]

  def buffers(self, collector: Collector) -> dict[int, list[int]]:
    """Device buffers that each of the programs that steps may run writes to, by its number."""
    ranks = self.ranks(collector)
    return {number: buffers_of(program.program, ranks) for number in self.runs
            if (program := self.by_number.get(number))}

  def meet(self, _collector: Collector | None = None) -> bool:
    """Takes note of programs; says whether what is known of `programs` has changed."""
    fresh = [each for each in self.programs if each.number not in self.by_number]
    for each in fresh:
      alike = next((one for one in self.by_number.values() if _same(one.program, each)), None)
      self.by_number[each.number] = PlannedProgram(each, self._of, alike)
      self._of += len(each.collectives) if alike is None else 0
      self._plan = None
    return bool(fresh)

  def device(self, steps: Sequence[StepCalls], executions: Mapping[int, Executions], rank: int
             ) -> DeviceSteps:
    """Lays the executions of one device out by step.

    Args:
      executions: by number of the program; those of other steps are left out.
      rank: the device's. Programs that don't run on it are not awaited.
    """
    count = len(steps)
    found = np.zeros(count, np.int64)
    expected = np.zeros(count, np.int64)
    spans: list[tuple[np.ndarray, ...]] = []
    rows: list[tuple[np.ndarray, ...]] = []
    last = np.zeros(count, np.int64)
    earlier = [calls_before(step.ranges, self) for step in steps]
    sync, computed = np.zeros(count, np.int64), np.full((count, 4), -1, np.int64)
    columns: Columns = {}
    for number in sorted({one.program for step in steps for one in step.ranges}):
      program = self.by_number.get(number)
      if program is None or program.program.bare or rank not in program.program.ranks:
        continue
      own = [(at, one.begin, one.end, before) for at, step in enumerate(steps)
             for one, before in zip(step.ranges, earlier[at], strict=True) if one.program == number]
      at, begin, end, before = (np.array(column, np.int64) for column in zip(*own, strict=True))
      np.add.at(expected, at, end - begin)
      all_of_it = executions.get(number)
      if all_of_it is None or not len(all_of_it.number):
        continue
      place = np.searchsorted(begin, all_of_it.number, side="right") - 1
      inside = (place >= 0) & (all_of_it.number < end[np.maximum(place, 0)])
      step, call = at[place], all_of_it.number - begin[place] + before[place]
      np.add.at(found, step[inside], 1)
      spans.append((step[inside], all_of_it.start_ns[inside], all_of_it.end_ns[inside]))
      collectives = program.program.collectives
      ran = occurrences(all_of_it, collectives)
      phases = np.array([PHASES.get(each.phase, COMPUTE) for each in collectives], np.int64)
      phase = phases[np.searchsorted([each.index for each in collectives], ran.collective)]
      counted = inside[ran.execution]
      np.maximum.at(last, step[ran.execution][counted], ran.exit_ns[counted])
      begun = all_of_it.start_ns
      if program.program.paced is not None:
        decided = decisions_of(within(all_of_it, executions.get(program.program.paced, NOTHING)))
        for name, values in columns_of(decided, program.program.decisions).items():
          column = columns.setdefault(name, np.ma.masked_all(count, values.dtype))
          column[step[inside]] = values[inside]
        # What a delay takes is nothing that the device computes.
        begun = begun + np.ma.filled(nanoseconds(decided.applied), 0)
      own_sync, own_computed = sums(begun, all_of_it.end_ns, ran.execution, ran.enter_ns,
                                    ran.exit_ns, phase)
      np.add.at(sync, step[inside], own_sync[inside])
      for kind in range(4):
        known = inside & (own_computed[:, kind] >= 0)
        computed[step[known], kind] = np.maximum(computed[step[known], kind], 0)
        np.add.at(computed[:, kind], step[known], own_computed[known, kind])
      rows.append(_slots(number, program, self, ran, inside, step, call))
    start, stop, idle = _spans(spans, count)
    joined = [np.concatenate(column) for column in zip(*rows, strict=True)] if rows else [
        np.empty(0, np.int64)] * 4
    order = np.lexsort((joined[1], joined[2], joined[0]))
    columns |= {"sync_ns": sync, "last_exit_ns": np.ma.masked_array(last, last == 0)}
    for name, kind in _PHASES:
      values = computed[:, kind]
      columns[name] = np.ma.masked_array(np.maximum(values, 0), values < 0)
    return DeviceSteps((found == expected) & (expected > 0), found < expected, start, stop, columns,
                       dict(zip(("row", "slot", "enter_ns", "exit_ns"),
                                (column[order] for column in joined), strict=True)), idle)

  def block(self, number: int, call: int) -> int:
    """First slot of the call-th execution of a program, or one like it, in a step; -1 where no
    slots are left.

    In every process steps have the same executions in the same order, and so the same slots.
    """
    program = self.by_number[number]
    while len(program.blocks) <= call:
      own = self._slots - self._slots_before
      if own and own + len(program) > MOST or self._slots + len(program) > LOOPS * MOST:
        return -1
      program.blocks.append(self._slots)
      self._slots += len(program)
      self._plan = None
    return program.blocks[call]

  def tell_step(self, step: dict[str, Any]) -> None:
    """Says which programs were found to be the step, by their titles, for `run.json`."""
    if step["first_step"] != self._step.get("first_step"):
      self._slots_before = self._slots
    self._step, self._plan = step, None

  def plan_of(self, steps: Iterable[StepCalls], detail: Detail) -> StepPlan:
    """The plan with all slots that steps need; the same object as long as nothing is new."""
    for step in steps:
      if new := step.decisions.keys() - self._decisions:
        self._decisions, self._plan = (*self._decisions, *sorted(new)), None
      for one, before in zip(step.ranges, calls_before(step.ranges, self), strict=True):
        program = self.by_number.get(one.program)
        if program is not None and not program.program.bare:
          for call in range(before, before + one.end - one.begin):
            if self.block(one.program, call) < 0:
              break
    settled = self.settle(detail)
    if self._plan is None or settled != self._detail:
      self._detail = settled
      self._plan = self.lay_out(settled)
    return self._plan

  def settle(self, detail: Detail) -> dict[str, Any]:
    """Which steps have their collectives written one by one, for `run.json`; empty where all
    have."""
    return detail.settle(max((len(each) * len(each.blocks) for each in self.by_number.values()),
                             default=0), jax.device_count())

  def lay_out(self, detail: dict[str, Any]) -> StepPlan:
    """The plan with all slots so far."""
    planned, in_step = list(self.by_number.values()), self._in_step()
    ranks = max(_ranks_of(in_step), default=jax.device_count() - 1) + 1
    clocks = {each.program.clock for each in planned}
    # Where it has all devices in their order.
    mesh = next((dict(each.program.mesh_axes) for each in in_step if each.program.mesh_axes
                 and each.program.ranks == tuple(range(ranks))), {})
    axes = mesh or dict.fromkeys(axis for each in in_step for axis in each.program.mesh_axes)
    told = {"axis": ",".join(axes), "ranks": ranks,
            "clock": next((name for clock, name in _CLOCKS.items() if clock in clocks), CLOCK),
            "marks": [], "unstamped": [vars(one) for each in planned
                                       for one in each.program.unstamped],
            "share": False, "share_reason": "", "carrier": None,
            "decisions": list(dict.fromkeys([*self._decisions, *(
                name for each in planned for name in each.program.decisions)])),
            "overflow": 0, "source": "observe"}
    settings = {"mesh": mesh, "axis": list(mesh)} if mesh else {}
    return StepPlan(planned, told, detail, {**settings, **({"step": self._step_told()} if self._step
                                                           else {})})

  def shown(self) -> dict[str, str]:
    """By its title, what people call each program: its name, where no other has that."""
    names = {each.program.title: each.program.name for each in list(self.by_number.values())}
    times = collections.Counter(names.values())
    return {title: name if times[name] == 1 else title for title, name in names.items()}

  def _step_told(self) -> dict[str, Any]:
    shown = self.shown()

    def told(one: Mapping[str, Any]) -> dict[str, Any]:
      return {**one, **{key: [shown.get(title, title) for title in one[key]]
                        for key in ("programs", "beside") if key in one}}

    return {**told(self._step), "before": [told(one) for one in self._step["before"]]}


def _ranks_of(programs: Iterable[PlannedProgram]) -> set[int]:
  return {rank for each in programs if not each.program.bare for rank in each.program.ranks}


def buffers_of(program: ObservedProgram, ranks: Mapping[int, int]) -> list[int]:
  """Device buffers that a program writes to, of those with these ranks."""
  return [buffer for buffer, rank in ranks.items() if rank in program.ranks]


def _same(one: ObservedProgram, other: ObservedProgram) -> bool:
  """Whether two programs have the same collectives, each in the same place."""
  def key(program: ObservedProgram) -> tuple[Any, ...]:
    return program.title, program.ranks, program.bare, [
        (each.index, each.kind, each.bytes, each.dtypes, each.groups, each.pairs, each.phase,
         each.loops and
         [loop.trips for loop in each.loops]) for each in program.collectives]
  return key(one) == key(other)


def calls_before(ranges: Sequence[Range], programs: PlannedPrograms) -> list[int]:
  """How many executions of programs like it come before each range, in a step that has several
  such."""
  seen: dict[int, int] = {}
  before = []
  for one in ranges:
    program = programs.by_number.get(one.program)
    first = one.program if program is None else program.first
    before.append(seen.get(first, 0))
    seen[first] = before[-1] + one.end - one.begin
  return before


def _slots(number: int, program: PlannedProgram, programs: PlannedPrograms, ran, inside: np.ndarray,
           step: np.ndarray, call: np.ndarray) -> tuple[np.ndarray, ...]:
  """(step, slot, entry, exit) of a program's occurrences that have a slot."""
  calls = int(call[inside].max(initial=-1)) + 1
  bases = np.array([programs.block(number, each) for each in range(calls)] or [-1], np.int64)
  own = program.slot(ran.collective, ran.iteration)
  base = bases[np.clip(call[ran.execution], 0, len(bases) - 1)]
  kept = inside[ran.execution] & (own >= 0) & (base >= 0)
  return step[ran.execution][kept], (base + own)[kept], ran.enter_ns[kept], ran.exit_ns[kept]


def _spans(spans: list[tuple[np.ndarray, ...]],
           count: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
  """Start and end of each step, and the time between its executions."""
  start = np.full(count, np.iinfo(np.int64).max)
  stop = np.full(count, np.iinfo(np.int64).min)
  inside = np.zeros(count, np.int64)
  if spans:
    step, begin, end = (np.concatenate(column) for column in zip(*spans, strict=True))
    np.minimum.at(start, step, begin)
    np.maximum.at(stop, step, end)
    # Executions of one step seldom overlap; where they do, the time counts once.
    order, begin, end = exposed(step, begin, end)
    np.add.at(inside, step[order], end - begin)
  return start, stop, np.maximum(0, np.where(stop >= start, stop - start - inside, 0))


_TAGS = (layout.STEP_VALUE, layout.DELAY_VALUE, *range(
    layout.DECISION_VALUE, layout.DECISION_VALUE + layout.MAX_DECISIONS), layout.DELAY_TAG)
_LONGEST = 1e9
"""Seconds, thirty years: what is asked beyond is recorded as this, since its nanoseconds would not
fit."""


class Decisions(NamedTuple):
  """What the step before each of n executions decided for it."""

  # [n] int64, number of the step; -1 where not known
  step: np.ndarray
  # [n] float32 s, asked for and applied; NaN where not known
  delay: np.ndarray
  applied: np.ndarray
  # [n, columns] float32
  decisions: np.ndarray


def decisions_of(executions: Executions) -> Decisions:
  """Reads the numbers that executions of an instrumented step's program carry."""
  table, known = by_tag(executions, _TAGS)
  numbers = np.where(known[:, 1:-1], floats(table[:, 1:-1]), np.float32(np.nan))
  # The delay's timestamp is left out where there was none.
  late = np.where(known[:, -1], table[:, -1], executions.start_ns)
  applied = np.where(known[:, -1] | np.isfinite(numbers[:, 0]),
                     durations.elapsed_seconds(late - executions.start_ns), np.float32(np.nan))
  return Decisions(np.where(known[:, 0], table[:, 0], -1), numbers[:, 0], applied, numbers[:, 1:])


def within(executions: Executions, others: Executions) -> Executions:
  """Executions with the events of another program's that ran within them, on the same device; each
  begins where that one does, and without events where there is none."""
  row = np.searchsorted(executions.start_ns, others.start_ns, side="right") - 1
  inside = (row >= 0) & (others.end_ns <= executions.end_ns[row])
  others, row = others.picked(inside), row[inside]
  start = executions.start_ns.copy()
  start[row] = others.start_ns
  return executions._replace(start_ns=start, of=row[others.of], tag=others.tag, ns=others.ns)


def columns_of(own: Decisions, names: Sequence[str]) -> Columns:
  """Columns of the table `steps`; `names` are of the pacer's columns, in the order of the
  events."""
  columns = {"delay_ns": nanoseconds(own.delay), "delay_applied_ns": nanoseconds(own.applied)}
  for i, name in enumerate(names[:layout.MAX_DECISIONS]):
    columns[f"decision_{name}"] = null(own.decisions[:, i], np.isnan(own.decisions[:, i]))
  return columns


def by_tag(executions: Executions, tags: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
  """[n, tags] int64 of the events with these tags, and which were there."""
  order = np.argsort(tags)
  wanted = np.array(tags, np.int64)[order]
  at = np.minimum(np.searchsorted(wanted, executions.tag), len(wanted) - 1)
  found = wanted[at] == executions.tag
  place, of = order[at[found]], executions.of[found]
  table = np.zeros((len(executions.number), len(tags)), np.int64)
  known = np.zeros(table.shape, bool)
  table[of, place], known[of, place] = executions.ns[found], True
  return table, known


def floats(numbers: np.ndarray) -> np.ndarray:
  """Numbers of events as the float32 whose bits they are."""
  return np.ascontiguousarray(numbers.astype(np.uint32)).view(np.float32)


def nanoseconds(seconds: np.ndarray) -> np.ndarray:
  """Whole nanoseconds, null where they are not known."""
  unknown = ~np.isfinite(seconds)
  fitting = np.clip(np.where(unknown, 0, seconds).astype(np.float64), -_LONGEST, _LONGEST)
  return null(np.rint(fitting * 1e9).astype(np.int64), unknown)
