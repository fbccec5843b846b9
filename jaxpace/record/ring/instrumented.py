"""Steps of instrumented functions on the writer's side: collected from the ring, laid out by step,
as rows of the tables."""

from __future__ import annotations

import collections
import pathlib
from typing import Any

import jax
import numpy as np

from jaxpace.core import durations
from jaxpace.core import ring_layout as layout
from jaxpace.core.detail import every
from jaxpace.core.observed import ObservedPlan, ObservedProgram
from jaxpace.core.plan import Plan
from jaxpace.core.recordable import InstrumentedFunction
from jaxpace.core.ring_layout import slot_tags, timestamp_tags
from jaxpace.files.folders import Folder
from jaxpace.observation.clocks import host_ring
from jaxpace.record import decode
from jaxpace.record.decode import Columns, Held, TimestampedSteps
from jaxpace.record.intake import Attempt, Batch, Intake, Losses
from jaxpace.record.ring import nested as inside
from jaxpace.record.ring.collect import Collector, Detail
from jaxpace.record.ring.executions import Executions
from jaxpace.runs import ring_file
from jaxpace.runs.step_causes import Sample

_POLL_SECONDS = 0.25
_ALL = 1 << 62


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
  applied = np.zeros(len(times), np.float32)
  if "delay" in kinds:
    start, late = kinds.index("start"), kinds.index("delay")
    # Left out where there was none.
    times[:, late] = np.where(times[:, late] == 0, times[:, start], times[:, late])
    applied = durations.elapsed_seconds(times[:, late] - times[:, start])
  floats = _floats(table[:, count + 1:])
  return TimestampedSteps(
      table[:, count], times, floats[:, 0], applied, floats[:, 1:],
      _held(executions, plan) if plan.holds else None, executions if plan.inside else None)


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


def _held(executions: Executions, plan: Plan) -> Held:
  slots = [one.slot for one in plan.collectives]
  each = {which: _by_tag(executions, [layout.held_value(slot, which) for slot in slots])
          for which in (layout.LOST, layout.ASKED, layout.HEARD, layout.LISTENED)}
  there = each[layout.LOST][1]

  def seconds(which: int) -> np.ndarray:
    return np.where(there, _floats(each[which][0]), np.float32(np.nan))

  readings = []
  for place, slot in enumerate(slots):
    tag = layout.held_value(slot, layout.READING)
    heard, told = executions.tag == tag, executions.tag == tag + 1
    row = executions.of[heard]
    iteration = np.arange(len(row)) - np.searchsorted(row, row)
    readings.append((row, np.full(len(row), place, np.int64), iteration,
                     _floats(executions.ns[heard]),
                     _floats(executions.ns[told])))
  columns = [np.concatenate(column) for column in zip(*readings, strict=True)]
  order = np.lexsort((columns[2], columns[1], columns[0]))
  return Held(np.where(there, each[layout.LOST][0], -1), seconds(layout.ASKED),
              seconds(layout.HEARD), each[layout.LISTENED][0],
              *(column[order] for column in columns))


class InstrumentedIntake(Intake):
  """What the writer's thread holds of an instrumented step. Only `calls`, `over`, `underway`,
  `finish` and `programs` are for other threads."""

  wait_seconds: float | None = _POLL_SECONDS

  def __init__(self, paced: InstrumentedFunction, directory: pathlib.Path, run: str, process: int,
               attempt: int, losses: Losses, detail: int | str):
    """Begins with what starts from now on.

    Args:
      paced: the instrumented function.
      directory: run directory; `marks/<process>.plan.json` says there what the events mean.
      run: id of the run.
      process: index of this process.
      attempt: attempt of the run.
      losses: what could not be recorded is counted there.
      detail: of the collectives in loops, write one step in so many in detail, or "auto".
    """
    super().__init__(process, attempt, losses)
    self._paced, self._run = paced, run
    # Held open: what stands under its name later is nothing to write to.
    self._folder = Folder(directory, ring_file.FOLDER)
    self._first_attempt = attempt
    self._collector = Collector()
    self._asked, self._detail = detail, Detail(detail if isinstance(detail, int) else 1)
    self.calls: collections.deque[tuple[Sample, dict[str, float]]] = collections.deque()
    """Of each step that the loop has recorded; filled by it, emptied here."""
    self.programs: list[ObservedProgram] = []
    """What is known of the step, for those who look where ranks are in it."""
    self.over = 0
    """Steps so far that are finished on all devices of this process."""
    self._called, self._finishing, self._each = 0, False, True
    self._host: dict[int, tuple[Sample, dict[str, float]]] = {}
    self._plan: Plan | None = None
    self._laid_out: Any = None
    self._chosen: tuple[np.ndarray, np.ndarray] | None = None
    self._begun = 0
    if paced.number is not None:
      for buffer in range(self._collector.buffers):
        self._collector.skip(buffer, paced.number)
        self._begun = max(self._begun, self._collector.passed(buffer, paced.number))
    self._first = self._begun

  @property
  def underway(self) -> bool:
    """Whether a device has begun a step that has not been read to its end."""
    number = self._paced.number
    return number is not None and self._paced.plan is not None and any(
        host_ring.executions(buffer, number) > max(self._first,
                                                   self._collector.passed(buffer, number))
        for buffer in self._buffers())

  def reached(self, handed: int) -> bool:
    """Whether as many steps as the loop has recorded are over, and no other is under way."""
    return self.over >= handed and not self.underway

  def finish(self) -> None:
    """Says that the loop records no more steps."""
    self._finishing = True

  def poll(self) -> Batch | None:
    """Takes the steps that are over on all of this process's devices; None where none is."""
    number, buffers = self._paced.number, self._buffers()
    if number is None or self._meet() is None or not buffers:
      return None
    started = max(host_ring.executions(buffer, number) for buffer in buffers)
    self._collector.collect(lambda: (number,))
    # GPUs count by themselves.
    started = max(started, *(self._collector.passed(buffer, number) for buffer in buffers))
    while self.calls:
      self._host[self._first + self._called] = self.calls.popleft()
      self._called += 1
    # The loop records a step before it dispatches the next.
    self._each = self._each and started - self._first <= self._called + 1
    done = min(self._collector.passed(buffer, number) for buffer in buffers)
    if self._each and not self._finishing:
      done = min(done, self._first + self._called)
    if done <= self._begun:
      return None
    batch = self._batch(number, buffers, done)
    self.over = done - self._first
    return batch

  def _batch(self, number: int, buffers: dict[int, int], done: int) -> Batch:
    plan = self._meet()
    assert plan is not None, "a step that has run has been traced"
    begun, self._begun = self._begun, done
    taken = [self._collector.take(buffer, number, done) for buffer in buffers]
    taken = [each.picked(each.number >= begun) for each in taken]
    missing = np.array([done - begun - len(each.number) for each in taken])
    self._losses.lost_rows += int(missing.sum())
    self._losses.holes += bool(missing.any())
    host = {each: self._host.pop(each) for each in sorted(self._host) if each < done}
    return Batch(plan, list(buffers.values()), [each.number for each in taken],
                 [steps_of(each, plan) for each in taken], host if self._each else {})

  def _buffers(self) -> dict[int, int]:
    """Device buffers of the devices that have a place in the pace state, with that."""
    buffers = {device: buffer for buffer, device in enumerate(self._collector.devices)}
    return {buffers[device]: place
            for place, device in enumerate(self._paced.devices, self._paced.first_place)
            if device in buffers}

  def _meet(self) -> Plan | None:
    """The plan, which is also written beside the ring whenever it is new; None before the first
    trace."""
    plan = self._paced.plan
    if plan is not None and plan != self._plan:
      self._plan, self._laid_out = plan, None
      # Where somebody numbers devices otherwise, the ring's own numbers would name the wrong ones.
      if all(self._collector.ranks[buffer] == place for buffer, place in self._buffers().items()):
        self.programs = [inside.observed_program(plan, self._paced.settings_json(),
                                                 jax.device_count(),
                                                 [slot_tags(c.slot) for c in plan.collectives])]
        ring_file.write_plan(self._folder, self._process, self._run, self._first_attempt,
                         ObservedPlan(tuple(self.programs)))
    return self._plan

  def plan_of(self, batch: Batch) -> Any:
    """The batch's plan; with a slot for each iteration of collectives in loops, if it has such."""
    plan: Plan = super().plan_of(batch)
    if self._laid_out is None:
      self._laid_out = plan
      if plan.inside:
        made = inside.NestedPlan(plan, {})
        if self._asked == "auto":
          self._detail.every = max(self._detail.every, every(made.rows, plan.ranks))
        made.detail = {"every": self._detail.every, "asked": self._asked}
        self._laid_out = made
    return self._laid_out

  def _decoded(self, attempt: Attempt, plan: Any) -> tuple[list[Columns], list[Columns]]:
    if isinstance(plan, inside.NestedPlan):
      self._choose(attempt)
    return super()._decoded(attempt, plan)

  def _of_rank(self, place: int, rank: int, own: TimestampedSteps, attempt: Attempt, plan: Any
               ) -> tuple[Columns, Columns]:
    if not isinstance(plan, inside.NestedPlan):
      return super()._of_rank(place, rank, own, attempt, plan)
    columns, waits = super()._of_rank(place, rank, own, attempt, plan.timestamped)
    assert own.executions is not None and self._chosen is not None
    nested = inside.join(own.times, own.executions, plan)
    known, chosen = self._chosen
    chosen = chosen[np.searchsorted(known, own.step)]
    timestamped_rows = np.repeat(chosen, len(waits["step"]) // max(1, len(chosen)))
    return (inside.step_columns(columns, nested, own.times, plan.timestamped),
            decode.concatenate([{name: values[timestamped_rows] for name, values in waits.items()},
                                inside.collective_columns(columns, nested, chosen, plan)]))

  def _choose(self, attempt: Attempt) -> None:
    """Chooses which steps are written in detail, for all of this process's ranks alike."""
    seconds: dict[int, float] = {}
    for place, rank in enumerate(self.ranks):
      own = attempt.of_rank(place)
      before = self._previous.get(rank)
      ends = np.concatenate([[np.nan if before is None else before.end_ns], own.times[:, -1]])
      for step, taken in zip(own.step.tolist(), (np.diff(ends) * 1e-9).tolist(), strict=True):
        seconds[step] = np.fmax(seconds.get(step, np.nan), taken)
    steps = np.array(sorted(seconds), np.int64)
    times = np.array([seconds[step] for step in steps.tolist()])
    self._chosen = steps, self._detail.choose(steps, times)
