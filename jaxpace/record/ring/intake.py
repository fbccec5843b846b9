"""Steps on the writer's side: collected from the ring, cut and laid out as rows of the tables."""

from __future__ import annotations

import abc
import collections
import contextlib
import copy
import dataclasses
import logging
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from jaxpace.core.observed import ObservedPlan
from jaxpace.core.words import plural
from jaxpace.files.folders import Folder
from jaxpace.observation.clocks import host_ring
from jaxpace.record import columns
from jaxpace.record.columns import UNKNOWN, Columns, DeviceSteps, Range, Sample, StepCalls, rows
from jaxpace.record.host_use import HostUse
from jaxpace.record.ring.calls import DecidedSteps
from jaxpace.record.ring.collect import Collector, Detail
from jaxpace.record.ring.found import StepFinder
from jaxpace.record.ring.observed import PlannedPrograms
from jaxpace.record.ring.plan import StepPlan
from jaxpace.runs import ring_file, rundir

_LOG = logging.getLogger("jaxpace")
_POLL_SECONDS = 0.25
"""Between two looks at the ring: 65,536 events last that long at 260,000 a second and device."""
_MOST_RECORDED = 65536
"""Calls of `record` that wait for their steps, at most."""
_STANDING = 2
"""Steps in a row with the number of the one before that are no slip."""


@dataclasses.dataclass
class Losses:
  """What a process did not manage to record."""

  lost_rows: int = 0  # steps of a rank that were lost before they were read
  holes: int = 0  # interruptions in the sequence of steps

  def __str__(self) -> str:
    return f"{plural(self.lost_rows, 'row')} in {plural(self.holes, 'hole')}"


class StepTables(abc.ABC):
  """Steps that are over, on their way to rows of the tables. Of the writer's thread."""

  wait_seconds: float | None = None
  """How long the writer may sleep before it polls; None as long as it likes."""
  undecided = False
  """Whether it isn't sure yet which executions are the steps."""

  def __init__(self, process: int, attempt: int, detail: int | str):
    """Begins."""
    self._process, self._attempt = process, attempt
    self.losses = Losses()
    self._detail = Detail(detail)
    self._steps: list[StepCalls] = []
    self._previous: dict[int, tuple[int, int]] = {}
    self._standing = 0
    self._made: dict[str, list[Columns]] = collections.defaultdict(list)
    self.plan: StepPlan | None = None
    """What is in the steps so far, for `run.json`; another object whenever something is new."""
    self.last_step: int | None = None

  @abc.abstractmethod
  def poll(self) -> None:
    """Takes in the steps that are over by now."""

  @property
  @abc.abstractmethod
  def ranks(self) -> list[int]:
    """Ranks of this process of which steps are recorded."""

  @abc.abstractmethod
  def devices(self, steps: list[StepCalls]) -> dict[int, DeviceSteps]:
    """What each device did in steps that were taken in, by rank."""

  def guess(self) -> StepTables | None:
    """What would be recorded if nothing followed, as long as it is undecided; None where nothing
    would be."""
    return None

  @property
  def rows(self) -> int:
    """Rows of `steps` that can be written."""
    return (len(self._steps) * len(self.ranks)
            + sum(map(columns.length, self._made.get("steps", ()))))

  def add(self, plan: StepPlan, steps: list[StepCalls]) -> None:
    """Takes steps in, with the plan that has all of their slots."""
    if plan is not self.plan:
      self._make_rows()
      self.plan = plan
    self._steps += steps

  def take(self) -> dict[str, Columns]:
    """Takes out the rows of all steps taken in, by table; what was heard in them first."""
    self._make_rows()
    made, self._made = self._made, collections.defaultdict(list)
    return {table: columns.concatenate(made[table])
            for table in ("listening", "steps", "collectives") if made[table]}

  def _make_rows(self) -> None:
    steps, self._steps = self._steps, []
    if not steps:
      return
    assert self.plan is not None, "steps come with their plan"
    devices = self.devices(steps)
    self._lose(sum((own.missing.astype(np.int64) for own in devices.values()),
                   np.zeros(len(steps), np.int64)))
    numbers, attempts, kept = self._numbered(steps, list(devices.values()))
    devices = {rank: own._replace(whole=own.whole & kept) for rank, own in devices.items()}
    before = {rank: columns.ends_before(numbers[own.whole], own.end_ns[own.whole],
                                        self._previous.get(rank))
              for rank, own in devices.items()}
    chosen = np.ones(len(steps), bool)
    if self.plan.detailed:
      chosen = self._detail.choose(numbers, _seconds(devices, before))
    host = columns.of_host(self.samples(steps, list(devices.values())),
                           [step.extra for step in steps])
    for rank, own in devices.items():
      tables = rows(own, columns.whose(numbers, rank, self._process, attempts), before[rank],
                    host | _decided(steps, rank), chosen, self.plan)
      for table, made in tables.items():
        # What was heard is the same on all ranks.
        if columns.length(made) and (table != "listening" or (
            self._process == 0 and rank == next(iter(devices)))):
          self._made[table].append(made)
      if own.whole.any():
        last = np.flatnonzero(own.whole)[-1]
        self._previous[rank] = int(numbers[last]), int(own.end_ns[last])

  def samples(self, steps: list[StepCalls], _devices: list[DeviceSteps]) -> np.ma.MaskedArray:
    """What the host did in each step: [K, causes]."""
    return columns.of_samples([step.sample for step in steps])

  def _lose(self, missing: np.ndarray) -> None:
    """Counts rows that are missing, [K] of each step."""
    self.losses.lost_rows += int(missing.sum())
    lost = np.concatenate([[False], missing > 0])
    self.losses.holes += int((lost[1:] & ~lost[:-1]).sum())

  def _numbered(self, steps: list[StepCalls], devices: list[DeviceSteps]
                ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Numbers and attempts of steps, and which are recorded, [K] each.

    Where the program counts its steps, one with an earlier number than the one before begins
    another attempt: the loop went back, by a restored checkpoint or a new pace state. One that ran
    again is left out.
    """
    counted = [own.number for own in devices if own.number is not None]
    if not counted:
      self.last_step = steps[-1].step
      return (np.array([step.step for step in steps], np.int64),
              np.full(len(steps), self._attempt), np.ones(len(steps), bool))
    numbers = np.max(counted, axis=0)
    attempts, kept = np.full(len(steps), self._attempt), np.zeros(len(steps), bool)
    for place, number in enumerate(numbers.tolist()):
      if number == self.last_step:
        self._stands()
      elif number >= 0:
        self._attempt += self.last_step is not None and number < self.last_step
        attempts[place], kept[place], self.last_step = self._attempt, True, number
    return numbers, attempts, kept

  def _stands(self) -> None:
    self._standing += 1
    if self._standing == _STANDING:
      _LOG.warning("The pace state given to the step does not advance, so steps are missing from "
                   "the recording. Give each step the state that the one before returned: `pace, "
                   "out = step(pace, state, batch)`.")


class Intake(StepTables):
  """What the writer's thread holds of steps that write to the ring, observed or instrumented.
  `record`, `over`, `underway`, `reached` and `last` are for other threads."""

  wait_seconds = _POLL_SECONDS

  def __init__(self, source: PlannedPrograms, collector: Collector, directory: pathlib.Path,
               identity: rundir.RunIdentity, process: int, detail: int | str = "auto",
               first_step: int = 0, finder: StepFinder | None = None, host: HostUse | None = None):
    """Begins.

    Args:
      source: what is recorded; asked for its programs by the writer's thread.
      collector: has what has been executed since the recording began.
      directory: run directory; `marks/<process>.plan.json` says there what the timestamps mean.
      detail: write one step in so many in detail, or "auto".
      first_step: number of the first step, where the program does not count them.
      finder: finds the steps among what is executed; None where each execution is one, whichever
        program it is of.
      host: knows what the process did in each step, where the loop does not say so.
    """
    super().__init__(process, identity.attempt, detail)
    self._source, self._collector, self._host = source, collector, host
    # Held open: what stands under its name later is nothing to write to.
    self._folder = Folder(directory, ring_file.FOLDER)
    self._identity = identity
    self._finder, self._next = finder, first_step
    self._described = 0, not self.undecided
    self.recorded: collections.deque[tuple[Sample, dict[str, float]]] = collections.deque()
    """What the loop has recorded of each step; filled by it, emptied here."""
    self._recorded, self._follows = 0, True
    self._pending: list[StepCalls] = []
    self.over = 0
    """Steps so far that are finished on all devices of this process."""
    self.last = False
    """Set by another thread: nothing will be executed any more."""
    self._source.meet(self._collector)
    # Nothing is collected yet: what it has passed came before.
    self._decided = DecidedSteps({
        number: collector.passed(buffers[0], number)
        for number, buffers in self._source.buffers(collector).items() if buffers})
    self._write_plan()

  @property
  def ranks(self) -> list[int]:
    """See `StepTables`."""
    return self._source.used(self._collector)

  @property
  def underway(self) -> bool:
    """Whether something has begun that is not over, or not taken in."""
    return any(host_ring.executions(buffer, number) > self._collector.passed(buffer, number)
               for number, buffers in self._source.buffers(self._collector).items()
               for buffer in buffers)

  def reached(self, handed: int) -> bool:
    """Whether as many steps as the loop has recorded are over, and no other is under way."""
    return not self.underway and (self.over >= handed or not self._source.runs)

  def record(self, sample: Sample, extra: dict[str, float]) -> None:
    """Takes what the loop says of its next step."""
    if len(self.recorded) < _MOST_RECORDED:
      self.recorded.append((sample, extra))
    else:
      self._follows = False

  @property
  def undecided(self) -> bool:  # type: ignore[override]
    """See `StepTables`."""
    return self._finder is not None and self._finder.found is None

  def guess(self) -> StepTables | None:
    """See `StepTables`. What was executed stays, for the steps that will be."""
    if self._finder is None:
      return None
    other = copy.copy(self)
    StepTables.__init__(other, self._process, self._attempt, self._detail.asked)
    other._source, other._collector = self._source.copied(), self._collector.copied()
    other._host = copy.copy(self._host)
    steps = self._finder.guess(other._source, other._collector)
    if not steps:
      return None
    steps = self._decided.beside(steps)
    other.add(other._source.plan_of(steps, other._detail), steps)
    return other

  def poll(self) -> None:
    """Reads what is new in the ring, and takes in the steps that are over."""
    self._meet()
    self._collector.collect(self._meet)
    if self._host is not None:
      self._host.keep()
    fresh = self._collector.settle(self._source.buffers(self._collector))
    self._decided.note(fresh, self._source.functions)
    steps = self._each(fresh) if self._finder is None else self._finder.cut(fresh, self.last)
    self.over += len(steps)
    steps = self._as_recorded(self._decided.beside(steps))
    known = self._described
    # Which ranks there are depends on what the step is.
    self._described = len(self._source.programs), not self.undecided
    before = self.plan
    if steps or known != self._described:
      self.add(self._source.plan_of(steps, self._detail), steps)
    if self.plan is not before:
      # What is beside the next steps is forgotten, be it what was the step before.
      self._make_rows()

  def _meet(self) -> Any:
    """Takes note of programs; returns the numbers of those whose events to read."""
    if self._source.meet(self._collector):
      self._write_plan()
    return {*self._source.by_number, *self._source.paced.values()}

  def _write_plan(self) -> None:
    """Says beside the ring what its timestamps mean."""
    if programs := tuple(self._source.programs):
      ring_file.write_plan(self._folder, self._process, self._identity.run,
                           self._identity.attempt, ObservedPlan(programs))

  def _each(self, fresh: Sequence[tuple[int, int]]) -> list[StepCalls]:
    """Each execution as a step."""
    first, self._next = self._next, self._next + len(fresh)
    return [StepCalls(first + place, (Range(program, number, number + 1),), UNKNOWN, {})
            for place, (program, number) in enumerate(fresh)]

  def _as_recorded(self, steps: list[StepCalls]) -> list[StepCalls]:
    """With what the loop has recorded of them. As long as it records each, one that it has not
    recorded yet waits."""
    self._pending += steps
    # The loop records a step before it dispatches the next.
    self._follows = self._follows and self.over <= self._recorded + len(self.recorded) + 1
    count = len(self._pending)
    if self._follows and not self.last:
      count = min(count, len(self.recorded))
    for place in range(count):
      with contextlib.suppress(IndexError):
        sample, extra = self.recorded.popleft()
        self._recorded += 1
        if self._follows:
          self._pending[place] = self._pending[place]._replace(sample=sample, extra=extra)
    taken, self._pending = self._pending[:count], self._pending[count:]
    return taken

  def devices(self, steps: list[StepCalls]) -> dict[int, DeviceSteps]:
    """See `StepTables`."""
    return {rank: self._source.device(steps, self._executions(buffer, steps), rank)
            for buffer, rank in self._source.ranks(self._collector).items()}

  def samples(self, steps: list[StepCalls], devices: list[DeviceSteps]) -> np.ma.MaskedArray:
    """What the host did in each step: as the loop has recorded it, else as the clock has read it at
    the end of each."""
    if self._host is None or not devices:
      return super().samples(steps, devices)
    found = self._host.samples(devices)
    recorded = [place for place, step in enumerate(steps) if step.sample is not UNKNOWN]
    if recorded:
      found[recorded] = super().samples([steps[place] for place in recorded], devices)
    return found

  def _executions(self, buffer: int, steps: list[StepCalls]) -> dict[int, Any]:
    ends: dict[int, int] = {}
    for step in steps:
      for one in step.ranges:
        ends[one.program] = max(ends.get(one.program, 0), one.end)
    found = {number: self._collector.take(buffer, number, end) for number, end in ends.items()}
    over: dict[int, int] = {}
    for number, paced in self._source.paced.items():
      if number in found:
        over[paced] = max([over.get(paced, 0), *found[number].end_ns[-1:].tolist()])
    return found | {paced: self._collector.take(buffer, paced, end, by="start_ns")
                    for paced, end in over.items()}


def _decided(steps: Sequence[StepCalls], rank: int) -> Columns:
  """What was decided for a rank in each step."""
  found = {}
  for name in dict.fromkeys(name for step in steps for name in step.decisions):
    values = np.array([step.decisions.get(name, {}).get(rank, np.nan) for step in steps],
                      np.float32)
    found[f"decision_{name}"] = columns.null(values, np.isnan(values))
  return found


def _seconds(devices: Mapping[int, DeviceSteps], before: Mapping[int, np.ndarray]) -> np.ndarray:
  """[K] how long each step took, from the end of the one before it; the longest of this process's
  devices."""
  longest = np.full(len(next(iter(devices.values())).whole), np.nan)
  for rank, own in devices.items():
    taken = np.full(len(own.whole), np.nan)
    taken[own.whole] = np.ma.filled((own.end_ns[own.whole] - before[rank]) * 1e-9, np.nan)
    longest = np.fmax(longest, taken)
  return longest
