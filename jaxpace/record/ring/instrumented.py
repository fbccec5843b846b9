"""An instrumented step: what its own timestamps and numbers say of each execution, beside those of
its collectives.

The time between two successive timestamps belongs to the later one's segment, see
`jaxpace.core.plan`. Of collectives in loops, branches and `jax.checkpoint`, what a device waits in
them is taken out of the phase that they ran in.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from jaxpace.core import durations
from jaxpace.core import ring_layout as layout
from jaxpace.core.observed import InstrumentedFunction, ObservedProgram
from jaxpace.core.plan import BACKWARD, COMPUTE, DELAY, FORWARD, GAP, SYNC, UPDATE, Collective, Plan
from jaxpace.core.ring_layout import timestamp_tags
from jaxpace.record.columns import Columns, DeviceSteps, StepCalls, null, picked
from jaxpace.record.ring.collect import Collector, Detail
from jaxpace.record.ring.executions import NOTHING, Executions, exposed, occurrences
from jaxpace.record.ring.observed import (
  Decisions,
  PlannedPrograms,
  by_tag,
  columns_of,
  decisions_of,
  floats,
  nanoseconds,
)
from jaxpace.record.ring.plan import PlannedProgram, StepPlan
from jaxpace.runs.groups import read_groups, sends

_PHASES = (FORWARD, BACKWARD, COMPUTE, SYNC, UPDATE)


def _times(executions: Executions, plan: Plan) -> np.ndarray:
  """[n, timestamps] ns, in the order of the plan's; 0 where not taken."""
  table, known = by_tag(executions, timestamp_tags(plan.marks))
  times = np.where(known, table, 0)
  kinds = [timestamp.kind for timestamp in plan.marks]
  times[:, kinds.index("start")] = executions.start_ns
  times[:, len(kinds) - 1 - kinds[::-1].index("end")] = executions.end_ns
  if "delay" in kinds:
    start, late = kinds.index("start"), kinds.index("delay")
    # Left out where there was none.
    times[:, late] = np.where(times[:, late] == 0, times[:, start], times[:, late])
  return times


def held_in_ring(plan: Plan) -> list[tuple[Decisions, np.ndarray]]:
  """Returns the steps that the ring still holds, of each of this process's devices that ran any: n
  of them in the order in which they ran, and their times, [n, timestamps] int64 ns in the order of
  the plan's; 0 where not taken."""
  assert plan.program is not None, "the step has events"
  number, collector = plan.program, Collector(before=True)
  collector.collect(lambda: (number,))
  ran = [collector.take(buffer, number) for buffer in range(collector.buffers)]
  return [(decisions_of(each), _times(each, plan)) for each in ran if len(each.number)]


def _leave_phases(plan: Plan, times: np.ndarray, execution: np.ndarray, enter: np.ndarray,
                  leave: np.ndarray, columns: Columns) -> None:
  """Time in collectives inside of others, which the step's timestamps can't tell from computing,
  becomes `sync_ns` in `columns`, no phase's."""
  order, begin, leave = exposed(execution, enter, leave)
  row, total = execution[order], np.zeros(len(times), np.int64)
  for place, timestamp in enumerate(plan.marks):
    if place and timestamp.segment not in (DELAY, GAP, SYNC):
      within = np.minimum(leave, times[row, place]) - np.maximum(begin, times[row, place - 1])
      waited = np.zeros(len(times), np.int64)
      np.add.at(waited, row, np.maximum(within, 0))
      columns[_column(timestamp.segment)] = columns[_column(timestamp.segment)] - waited
      total += waited
  columns["sync_ns"] = columns.get("sync_ns", np.zeros(len(times), np.int64)) + total


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


def _held(executions: Executions, slots: int, waits: Columns, columns: Columns) -> Columns:
  """Adds what was done before collectives to their rows, and what it took to the steps'; moves
  entries behind that. Returns what was heard."""
  row, slot = waits["row"], np.minimum(waits["slot"], slots - 1)

  def numbers(which: int) -> tuple[np.ndarray, np.ndarray]:
    table, there = by_tag(executions, [layout.held_value(each, which) for each in range(slots)])
    return table[row, slot], there[row, slot] & (waits["slot"] < slots)

  lost, there = numbers(layout.LOST)
  asked, heard = (np.where(known, floats(values), np.float32(np.nan))
                  for values, known in map(numbers, (layout.ASKED, layout.HEARD)))
  waits["held_ns"], waits["heard_ns"] = null(lost, ~there), _measured(heard)
  waits["asked_ns"] = nanoseconds(asked)
  waits["listened"] = null(numbers(layout.LISTENED)[0], ~np.isfinite(asked))
  lost = np.where(there, lost, 0)
  waits["enter_ns"] = waits["enter_ns"] + lost
  columns["held_ns"] = np.bincount(row, lost, len(executions.number)).astype(np.int64)
  return _readings(executions, slots)


def _readings(executions: Executions, slots: int) -> Columns:
  """What was heard each time, by step, collective and turn."""
  readings = []
  for slot in range(slots):
    tag = layout.held_value(slot, layout.READING)
    heard, reported = executions.tag == tag, executions.tag == tag + 1
    row = executions.of[heard]
    iteration = np.arange(len(row)) - np.searchsorted(row, row)
    readings.append((row, np.full(len(row), slot, np.int32), iteration.astype(np.int32),
                     floats(executions.ns[heard]), floats(executions.ns[reported])))
  columns = [np.concatenate(column) for column in zip(*readings, strict=True)]
  order = np.lexsort((columns[2], columns[1], columns[0]))
  row, collective, turn, reading, telling = (column[order] for column in columns)
  return {"row": row, "collective": collective, "turn": turn, "heard_ns": _measured(reading),
          "told_ns": _measured(telling)}


def _measured(seconds: np.ndarray) -> np.ndarray:
  """Nanoseconds of what `jaxpace.core.durations.elapsed_seconds` makes float32 seconds of again, to
  the last bit, where the seconds are a difference of timestamps below four seconds."""
  nearest = nanoseconds(seconds)
  whole = np.ma.getdata(nearest)
  found = whole.copy()
  rounded = whole.astype(np.float32)
  spacing = np.maximum(np.spacing(rounded).astype(np.int64), 1)
  for offset in (2, -2, 1, -1, 0):  # the nearest last: it wins
    made = rounded.astype(np.int64) + offset * spacing
    found = np.where(durations.elapsed_seconds(np.maximum(made, 0)) == seconds, made, found)
  return null(found, np.ma.getmaskarray(nearest))


class InstrumentedStep(PlannedPrograms):
  """What is recorded of an instrumented function: its executions, by the number that the pace state
  gives them. Its collectives that have a slot there keep it; each iteration of the others has one
  behind those."""

  def __init__(self, paced: InstrumentedFunction):
    """Prepares."""
    super().__init__(())
    self._paced = paced
    self._traced: Plan | None = None
    self._known: list[ObservedProgram] = []

  @property
  def programs(self) -> list[ObservedProgram]:
    """What is known of the step, for those who look where ranks are in it."""
    return self._known

  @property
  def runs(self) -> frozenset[int]:
    """Number of the step's program; none before the first trace, or where its events go nowhere."""
    plan = self._paced.plan
    return frozenset(() if plan is None or plan.program is None else (plan.program,))

  def ranks(self, collector: Collector) -> dict[int, int]:
    """Device buffers of the devices that have a place in the pace state, with that."""
    buffers = {device: buffer for buffer, device in enumerate(collector.devices)}
    return {buffers[device]: place
            for place, device in enumerate(self._paced.devices, self._paced.first_place)
            if device in buffers}

  def meet(self, collector: Collector | None = None) -> bool:
    """Takes note of the plan; says whether what devices run is new."""
    plan = self._paced.plan
    if plan is None or not self.runs or plan == self._traced:
      return False
    program = observed_program(plan, self._paced.settings_json(), jax.device_count())
    self._traced, self._plan, self._slots = plan, None, 0
    self.by_number = {program.number: PlannedProgram(program, 0 if plan.inside else None)}
    self.block(program.number, 0)
    # Where somebody numbers devices otherwise, the ring's own numbers would name the wrong ones.
    if collector is None or any(collector.ranks[buffer] != place
                                for buffer, place in self.ranks(collector).items()):
      return False
    self._known = [program]
    return True

  def device(self, steps: Sequence[StepCalls], executions: Mapping[int, Executions], rank: int
             ) -> DeviceSteps:
    """Lays the executions of one device out by step.

    A phase the plan has no timestamp for is absent (null), never 0: forward and backward that can't
    be separated are `compute_ns`. Phases that occur several times add up. A timestamp that is 0 was
    not taken: what it bounds is null.
    """
    del rank  # it runs each step
    plan = self._traced
    assert plan is not None, "a step that has run has been traced"
    [(number, program)] = self.by_number.items()
    numbers = np.array([step.ranges[0].begin for step in steps], np.int64)
    ran, whole = _aligned(executions.get(number, NOTHING), numbers)
    times, own = _times(ran, plan), decisions_of(ran)
    columns = _phases(times, times != 0, plan) | columns_of(own, plan.decisions)
    each = occurrences(ran, program.program.collectives)
    slot = program.slot(each.collective, each.iteration)
    waits = picked({"row": each.execution, "slot": slot, "enter_ns": each.enter_ns,
                    "exit_ns": each.exit_ns}, slot >= 0)
    heard = _held(ran, len(plan.collectives), waits, columns) if plan.holds else {}
    if plan.inside:
      inside = each.collective >= len(plan.collectives)
      _leave_phases(plan, times, each.execution[inside], each.enter_ns[inside],
                    each.exit_ns[inside], columns)
      last = np.zeros(len(numbers), np.int64)
      np.maximum.at(last, each.execution, each.exit_ns)
      columns["last_exit_ns"] = np.ma.masked_array(last, last == 0)
    return DeviceSteps(whole, ~whole, ran.start_ns, ran.end_ns, columns, waits, 0, own.step, heard)

  def settle(self, detail: Detail) -> dict[str, Any]:
    """See `PlannedPrograms`."""
    return super().settle(detail) if self._traced is not None and self._traced.inside else {}

  def lay_out(self, detail: dict[str, Any]) -> StepPlan:
    """See `PlannedPrograms`."""
    assert self._traced is not None, "a step that has run has been traced"
    told = self._traced.to_json()
    del told["inside"]
    return StepPlan(list(self.by_number.values()), told, detail)


def observed_program(plan: Plan, settings: dict[str, Any], ranks: int) -> ObservedProgram:
  """What the timestamps of an instrumented step mean, with who meets in its collectives."""
  assert plan.program is not None

  def grouped(one: Collective) -> Collective:
    entry = one.to_json()
    found = read_groups({"settings": settings}, entry, ranks, sends(entry["primitives"]))
    group = np.zeros(ranks, np.int64) if found is None else found.groups
    return dataclasses.replace(one, groups=tuple(
        tuple(np.flatnonzero(group == each).tolist()) for each in np.unique(group[group >= 0])))

  by_index = {one.index: one for one in (*plan.collectives, *plan.inside)}
  return ObservedProgram(
      number=plan.program, name=str(settings.get("step") or "step"), ranks=tuple(range(ranks)),
      mesh_axes=dict(settings.get("mesh") or {}),
      collectives=tuple(grouped(by_index[index]) for index in plan.order or by_index),
      unstamped=plan.unstamped)
