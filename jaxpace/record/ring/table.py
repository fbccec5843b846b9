"""Executions of one device as rows of the tables. Pure numpy: no device, no clock, no I/O."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from jaxpace.record.decode import Columns, Previous, gaps, whose
from jaxpace.record.ring.executions import (
  BACKWARD,
  COMPUTE,
  FORWARD,
  UPDATE,
  Executions,
  occurrences,
  sums,
)
from jaxpace.record.ring.plan import PlannedProgram, PlannedPrograms, TimestampPlan
from jaxpace.runs.step_causes import Sample

_PHASES = (("forward_ns", FORWARD), ("backward_ns", BACKWARD), ("compute_ns", COMPUTE),
           ("update_ns", UPDATE))


class Range(NamedTuple):
  """Executions of a program that belong to a step: the numbers from `begin` to before `end`."""

  program: int
  begin: int
  end: int


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


class StepCalls(NamedTuple):
  """A step: what was executed, and what the host did."""

  step: int
  ranges: tuple[Range, ...]
  sample: Sample
  extra: dict[str, float]


class DeviceSteps(NamedTuple):
  """What one device did in K steps."""

  # [K] bool, whether all executions of the step are there, and there were any
  whole: np.ndarray
  # [K] bool, whether some are not
  missing: np.ndarray
  # [K] int64 each
  start_ns: np.ndarray
  end_ns: np.ndarray
  # [K] last exit of its collectives; 0 where it had none
  last_exit_ns: np.ndarray
  # [K] between executions of the same step
  idle_ns: np.ndarray
  sync_ns: np.ndarray
  # [K, 4] by phase; -1 where not known
  computed: np.ndarray
  # [m] each, by step and entry: place of the step, slot, times
  row: np.ndarray
  slot: np.ndarray
  enter_ns: np.ndarray
  exit_ns: np.ndarray


def device(steps: Sequence[StepCalls], executions: Mapping[int, Executions],
           programs: PlannedPrograms, rank: int) -> DeviceSteps:
  """Lays the executions of one device out by step.

  Args:
    steps: in order.
    executions: by number of the program; those of other steps are left out.
    programs: what the timestamps mean.
    rank: the device's. Programs that don't run on it are not awaited.
  """
  count = len(steps)
  found = np.zeros(count, np.int64)
  expected = np.zeros(count, np.int64)
  spans: list[tuple[np.ndarray, ...]] = []
  rows: list[tuple[np.ndarray, ...]] = []
  last = np.zeros(count, np.int64)
  earlier = [calls_before(step.ranges, programs) for step in steps]
  sync, computed = np.zeros(count, np.int64), np.full((count, 4), -1, np.int64)
  for number in sorted({one.program for step in steps for one in step.ranges}):
    program = programs.by_number.get(number)
    if program is None or program.program.bare or rank not in program.ranks:
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
    ran = occurrences(all_of_it, program.program.collectives)
    phase = program.phase[np.searchsorted([each.index for each in program.program.collectives],
                                          ran.collective)] if len(ran.iteration) else ran.iteration
    counted = inside[ran.execution]
    np.maximum.at(last, step[ran.execution][counted], ran.exit_ns[counted])
    total = sums(all_of_it.start_ns, all_of_it.end_ns, ran.execution, ran.enter_ns, ran.exit_ns,
                 phase)
    np.add.at(sync, step[inside], total.sync[inside])
    for kind in range(4):
      known = inside & (total.computed[:, kind] >= 0)
      computed[step[known], kind] = np.maximum(computed[step[known], kind], 0)
      np.add.at(computed[:, kind], step[known], total.computed[known, kind])
    rows.append(_slots(number, program, programs, ran, inside, step, call))
  start, stop, idle = _spans(spans, count)
  joined = [np.concatenate(column) for column in zip(*rows, strict=True)] if rows else [
      np.empty(0, np.int64)] * 4
  order = np.lexsort((joined[1], joined[2], joined[0]))
  return DeviceSteps((found == expected) & (expected > 0), found < expected, start, stop, last,
                     idle, sync, computed, *(column[order] for column in joined))


def _slots(number: int, program: PlannedProgram, programs: PlannedPrograms, ran, inside: np.ndarray,
           step: np.ndarray, call: np.ndarray) -> tuple[np.ndarray, ...]:
  """(step, slot, entry, exit) of a program's occurrences that have a slot."""
  calls = int(call[inside].max(initial=-1)) + 1
  bases = np.array([programs.block(number, each) for each in range(calls)] or [-1], np.int64)
  own = program.unrolled.slot(ran.collective, ran.iteration)
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
    order = np.lexsort((begin, step))
    step, begin, end = step[order], begin[order], end[order]
    np.minimum.at(start, step, begin)
    np.maximum.at(stop, step, end)
    # Executions of one step seldom overlap; where they do, the time counts once.
    reached = begin.copy()
    for at in np.flatnonzero(step[1:] == step[:-1]) + 1:
      reached[at] = max(begin[at], end[at - 1], reached[at - 1])
    np.add.at(inside, step, np.maximum(0, end - reached))
  return start, stop, np.maximum(0, np.where(stop >= start, stop - start - inside, 0))


def step_columns(steps: np.ndarray, own: DeviceSteps, rank: int, process: int, attempt: int,
                 previous: Previous | None) -> Columns:
  """Rows of the table `steps` of one device, for its whole steps.

  Args:
    steps: [K] numbers.
    own: what the device did.
    rank: the device's.
    process: index of the process that owns it.
    attempt: 0, then 1, 2, ... after restarts.
    previous: the last step before these; None if there is none.
  """
  kept = own.whole
  numbers, start, end = steps[kept], own.start_ns[kept], own.end_ns[kept]
  gap = gaps(numbers, start, end, np.ones(len(numbers), bool), previous)
  columns: Columns = {
      **whose(numbers, rank, process, attempt), "start_ns": start, "end_ns": end,
      "sync_ns": own.sync_ns[kept], "gap_ns": gap + own.idle_ns[kept],
      "last_exit_ns": np.ma.masked_array(own.last_exit_ns[kept], own.last_exit_ns[kept] == 0)}
  for name, kind in _PHASES:
    values = own.computed[kept, kind]
    columns[name] = np.ma.masked_array(np.maximum(values, 0), values < 0)
  return columns


def collective_columns(steps: np.ndarray, own: DeviceSteps, chosen: np.ndarray, plan: TimestampPlan,
                       rank: int, process: int, attempt: int) -> Columns:
  """Rows of the table `collectives` of one device, for the chosen steps that are whole."""
  kept = (chosen & own.whole)[own.row]
  slot = own.slot[kept]
  size = plan.bytes[slot]
  return {**whose(steps[own.row[kept]], rank, process, attempt),
          "collective": slot.astype(np.int32), "name": plan.names[slot], "axis": plan.axes[slot],
          "bytes": np.ma.masked_array(np.maximum(size, 0), size < 0),
          "enter_ns": own.enter_ns[kept], "exit_ns": own.exit_ns[kept]}
