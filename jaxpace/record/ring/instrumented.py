"""An instrumented step: what its events say of each execution, and what is in each slot.

The time between two successive timestamps belongs to the later one's segment, see
`jaxpace.core.plan`. Collectives in loops, branches and `jax.checkpoint` have timestamps of their
own: what a device waits in them is taken out of the phase that they ran in.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxpace.core import durations, observed
from jaxpace.core import ring_layout as layout
from jaxpace.core.observed import ObservedCollective, ObservedProgram
from jaxpace.core.plan import (
  BACKWARD,
  COMPUTE,
  DELAY,
  FORWARD,
  GAP,
  SYNC,
  UPDATE,
  Collective,
  Plan,
)
from jaxpace.core.recordable import InstrumentedFunction
from jaxpace.core.ring_layout import slot_tags, timestamp_tags
from jaxpace.record.columns import Columns, concatenate, null
from jaxpace.record.ring.collect import Collector, Detail
from jaxpace.record.ring.executions import NOTHING, Executions, exposed, occurrences
from jaxpace.record.ring.plan import PlannedProgram, described
from jaxpace.record.ring.table import DeviceSteps, StepCalls
from jaxpace.runs.groups import read_groups, sends

_ALL = 1 << 62
_PHASES = (FORWARD, BACKWARD, COMPUTE, SYNC, UPDATE)


class TimestampedSteps(NamedTuple):
  """What one device's timestamps and numbers say of n steps, in the order in which they ran."""

  # [n] int64, -1 where not known
  step: np.ndarray
  # [n, timestamps] int64 ns, in the order of the plan's timestamps; 0 where not taken
  times: np.ndarray
  # [n] float32 s, asked for and applied; NaN where not known
  delay: np.ndarray
  applied: np.ndarray
  # [n, columns] float32
  decisions: np.ndarray


def steps_of(executions: Executions, plan: Plan) -> TimestampedSteps:
  """Lays the events of executions out by timestamp and number, see `jaxpace.core.ring_layout`.

  Args:
    executions: n of an instrumented step's program, on one device.
    plan: what the events mean.
  """
  tags = [*timestamp_tags(plan.marks), layout.STEP_VALUE, layout.DELAY_VALUE,
          *range(layout.DECISION_VALUE, layout.DECISION_VALUE + layout.MAX_DECISIONS)]
  table, known = _by_tag(executions, tags)
  count = len(plan.marks)
  times = np.where(known[:, :count], table[:, :count], 0)
  kinds = [timestamp.kind for timestamp in plan.marks]
  times[:, kinds.index("start")] = executions.start_ns
  times[:, len(kinds) - 1 - kinds[::-1].index("end")] = executions.end_ns
  floats = np.where(known[:, count + 1:], _floats(table[:, count + 1:]), np.float32(np.nan))
  applied = np.where(np.isnan(floats[:, 0]), floats[:, 0], np.float32(0))
  if "delay" in kinds:
    start, late = kinds.index("start"), kinds.index("delay")
    # Left out where there was none.
    times[:, late] = np.where(times[:, late] == 0, times[:, start], times[:, late])
    applied = durations.elapsed_seconds(times[:, late] - times[:, start])
  return TimestampedSteps(np.where(known[:, count], table[:, count], -1), times, floats[:, 0],
                          applied, floats[:, 1:])


def held_in_ring(plan: Plan) -> list[TimestampedSteps]:
  """Returns the steps that the ring still holds, of each of this process's devices that ran any.

  Args:
    plan: the instrumented function's, whose events are somewhere.
  """
  assert plan.program is not None, "the step has events"
  number, collector = plan.program, Collector(before=True)
  collector.collect(lambda: (number,))
  ran = [collector.take(buffer, number, _ALL) for buffer in range(collector.buffers)]
  return [steps_of(each, plan) for each in ran if len(each.number)]


def _by_tag(executions: Executions, tags: list[int]) -> tuple[np.ndarray, np.ndarray]:
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


def _floats(numbers: np.ndarray) -> np.ndarray:
  return np.ascontiguousarray(numbers.astype(np.uint32)).view(np.float32)


class InstrumentedPlan:
  """The plan of `run.json`: timestamped collectives keep their slots, each iteration of the nested
  ones has one behind those."""

  def __init__(self, timestamped: Plan, detail: dict[str, Any] | None = None):
    """Lays the slots out; `detail` says which steps have nested ones in detail."""
    self.timestamped, self.detail = timestamped, detail or {}
    self.clock, self.axis, self.ranks = timestamped.clock, timestamped.axis, timestamped.ranks
    self.detailed = bool(timestamped.inside)
    self.settings: dict[str, Any] = {}
    self.nested = PlannedProgram(ObservedProgram(
        number=timestamped.program or 0, name="step", ranks=(), mesh_axes={},
        collectives=tuple(map(_observed, timestamped.inside))))
    self.first = max((one.slot for one in timestamped.collectives), default=-1) + 1
    """Slot of the first nested one."""
    self.collectives = ([self._timestamped_entry(place)
                         for place in range(len(timestamped.collectives))]
                        + [self._entry(slot) for slot in range(len(self.nested))])
    self.names, self.axes, self.bytes = described(self.collectives)
    place = {(mark.kind, mark.collective): at for at, mark in enumerate(timestamped.marks)}
    of = [one.slot for one in timestamped.collectives if ("enter", one.slot) in place]
    self._slots = np.array(of, np.int64)
    self._enters = [place["enter", slot] for slot in of]
    self._exits = [place["exit", slot] for slot in of]

  def _entry(self, slot: int) -> dict[str, Any]:
    one = self.timestamped.inside[self.nested.slots[slot][0]]
    entry = self.nested.entry(slot, self.first + slot)
    del entry["groups"], entry["rank_pairs"]
    return entry | {"primitives": list(one.primitives), "axis": one.axis,
                    "pairs": [list(pair) for pair in one.pairs],
                    "index_groups": [list(group) for group in one.index_groups]}

  def _timestamped_entry(self, place: int) -> dict[str, Any]:
    one = self.timestamped.collectives[place]
    return one.to_json() | {
        "kind": observed.of_primitives(one.primitives), "operation": None, "source": None,
        "loops": [],
        "conditional": False, "of": len(self.timestamped.inside) + place,
        "program": self.nested.first}

  def to_json(self) -> dict[str, Any]:
    """Returns plain lists, dicts and scalars: those of the timestamped step, with all
      collectives."""
    plan = self.timestamped.to_json()
    if not self.timestamped.inside:
      return plan
    del plan["inside"]
    notices = list(plan["notices"])
    if self.nested.turns_kept is not None:
      notices.append("The step has more collectives in loops than can be written one by one: of "
                     f"each loop the first {self.nested.turns_kept} iterations are, all in the "
                     "sums.")
    return plan | {"collectives": self.collectives, "detail": self.detail, "notices": notices}

  def device(self, numbers: np.ndarray, ran: Executions) -> DeviceSteps:
    """Lays out what one device did in the executions with these numbers, each of which is a step.

    A phase the plan has no timestamp for is absent (null), never 0: forward and backward that can't
    be separated are `compute_ns`. Phases that occur several times add up. A timestamp that is 0
    was not taken: what it bounds is null.
    """
    plan = self.timestamped
    ran, whole = _aligned(ran, numbers)
    own = steps_of(ran, plan)
    taken = own.times != 0
    columns = _phases(own.times, taken, plan)
    columns["delay_ns"] = _nanoseconds(own.delay)
    columns["delay_applied_ns"] = _nanoseconds(own.applied)
    for i, name in enumerate(plan.decisions[:layout.MAX_DECISIONS]):
      values = own.decisions[:, i]
      columns[f"decision_{name}"] = null(values, np.isnan(values))
    count = len(self._slots)
    waits: Columns = {"row": np.repeat(np.arange(len(numbers)), count),
                      "slot": np.tile(self._slots, len(numbers))}
    for name, places in (("enter_ns", self._enters), ("exit_ns", self._exits)):
      waits[name] = null(own.times[:, places].reshape(-1), ~taken[:, places].reshape(-1))
    heard: Columns = {}
    if plan.holds:
      heard, lost = _held(ran, self._slots, waits)
      columns["held_ns"] = lost.reshape(len(numbers), count).sum(axis=1)
    if plan.inside:
      waits = concatenate([waits, self._nested(ran, own.times, columns)])
    return DeviceSteps(whole, ~whole, ran.start_ns, ran.end_ns, columns, waits, 0, own.step, heard)

  def _nested(self, ran: Executions, times: np.ndarray, columns: Columns) -> Columns:
    """Rows of nested collectives. Time in them, which the step's timestamps can't tell from
    computing, becomes `sync_ns` in `columns`, no phase's."""
    each = occurrences(ran, self.nested.program.collectives)
    order, begin, leave = exposed(each.execution, each.enter_ns, each.exit_ns)
    row, total = each.execution[order], np.zeros(len(times), np.int64)
    for place, timestamp in enumerate(self.timestamped.marks):
      if place and timestamp.segment not in (DELAY, GAP, SYNC):
        within = np.minimum(leave, times[row, place]) - np.maximum(begin, times[row, place - 1])
        waited = np.zeros(len(times), np.int64)
        np.add.at(waited, row, np.maximum(within, 0))
        columns[_column(timestamp.segment)] = columns[_column(timestamp.segment)] - waited
        total += waited
    columns["sync_ns"] = columns.get("sync_ns", np.zeros(len(times), np.int64)) + total
    last = times[:, self._exits].max(axis=1, initial=0)
    np.maximum.at(last, each.execution, each.exit_ns)
    columns["last_exit_ns"] = np.ma.masked_array(last, last == 0)
    slot = self.nested.slot(each.collective, each.iteration)
    kept = slot >= 0
    return {"row": each.execution[kept], "slot": self.first + slot[kept],
            "enter_ns": each.enter_ns[kept], "exit_ns": each.exit_ns[kept]}


def _aligned(ran: Executions, numbers: np.ndarray) -> tuple[Executions, np.ndarray]:
  """Executions with these numbers, [K] rising, all zeros where they are missing; and [K] bool,
  which are there."""
  at = np.minimum(np.searchsorted(numbers, ran.number), len(numbers) - 1)
  wanted = numbers[at] == ran.number
  ran, at = ran.picked(wanted), at[wanted]
  start, end = np.zeros((2, len(numbers)), np.int64)
  whole = np.zeros(len(numbers), bool)
  start[at], end[at], whole[at] = ran.start_ns, ran.end_ns, True
  return Executions(numbers, start, end, at[ran.of], ran.tag, ran.ns), whole


def _column(segment: str) -> str:
  return f"{segment}_ns" if segment in _PHASES else f"phase_{segment}_ns"


def _phases(times: np.ndarray, taken: np.ndarray, plan: Plan) -> Columns:
  """Total duration of every segment, null where it is unknown; the delay and the gap have columns
  of their own."""
  totals: Columns = {}
  for i, timestamp in enumerate(plan.marks):
    if i and timestamp.segment not in (DELAY, GAP):
      name = _column(timestamp.segment)
      span = null(times[:, i] - times[:, i - 1], ~(taken[:, i] & taken[:, i - 1]))
      totals[name] = totals[name] + span if name in totals else span
  return totals


def _held(executions: Executions, slots: np.ndarray, waits: Columns) -> tuple[Columns, np.ndarray]:
  """Adds what was done before collectives to their rows, and moves entries behind what holding
  took; returns what was heard, and [rows] ns lost."""
  def numbers(which: int) -> tuple[np.ndarray, np.ndarray]:
    table, there = _by_tag(executions, [layout.held_value(slot, which) for slot in slots.tolist()])
    return table.reshape(-1), there.reshape(-1)

  lost, there = numbers(layout.LOST)
  asked, heard = (np.where(there, _floats(numbers(which)[0]), np.float32(np.nan))
                  for which in (layout.ASKED, layout.HEARD))
  waits["held_ns"], waits["heard_ns"] = null(lost, ~there), _measured(heard)
  waits["asked_ns"] = _nanoseconds(asked)
  waits["listened"] = null(numbers(layout.LISTENED)[0], ~np.isfinite(asked))
  lost = np.where(there, lost, 0)
  waits["enter_ns"] = waits["enter_ns"] + lost
  readings = []
  for slot in slots.tolist():
    tag = layout.held_value(slot, layout.READING)
    heard, reported = executions.tag == tag, executions.tag == tag + 1
    row = executions.of[heard]
    iteration = np.arange(len(row)) - np.searchsorted(row, row)
    readings.append((row, np.full(len(row), slot, np.int32), iteration.astype(np.int32),
                     _floats(executions.ns[heard]), _floats(executions.ns[reported])))
  columns = [np.concatenate(column) for column in zip(*readings, strict=True)]
  order = np.lexsort((columns[2], columns[1], columns[0]))
  row, collective, turn, reading, telling = (column[order] for column in columns)
  return {"row": row, "collective": collective, "turn": turn, "heard_ns": _measured(reading),
          "told_ns": _measured(telling)}, lost


_LONGEST = 1e9
"""Seconds, thirty years: what is asked beyond is recorded as this, since its nanoseconds would not
fit."""


def _nanoseconds(seconds: np.ndarray) -> np.ndarray:
  unknown = ~np.isfinite(seconds)
  fitting = np.clip(np.where(unknown, 0, seconds).astype(np.float64), -_LONGEST, _LONGEST)
  return null(np.rint(fitting * 1e9).astype(np.int64), unknown)


def _measured(seconds: np.ndarray) -> np.ndarray:
  """Nanoseconds of what `jaxpace.core.durations.elapsed_seconds` makes float32 seconds of again, to
  the last bit, where the seconds are a difference of timestamps below four seconds."""
  nearest = _nanoseconds(seconds)
  whole = np.ma.getdata(nearest)
  found = whole.copy()
  rounded = whole.astype(np.float32)
  spacing = np.maximum(np.spacing(rounded).astype(np.int64), 1)
  for offset in (2, -2, 1, -1, 0):  # the nearest last: it wins
    made = rounded.astype(np.int64) + offset * spacing
    found = np.where(durations.elapsed_seconds(np.maximum(made, 0)) == seconds, made, found)
  return null(found, np.ma.getmaskarray(nearest))


class InstrumentedStep:
  """What is recorded of an instrumented function: its executions, by the number that the pace state
  gives them."""

  def __init__(self, paced: InstrumentedFunction):
    """Prepares."""
    self._paced = paced
    self._plan: Plan | None = None
    self._laid_out: InstrumentedPlan | None = None
    self.programs: list[ObservedProgram] = []
    """What is known of the step, for those who look where ranks are in it."""

  @property
  def runs(self) -> frozenset[int]:
    """Number of the step's program; none before the first trace, or where its events go nowhere."""
    plan = self._paced.plan
    return frozenset(() if plan is None or plan.program is None else (plan.program,))

  micro_batches: Mapping[int, int] | None = None
  """None: the pacer's columns have them."""

  @property
  def known(self) -> frozenset[int]:
    """Numbers of the programs whose timestamps are read."""
    return self.runs

  def ranks(self, collector: Collector) -> dict[int, int]:
    """Device buffers of the devices that have a place in the pace state, with that."""
    buffers = {device: buffer for buffer, device in enumerate(collector.devices)}
    return {buffers[device]: place
            for place, device in enumerate(self._paced.devices, self._paced.first_place)
            if device in buffers}

  def used(self, collector: Collector) -> list[int]:
    """Ranks of this process."""
    return list(self.ranks(collector).values())

  def buffers(self, collector: Collector) -> dict[int, list[int]]:
    """Device buffers that the program writes to, by its number."""
    return {number: list(self.ranks(collector)) for number in self.runs}

  def meet(self, collector: Collector) -> bool:
    """Takes note of the plan; says whether what devices run is new."""
    plan = self._paced.plan
    if not self.runs or plan == self._plan:
      return False
    assert plan is not None, "what runs was traced"
    self._plan, self._laid_out = plan, None
    # Where somebody numbers devices otherwise, the ring's own numbers would name the wrong ones.
    if any(collector.ranks[buffer] != place for buffer, place in self.ranks(collector).items()):
      return False
    self.programs = [observed_program(plan, self._paced.settings_json(), jax.device_count(),
                                      [slot_tags(one.slot) for one in plan.collectives])]
    return True

  def device(self, plan: InstrumentedPlan, steps: Sequence[StepCalls],
             executions: Mapping[int, Executions], _rank: int) -> DeviceSteps:
    """Lays the executions of one device out by step."""
    return plan.device(np.array([step.ranges[0].begin for step in steps], np.int64),
                       executions.get(steps[0].ranges[0].program, NOTHING))

  def plan_of(self, _steps: Any, detail: Detail) -> InstrumentedPlan:
    """The plan with a slot for each iteration; the same object as long as nothing is new."""
    if self._laid_out is None:
      assert self._plan is not None, "a step that has run has been traced"
      made = InstrumentedPlan(self._plan)
      if made.detailed:
        made.detail = detail.settle(len(made.collectives), made.ranks)
      self._laid_out = made
    return self._laid_out


def observed_program(plan: Plan, settings: dict[str, Any], ranks: int,
                     slot_tags: Sequence[tuple[int, int]]
                     ) -> ObservedProgram:
  """What the timestamps of an instrumented step mean, those at its timestamps included: for who
  looks where ranks are in it.

  Args:
    plan: of the step.
    settings: the step's, with the mesh and the axis.
    ranks: of the job.
    slot_tags: tags of the timestamps at entry and exit timestamp of each slot.
  """
  assert plan.program is not None
  found: list[ObservedCollective] = []
  timestamped = {one.slot: one for one in plan.collectives}
  inside = sorted(plan.inside, key=lambda one: (one.after, one.slot))

  def add(one: ObservedCollective, entry: dict[str, Any]) -> None:
    rank_groups = read_groups({"settings": settings}, entry, ranks, sends(entry["primitives"]))
    groups: tuple[tuple[int, ...], ...] = (tuple(range(ranks)),)
    if rank_groups is not None:
      groups = tuple(tuple(np.flatnonzero(rank_groups.groups == group).tolist())
                     for group in np.unique(rank_groups.groups[rank_groups.groups >= 0]).tolist())
    found.append(dataclasses.replace(one, index=len(found), groups=groups))

  at = 0
  for number in range(len(timestamped) + 1):
    while at < len(inside) and inside[at].after <= number:
      add(_observed(inside[at]), inside[at].to_json())
      at += 1
    if number in timestamped:
      one, (enter, leave) = timestamped[number], slot_tags[number]
      add(ObservedCollective(
          index=0, name=one.name, kind=observed.of_primitives(one.primitives), bytes=one.bytes,
          operands=one.operands, dtypes=one.dtypes, axes=tuple(one.axis.split(",")), groups=(),
          pairs=(), phase=one.phase, loops=(), source=None, operation=None, enter_tags=(enter,),
          exit_tags=(leave,)), one.to_json())
  return ObservedProgram(
      number=plan.program, name=str(settings.get("step") or "step"), ranks=tuple(range(ranks)),
      mesh_axes=dict(settings.get("mesh") or {}), collectives=tuple(found),
      unstamped=plan.unstamped)


def _observed(one: Collective) -> ObservedCollective:
  return ObservedCollective(
      index=one.slot, name=one.name, kind=observed.of_primitives(one.primitives), bytes=one.bytes,
      operands=one.operands, dtypes=one.dtypes, axes=tuple(one.axis.split(",")), groups=(),
      pairs=(), phase=one.phase, loops=one.loops, source=one.source, operation=None,
      enter_tags=one.enter_tags, exit_tags=one.exit_tags, conditional=one.conditional)
