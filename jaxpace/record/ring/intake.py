"""Steps with timestamps on the writer's side: collected from the ring, laid out by step, as rows of
the tables."""

from __future__ import annotations

import logging
import pathlib
from typing import Any, NamedTuple

import numpy as np

from jaxpace.core.detail import every
from jaxpace.core.observed import ObservedPlan
from jaxpace.core.recordable import ObservedFunction
from jaxpace.record import decode
from jaxpace.record.intake import Losses, host_columns
from jaxpace.record.ring.collect import Collector, Detail
from jaxpace.record.ring.plan import PlannedProgram, PlannedPrograms, TimestampPlan
from jaxpace.record.ring.table import (
  DeviceSteps,
  StepCalls,
  calls_before,
  collective_columns,
  device,
  step_columns,
)
from jaxpace.runs.ring_file import write_plan
from jaxpace.runs.step_causes import Sample

_LOG = logging.getLogger("jaxpace")
_POLL_SECONDS = 0.25
"""Between two looks at the ring: 65,536 events last that long at 260,000 a second and device."""


class Calls(NamedTuple):
  """Steps that are over on all devices of this process."""

  steps: list[StepCalls]


class ObservedIntake:
  """What the writer's thread holds of steps with timestamps. Those that find steps inherit."""

  wait_seconds: float | None = _POLL_SECONDS

  def __init__(self, collector: Collector, observed: ObservedFunction, directory: pathlib.Path,
               run: str,
               process: int, attempt: int, ranks: int, losses: Losses, detail: int | str):
    """Begins.

    Args:
      collector: reads the ring.
      observed: asked for its programs by the writer's thread.
      directory: run directory; `marks/<process>.plan.json` says there what the timestamps mean.
      run: id of the run.
      process: index of this process.
      attempt: attempt of the run.
      ranks: devices of the job.
      losses: what could not be recorded is counted there.
      detail: write one step in so many in detail, or "auto".
    """
    self._collector, self._observed = collector, observed
    self._directory, self._run = directory, run
    self._process, self._attempt, self._losses = process, attempt, losses
    self._programs, self._ranks = PlannedPrograms(ranks), ranks
    self._asked, self._detail = detail, Detail(detail if isinstance(detail, int) else 1)
    self._steps: list[StepCalls] = []
    self._previous: list[decode.Previous | None] = [None] * collector.buffers
    self._over = 0
    self._described = 0
    self.last_step: int | None = None
    self._meet()

  @property
  def rows(self) -> int:
    """Rows of `steps` that can be written."""
    return len(self._steps) * self._collector.buffers

  @property
  def over(self) -> int:
    """Steps so far that are finished on all devices of this process."""
    return self._over

  def poll(self) -> Calls | None:
    """Reads what is new in the ring, and takes the steps that are over; None where there is nothing
    to say."""
    self._meet()
    self._collector.collect(self._meet)
    steps = self._finish()
    known, self._described = self._described, len(self._programs.by_number)
    return Calls(steps) if steps or known < self._described else None

  def _buffers(self) -> dict[int, list[int]]:
    """Device buffers whose devices each of the programs is on that steps may run."""
    ranks = self._collector.ranks
    return {number: [buffer for buffer, rank in enumerate(ranks) if rank in program.ranks]
            for number in self._observed.runs if (program := self._programs.by_number.get(number))}

  def _meet(self) -> dict[int, PlannedProgram]:
    """The programs met so far, by number."""
    programs = self._observed.plan.programs if self._observed.plan else ()
    if self._programs.meet(programs):
      write_plan(self._directory, self._process, self._run, self._attempt,
                 ObservedPlan(programs))
    return self._programs.by_number

  def plan_of(self, batch: Calls) -> TimestampPlan:
    """The plan with all slots that the steps of a batch need."""
    for step in batch.steps:
      for one, before in zip(step.ranges, calls_before(step.ranges, self._programs), strict=True):
        program = self._programs.by_number.get(one.program)
        if program is not None and not program.program.bare:
          for call in range(before, before + one.end - one.begin):
            if self._programs.block(one.program, call) < 0:
              break
    self._choose_detail()
    return self._programs.plan

  @property
  def ranks(self) -> list[int]:
    """Ranks of this process that a program with timestamps runs on."""
    used = set(self._programs.plan.used)
    return [rank for rank in self._collector.ranks if rank in used]

  def add(self, batch: Calls) -> None:
    """Takes steps in."""
    self._steps += batch.steps

  def decode(self, plan: TimestampPlan) -> tuple[decode.Columns, decode.Columns]:
    """Lays the finished steps out as rows, and forgets them."""
    steps, self._steps = self._steps, []
    numbers = np.array([step.step for step in steps], np.int64)
    devices = [device(steps, self._executions(buffer, steps), self._programs, rank)
               for buffer, rank in enumerate(self._collector.ranks)]
    seconds = self._seconds(numbers, devices)
    chosen = self._detail.choose(numbers, seconds)
    rows, waits, missing = [], [], np.zeros(len(steps), np.int64)
    for buffer, (own, rank) in enumerate(zip(devices, self._collector.ranks, strict=True)):
      columns = step_columns(numbers, own, rank, self._process, self._attempt,
                             self._previous[buffer])
      rows.append(columns)
      waits.append(collective_columns(numbers, own, chosen, plan, rank, self._process,
                                      self._attempt))
      missing += own.missing
      if len(columns["step"]):
        self._previous[buffer] = decode.Previous(int(columns["step"][-1]),
                                                 int(columns["end_ns"][-1]))
    self._losses.lost_rows += int(missing.sum())
    lost = np.concatenate([[False], missing > 0])
    self._losses.holes += int((lost[1:] & ~lost[:-1]).sum())
    if len(numbers):
      self.last_step = int(numbers[-1])
    samples = self._samples(steps, devices)
    host = host_columns({step.step: (sample, step.extra)
                         for step, sample in zip(steps, samples, strict=True)})
    return decode.join_host(decode.concatenate(rows), host), decode.concatenate(waits)

  def _samples(self, steps: list[StepCalls], _devices: list[DeviceSteps]) -> list[Sample]:
    """What the host did in each step."""
    return [step.sample for step in steps]

  def _finish(self) -> list[StepCalls]:
    """Takes out the steps that are over on all devices of this process, with what they ran."""
    raise NotImplementedError

  def _executions(self, buffer: int, steps: list[StepCalls]) -> dict[int, Any]:
    ends: dict[int, int] = {}
    for step in steps:
      for one in step.ranges:
        ends[one.program] = max(ends.get(one.program, 0), one.end)
    return {number: self._collector.take(buffer, number, end) for number, end in ends.items()}

  def _seconds(self, numbers: np.ndarray, devices: list[DeviceSteps]) -> np.ndarray:
    """[K] how long each step took, from the end of the one before it; the longest of this process's
    devices."""
    longest = np.full(len(numbers), np.nan)
    for buffer, own in enumerate(devices):
      before = self._previous[buffer]
      ends = np.where(own.whole, own.end_ns.astype(np.float64), np.nan)
      prior = np.concatenate([[np.nan if before is None else float(before.end_ns)], ends[:-1]])
      steps_before = np.concatenate([[-2 if before is None else before.step], numbers[:-1]])
      taken = np.where(steps_before == numbers - 1, (ends - prior) * 1e-9, np.nan)
      longest = np.fmax(longest, taken)
    return longest

  def _choose_detail(self) -> None:
    """Says which steps are written in detail; every process comes to the same, from the programs
    alone."""
    if self._asked == "auto":
      rows = max((len(program.unrolled) * len(program.blocks)
                  for program in self._programs.by_number.values()), default=0)
      stretch = every(rows, self._ranks)
      if stretch > self._detail.every:
        self._detail.every = stretch
        _LOG.info("Up to %d collectives a step: the sums of every step are recorded, and each "
                  "collective of one step in %d, of the first ones and around slow ones; detail=1 "
                  "records all.", rows, stretch)
    self._programs.tell_detail({"every": self._detail.every, "asked": self._asked})
