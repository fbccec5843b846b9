"""A recorded run in memory: dense arrays of [ranks, steps]."""

from __future__ import annotations

import dataclasses
import functools
import pathlib
from typing import Any, NamedTuple

import numpy as np

from jaxpace.files import UserError
from jaxpace.hosts.locality.types import Locality
from jaxpace.runs.groups import RankGroups
from jaxpace.runs.loops import Loop

MISSING = np.iinfo(np.int64).min
"""Stands for a time that was not recorded. No clock reads it."""


class RunError(UserError):
  """The run directory can't be read: a sentence that says what is wrong and what to do."""


@dataclasses.dataclass(frozen=True)
class Process:
  """What one process said of itself."""

  process: int
  info: dict[str, Any]
  """Its file as it was read: what it lost, when it last wrote, how it ended."""

  @property
  def host(self) -> str:
    """Its host's name; empty where it isn't known."""
    return self.info.get("hostname") or ""

  @property
  def ranks(self) -> tuple[int, ...]:
    """The ranks that are its own."""
    return tuple(self.info.get("ranks") or ())


class HeldTimes(NamedTuple):
  """What was held before one collective. `MISSING` where null."""

  held_ns: np.ndarray  # [R, K] int64, by how much later this rank began for it
  # [R, K] int64, asked for and listened, the same on all ranks; null where the pacer wasn't asked
  asked_ns: np.ndarray
  listened: np.ndarray  # [R, K] int64, how often, likewise

  def at(self, steps: slice | np.ndarray) -> HeldTimes:
    """Of some steps only."""
    return HeldTimes(*(values[:, steps] for values in self))


@dataclasses.dataclass(frozen=True)
class CollectiveTimes:
  """Entry and exit of one timestamped collective, on each rank's own clock."""

  slot: int
  name: str
  bytes: int | None
  enter_ns: np.ndarray  # [R, K] int64, `MISSING` where not recorded
  exit_ns: np.ndarray  # [R, K] int64, `MISSING` where not recorded
  attempt: np.ndarray  # [R, K] int16, attempt the two belong to; -1 where there is no row
  rank_groups: RankGroups | None = None
  """Who waits for whom; None: every rank for all."""
  point_to_point: bool = False
  """Whether ranks send to single others, as the stages of a pipeline do, instead of all meeting."""
  may_begin_early: bool = False
  """Whether it can begin before its entry timestamp, which may then be late."""
  held: HeldTimes | None = None
  """What a pacer that holds collectives back did before it; None without one."""


class HostSamples(NamedTuple):
  """Samples in the order of process, attempt and time. Times of two processes can't be compared."""

  process: np.ndarray  # [N] int32
  attempt: np.ndarray  # [N] int32
  time_ns: np.ndarray  # [N] int64, that process's monotonic clock
  columns: dict[str, np.ndarray]  # [N] float64 by column of the table `hosts`; NaN where null

  def of(self, process: int) -> HostSamples:
    """The samples of one process."""
    keep = self.process == process
    return HostSamples(self.process[keep], self.attempt[keep], self.time_ns[keep],
                       {name: values[keep] for name, values in self.columns.items()})


class Listening(NamedTuple):
  """Readings in the order of step, collective and turn; N of them. ns, `MISSING` where null."""

  step: np.ndarray  # [N] int64, step numbers
  collective: np.ndarray  # [N] int64, slot before which it was listened
  turn: np.ndarray  # [N] int64, 0 for the first time before that collective
  heard_ns: np.ndarray  # [N] int64
  told_ns: np.ndarray  # [N] int64


class HostCause(NamedTuple):
  """A column of the table `steps` that says what the process did besides the devices' work."""

  column: str
  label: str
  """What it is, for people."""
  pauses: str = ""
  """What a process does meanwhile, for people, where the loop stands still for it; else empty."""
  asked: bool = False
  """Whether it is known only where the program has it measured, see `jaxpace.Recorder.measure`."""

  @property
  def name(self) -> str:
    """In arrays, findings and metrics."""
    return self.column.removesuffix("_ns")

  @property
  def scale(self) -> float:
    """From what is recorded to seconds; 1 for a number of times."""
    return 1e-9 if self.column.endswith("_ns") else 1.0


OTHERS = "others"
"""Name of the one that is programs beside the step."""
HOST_CAUSES = (
    HostCause("cpu_ns", "CPU time"),
    HostCause("nivcsw", "involuntary context switches"),
    HostCause("gc_ns", "garbage collection", "collects garbage"),
    HostCause("data_ns", "waiting for data", "waits for data", asked=True),
    HostCause("checkpoint_ns", "checkpoints", "writes checkpoints", asked=True),
    HostCause(f"{OTHERS}_ns", "other programs", "runs other programs (an evaluation, or what "
              "processes meet in, as for a checkpoint)"),
    HostCause("between_ns", "time between steps", "is in its own loop (data, a checkpoint, a "
              "program without collectives)"),
    HostCause("majflt", "major page faults"),
)
"""All that names what the host does in a step is made from this."""
TIMES = tuple(cause.name for cause in HOST_CAUSES if cause.scale != 1)
"""Those in seconds."""
PAUSES = {cause.name: cause for cause in HOST_CAUSES if cause.pauses}
"""By name, those for which the loop stands still."""
ASKED = {cause.column: cause.name for cause in HOST_CAUSES if cause.asked}
"""By column."""


@dataclasses.dataclass(frozen=True)
class HostCauses:
  """What each process did while it dispatched a step. Devices run behind the loop, by a few steps
  at most.

  P processes, K steps.
  """

  # [P], rising
  processes: np.ndarray = dataclasses.field(default_factory=lambda: np.empty(0, np.int64))
  columns: dict[str, np.ndarray] = dataclasses.field(default_factory=dict)
  """[P, K] float32 by name of `HOST_CAUSES`: seconds, "nivcsw" a count; NaN where
  null."""

  def row(self, process: int) -> int | None:
    """Row of a process; None where it recorded nothing."""
    at = int(np.searchsorted(self.processes, process))
    return at if at < len(self.processes) and self.processes[at] == process else None

  def by_rank(self, values: np.ndarray, process_of_rank: np.ndarray) -> np.ndarray:
    """[R, ...] what the process of each rank has of [P, ...] values; 0 of one that recorded
    nothing."""
    rows = [self.row(int(process)) for process in process_of_rank]
    whole = np.concatenate([values, np.zeros((1, *values.shape[1:]), values.dtype)])
    return whole[[-1 if row is None else row for row in rows]]


class AllSteps(NamedTuple):
  """What is known of every step of a run of which only some steps are detailed. K steps."""

  steps: np.ndarray  # [K] int64, step numbers, rising
  attempt: np.ndarray  # [R, K] int16, newest attempt of each rank and step; -1 where missing
  end_ns: np.ndarray  # [R, K] int64, last exit, `MISSING` where unknown
  waited: np.ndarray | None = None  # [R, K] float32 s in collectives, NaN where null
  delay: np.ndarray | None = None  # [R, K] float32 s of the applied delay, NaN where null
  # [K] float32, whether counts of micro-batches were uneven, NaN where null
  uneven: np.ndarray | None = None
  # [K] bool, which are known to have run in another shape than the detailed ones
  others: np.ndarray | None = None
  # [R, n] float32 s, gap before each of these, NaN where null
  gap_of_others: np.ndarray | None = None


@dataclasses.dataclass(frozen=True, eq=False)
class Run:
  """Everything the report needs of a recorded run. It never changes once it is read.

  R is the number of ranks, K the number of step numbers between the first and the last one
  recorded. Times of two ranks are comparable only if they belong to the same process; nothing here
  compares them.
  """

  path: pathlib.Path
  id: str
  info: dict[str, Any]
  """`run.json` as it was read; empty if there was none."""
  processes: tuple[Process, ...]
  steps: np.ndarray  # [K] int64, step numbers, rising
  # [R, K] int16, newest attempt of each rank and step; -1 where nothing is recorded
  attempt: np.ndarray
  # [R, K] int64, `MISSING` where unknown; read only where no collective is timestamped
  end_ns: np.ndarray | None
  durations: dict[str, np.ndarray]
  """[R, K] float32 seconds by column name without `_ns` ("forward", "gap", "delay_applied", ...);
  NaN where null."""
  collectives: tuple[CollectiveTimes, ...]
  process_of_rank: np.ndarray  # [R] int32, -1 where no row says
  duplicates: int
  """Rows that recorded the same rank and step again; the last attempt's row counts."""
  problems: tuple[str, ...]
  """Everything noteworthy, in sentences."""
  window: tuple[int | None, int | None] = (None, None)
  """Steps asked for, first to one past the last; None where open."""
  locality: tuple[Locality, ...] = ()
  """Where each process ran, as far as it was written down and can be read."""
  guard: dict[str, np.ndarray] = dataclasses.field(default_factory=dict)
  """[K] float32 by column of `jaxpace.guard` ("guard_on", ...) and of work shared by
  speed ("work_uneven", ...), of the lowest rank recorded; empty if neither ran."""
  host_causes: HostCauses = dataclasses.field(default_factory=HostCauses)
  """What each process did in each step, besides training."""
  host_samples: HostSamples | None = None
  """Samples of each process's host; None where there are none."""
  listening: Listening | None = None
  """What was heard before collectives; None where nothing was."""

  declared: int = 0
  """Ranks that the run has by its own word; 0 where it does not say."""
  aggregated: AllSteps | None = None
  """Every step of an observed run, detailed or not; `steps` are then the detailed ones. None:
  `steps` are all."""
  loops: tuple[Loop, ...] = ()
  """What else ran in a loop, where the run is one of several: the one whose steps these are first.
  """
  previous_exit: np.ndarray | None = None
  """[R, K] int64, own last exit of the step before each of `steps`, `MISSING` where not known, of a
  run of which only some steps are detailed; None: that step is the one before in `steps`."""

  @property
  def ranks(self) -> int:
    """R: one more than the highest rank number."""
    return self.attempt.shape[0]

  @functools.cached_property
  def observed(self) -> bool:
    """Whether the plan is that of an observed step: each occurrence of a collective has an entry of
    its own."""
    return any(entry.get("of") is not None for entry in self.plan.get("collectives") or ())

  @property
  def all_steps(self) -> AllSteps:
    """Every step, detailed or not, each ending with its last exit; without collectives where the
    program ends."""
    if self.aggregated is not None:
      return self.aggregated
    if not self.collectives:
      return AllSteps(self.steps, self.attempt, np.full(self.attempt.shape, MISSING)
                      if self.end_ns is None else self.end_ns)
    # A rank may take part in some of them alone, and miss rows of its newest attempt.
    attempt = functools.reduce(np.maximum, (c.attempt for c in self.collectives))
    last = functools.reduce(np.maximum, (np.where(c.attempt == attempt, c.exit_ns, MISSING)
                                         for c in self.collectives))
    return AllSteps(self.steps, attempt, last)

  @property
  def ranks_in_all(self) -> int:
    """Ranks that the run has: as many as it says, else those that recorded. A gap in their numbers
    is no rank."""
    return int(self.there.sum()) + max(0, self.declared - self.ranks)

  @property
  def silent(self) -> np.ndarray:
    """Ranks that the run says it has, or a process calls its own, and that recorded nothing;
    rising.

    Where each process names its ranks the others are none: devices that the step doesn't run on.
    One that has ended well and names none has none.
    """
    named = {rank for process in self.processes for rank in process.ranks}
    all_named = (all(process.ranks or process.info.get("closed_cleanly")
                     for process in self.processes)
                 and len(self.processes) == self.info.get("processes"))
    ranks = np.flatnonzero(~(self.attempt >= 0).any(axis=1))
    return ranks[[rank in named or (rank < self.declared and not all_named)
                  for rank in ranks.tolist()]]

  @property
  def there(self) -> np.ndarray:
    """[R] bool, numbers that are a rank's: it recorded, or the run or a process says that it has
    it."""
    there = np.array((self.attempt >= 0).any(axis=1))
    there[self.silent] = True
    return there

  @property
  def inside(self) -> np.ndarray:
    """[K] bool, the steps that were asked for: `steps` holds the one before them, too."""
    return self.asked(self.steps)

  def asked(self, steps: np.ndarray) -> np.ndarray:
    """[n] bool, which of these step numbers were asked for."""
    first, stop = self.window
    inside = np.ones(len(steps), bool)
    if first is not None:
      inside &= steps >= first
    if stop is not None:
      inside &= steps < stop
    return inside

  @property
  def plan(self) -> dict[str, Any]:
    """The plan of the step as plain data; empty if it was not recorded."""
    return self.info.get("plan") or {}

  def host_of_rank(self, rank: int) -> str:
    """Host that owns `rank`; empty if no process said."""
    process = int(self.process_of_rank[rank])
    for p in self.processes:
      if p.process == process or (process < 0 and rank in p.ranks):
        return p.host
    return ""

  def detailed(self, steps: np.ndarray, others: np.ndarray | None = None) -> Run:
    """Makes the run over its detailed steps, these rising numbers, of one over all steps, whose
    collectives are those of the detailed ones alone. Each is measured from the last exit of the
    step before, which `aggregated` knows; `others` is a part of that."""
    at = np.searchsorted(self.steps, steps)
    part = _at(self, at)
    attempt = functools.reduce(np.maximum, (c.attempt for c in self.collectives), part.attempt)
    assert self.end_ns is not None
    before = np.maximum(at - 1, 0)
    known = (at > 0) & (self.steps[before] == steps - 1)
    gap = None if others is None else self.durations.get("gap")
    previous = np.where(known & (self.attempt[:, before] == attempt), self.end_ns[:, before],
                        MISSING)
    return dataclasses.replace(
        part, attempt=attempt, end_ns=None, previous_exit=previous,
        aggregated=AllSteps(self.steps, self.attempt, self.end_ns, self.durations.get("sync"),
                            self.durations.get("delay_applied"), self.guard.get("work_uneven"),
                            others, None if gap is None else gap[:, others]))


def cut(run: Run, first: int) -> Run:
  """The run from the step at index `first` on; the one before it is kept as for any window."""
  part = slice(max(first - 1, 0), None)
  return dataclasses.replace(
      _at(run, part), window=(int(run.steps[first]), run.window[1]),
      collectives=tuple(dataclasses.replace(c, enter_ns=c.enter_ns[:, part],
                                            exit_ns=c.exit_ns[:, part], attempt=c.attempt[:, part],
                                            held=None if c.held is None else c.held.at(part))
                        for c in run.collectives))


def _at(run: Run, steps: slice | np.ndarray) -> Run:
  """The run with what is known of some steps, its collectives as they are."""
  causes = {name: values[:, steps] for name, values in run.host_causes.columns.items()}
  return dataclasses.replace(
      run, steps=run.steps[steps], attempt=run.attempt[:, steps],
      end_ns=None if run.end_ns is None else run.end_ns[:, steps],
      previous_exit=None if run.previous_exit is None else run.previous_exit[:, steps],
      durations={name: values[:, steps] for name, values in run.durations.items()},
      guard={name: values[steps] for name, values in run.guard.items()},
      host_causes=dataclasses.replace(run.host_causes, columns=causes))
