"""The recorder's part for instrumented steps with marks: it reads the ring beside the copies of the
pace state."""

from __future__ import annotations

import pathlib
from typing import Any

import jax
import numpy as np

from jaxpace.core.detail import every
from jaxpace.core.marks import slot_tags
from jaxpace.core.observed import ObservedPlan, ObservedProgram
from jaxpace.core.plan import Plan
from jaxpace.execution import marks
from jaxpace.trace import decode, rundir
from jaxpace.trace.decode import Columns
from jaxpace.trace.intake import Batch, Intake, Losses
from jaxpace.trace.marks import inside
from jaxpace.trace.marks.collect import Collector, join, part
from jaxpace.trace.marks.copier import RingCopier
from jaxpace.trace.marks.detail import Detail
from jaxpace.trace.marks.executions import NOTHING, Executions
from jaxpace.trace.marks.plans import path_of, write_plan
from jaxpace.trace.marks.steps import copied_ring

_ALL = 1 << 62
_POLL_SECONDS = 0.25


class MarksBeside:
  """Reads the marks of an instrumented step, from the first recorded step to `close`."""

  def __init__(self, directory: pathlib.Path, identity: rundir.RunIdentity, plan: Plan,
               settings: dict[str, Any], devices: list[int], places: list[int],
               detail: int | str):
    """Copies marks to the run directory.

    Args:
      directory: the run's.
      identity: the run's.
      plan: of the step, which has marks.
      settings: of the step.
      devices: id of the device of each of this process's rings of stamps, in their order.
      places: of each of these rings among those of all ranks.
      detail: write one step in so many in full, or "auto".

    Raises:
      OSError: the directory can't be written.
    """
    assert plan.program is not None
    self._directory, self._identity, self._settings = directory, identity, settings
    self._detail, self._program = detail, plan.program
    ring = marks.current()
    # The first steps have run.
    self._collector = Collector(before=True)
    self._copier: RingCopier | None = copied_ring(directory, identity)
    lanes = {int(device): lane for lane, device in enumerate(ring.blocks["device"].tolist())}
    self._lanes = [lanes[device] for device in devices]
    self._ring_ranks = [ring.ranks[lane] for lane in self._lanes]
    self.programs: list[ObservedProgram] = []
    """What is known of the step; for other threads."""
    self._told: Plan | None = None
    if places == self._ring_ranks:
      # At once: a process that stops before a first copy has come has to be read, too.
      self._tell(plan)

  def intake(self, ranks: list[int], process: int, attempt: int, losses: Losses) -> Intake:
    """Makes what takes the process's rows in, see `Writer.set_ranks`."""
    if ranks != self._ring_ranks:
      # Somebody numbered them otherwise: the ring's own numbers would name the wrong ones.
      self.programs = []
      path_of(self._directory, jax.process_index()).unlink(missing_ok=True)
    return InsideIntake(ranks, process, attempt, losses, self._collector, self._program,
                        self._lanes, self._detail,
                        self._tell if ranks == self._ring_ranks else None)

  def close(self) -> None:
    """Copies the last marks; the file stays."""
    if self._copier is not None:
      self._copier.close()
      self._copier = None

  def _tell(self, plan: Plan) -> None:
    """Says beside the ring what its marks mean: at first, and from the writer's thread where a
    plan is new."""
    if self._told is plan:
      return
    self._told = plan
    tags = [slot_tags(slot) for slot in range(len(plan.collectives))]
    self.programs = [inside.observed_program(plan, self._settings, jax.device_count(), tags)]
    write_plan(self._directory, jax.process_index(), self._identity.run, self._identity.attempt,
               ObservedPlan(tuple(self.programs)))


class InsideIntake(Intake):
  """Rows of the pace state, with the collectives in loops that marks have timed. Of the writer's
  thread."""

  wait_seconds: float | None = _POLL_SECONDS

  def __init__(self, ranks: list[int], process: int, attempt: int, losses: Losses,
               collector: Collector, program: int, lanes: list[int], detail: int | str, tell: Any):
    """Begins; `lanes` are those of the ranks' devices, `tell` is given each new plan, None where
    nobody asks."""
    super().__init__(ranks, process, attempt, losses)
    self._collector, self._program, self._lanes, self._tell = collector, program, lanes, tell
    self._asked, self._detail = detail, Detail(detail if isinstance(detail, int) else 1)
    self._plans: tuple[Plan, inside.InsidePlan] | None = None
    self._left: list[Executions] = [NOTHING] * len(lanes)
    self._chosen: tuple[np.ndarray, np.ndarray] | None = None

  def poll(self) -> None:
    """Reads what is new in the ring."""
    self._collector.collect(lambda: (self._program,))

  def plan_of(self, batch: Batch) -> Any:
    """The batch's plan, with a slot for each turn of the collectives in loops."""
    plan = batch.plan
    if not plan.inside:
      return plan
    if self._plans is None or self._plans[0] is not plan:
      made = inside.InsidePlan(plan, {})
      if self._asked == "auto":
        self._detail.every = max(self._detail.every, every(made.rows, plan.ranks))
      made.detail = {"every": self._detail.every, "asked": self._asked}
      self._plans = plan, made
      if self._tell is not None:
        self._tell(plan)
    return self._plans[1]

  def decode(self, plan: Any) -> tuple[Columns, Columns]:
    """Decodes all rows taken in, and forgets them."""
    if not isinstance(plan, inside.InsidePlan):
      return super().decode(plan)
    # Their marks came before them.
    self.poll()
    self._choose(plan.stamped)
    return super().decode(plan)

  def _heard(self, rank: int, rows: np.ndarray, plan: Any) -> Columns:
    return super()._heard(rank, rows,
                          plan.stamped if isinstance(plan, inside.InsidePlan) else plan)

  def _decoded(self, i: int, rank: int, rows: np.ndarray, plan: Any) -> tuple[Columns, Columns]:
    if not isinstance(plan, inside.InsidePlan):
      return super()._decoded(i, rank, rows, plan)
    columns, waits = super()._decoded(i, rank, rows, plan.stamped)
    _, times, _ = decode.stamps(rows, plan.stamped, self._shift[i] or 0)
    came = self._collector.take(self._lanes[i], self._program, _ALL)
    ended = join([self._left[i], came])
    reached = int(np.searchsorted(ended.start_ns, times[-1, -1]))
    self._left[i] = part(ended, reached, len(ended.number))
    joined = inside.join(times, part(ended, 0, reached), plan)
    chosen = self._is_chosen(columns["step"])
    steps = inside.step_columns(columns, joined, times, plan.stamped)
    stamped = np.repeat(chosen, len(waits["step"]) // max(1, len(chosen)))
    return steps, decode.concatenate([{name: values[stamped] for name, values in waits.items()},
                                      inside.collective_columns(columns, joined, chosen, plan)])

  def _choose(self, plan: Plan) -> None:
    """Chooses which of the steps taken in are written in full, for all of this process's ranks
    alike."""
    seconds: dict[int, float] = {}
    for i, kept in enumerate(self._rows):
      if not kept:
        continue
      rows, times, _ = decode.stamps(np.concatenate(kept), plan)
      before = self._previous[i]
      ends = times[:, -1]
      for place, step in enumerate(rows[:, 0].astype(np.int64).tolist()):
        prior = ends[place - 1] if place else before.end_ns if before is not None else None
        taken = np.nan if prior is None else (ends[place] - prior) * 1e-9
        seconds[step] = np.fmax(seconds.get(step, np.nan), taken)
    steps = np.array(sorted(seconds), np.int64)
    self._chosen = (steps,
                    self._detail.choose(steps,
                                        np.array([seconds[step] for step in steps.tolist()])))

  def _is_chosen(self, steps: np.ndarray) -> np.ndarray:
    assert self._chosen is not None
    known, chosen = self._chosen
    return chosen[np.searchsorted(known, steps)]
