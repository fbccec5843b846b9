"""An exact recurrence of jobs whose ranks meet in groups, and the runs that they leave: what a
report must agree with.

Each rank has a time of its own. It is busy before each of its collectives, in the order of the
step; a collective lets the ranks of a group out together,

    exit = max over the group of (time + busy) + transfer,

and a point-to-point transfer its target alone, which waits for its source; the source goes on.
Causes are amounts added to what ranks do, so the job can be replayed without any of them: what
each is worth is known exactly, whatever a diagnosis makes of the timestamps.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from jaxpace.core.detail import is_detailed
from jaxpace.record.columns import Columns, picked, whose
from jaxpace.record.parts import PartStore
from jaxpace.runs import rundir, schema
from tests.synthetic.synthetic_runs import nanoseconds, write_process_file

STEP_GAP = 0.5e-3
"""Seconds between two steps of a rank."""


class Place(NamedTuple):
  """One collective of a step."""

  axis: str
  groups: tuple[tuple[int, ...], ...]  # ranks that meet; of a transfer, its source and its target
  busy: dict[int, float]  # s before it, of each rank that takes part
  transfer: float
  pairs: tuple[tuple[int, int], ...] = ()  # of a point-to-point transfer, by index along the axis
  index_groups: tuple[tuple[int, ...], ...] = ()  # of one written so, by index along the axis
  phase: str = "backward"
  layer: int | None = None
  told: Mapping[str, Any] = {}  # what else the plan says of it

  @property
  def plan(self) -> dict[str, object]:
    """Its entry in the plan."""
    entry = {"axis": self.axis, "phase": self.phase, **self.told}
    if self.pairs:
      return {**entry, "name": "ppermute", "primitives": ["ppermute"],
              "pairs": [list(pair) for pair in self.pairs]}
    kind = "index_groups" if self.index_groups else "groups"
    return {**entry, kind: [list(group) for group in self.index_groups or self.groups]}


@dataclasses.dataclass(frozen=True)
class Cause:
  """What goes wrong, by a known amount.

  Kinds: "late" makes `ranks` busy for longer before collective `place`, or the first one of `layer`
  in `phase` (neither: a part before each of theirs, in proportion to what they do); "rotating" does
  so to one of them after the other, and "jitter" to all, by an exponential amount; "pause" makes
  their gap longer in one step of `every`, or of a process's steps as `probability` has it;
  "contention" makes transfers along `axis` longer, of the groups that hold one of `ranks`, by
  `seconds` a transfer. No ranks are all of them.
  """

  kind: str
  seconds: float
  ranks: tuple[int, ...] = ()
  place: int | None = None
  axis: str | None = None
  every: int = 1
  begin: float = 0.0
  end: float = 1.0
  """From and to which share of the run."""
  layer: int | None = None
  phase: str = "forward"
  probability: float = 1.0


@dataclasses.dataclass(frozen=True)
class Job:
  """A job of C collectives a step."""

  mesh: dict[str, int]
  places: tuple[Place, ...]
  causes: tuple[Cause, ...] = ()
  steps: int = 240
  noise: float = 0.0
  """What busy times vary by, as a share of themselves."""
  missing: float = 0.0
  """Share of the rows of each rank that are lost, by whole steps, at random."""
  slots: tuple[int, ...] = ()
  """Number of each collective in the run; their order by default."""
  seed: int = 0
  processes: int | None = None
  hosts: int | None = None
  """By default each rank has a process and a host of its own."""
  update: float = 0.0
  """Seconds behind the last collective of a step."""
  every: int | None = None
  """Steps of which one is detailed, as in an observed run; None: all, of a run that is not."""

  @property
  def ranks(self) -> int:
    """R; the last axis is the quickest."""
    return math.prod(self.mesh.values())

  @property
  def process_of(self) -> np.ndarray:
    """[R]"""
    parts = np.array_split(np.arange(self.ranks), self.processes or self.ranks)
    return np.repeat(np.arange(len(parts)), [len(part) for part in parts])


class Played(NamedTuple):
  """What happened. C collectives, R ranks, K steps; seconds, NaN where a rank takes no part."""

  enter: np.ndarray  # [C, R, K]
  exit: np.ndarray  # [C, R, K]
  transfer: np.ndarray  # [C, R, K]
  gap: np.ndarray  # [R, K]

  @property
  def end(self) -> np.ndarray:
    """[R, K] last exit of each step."""
    return np.nanmax(self.exit, axis=0)

  @property
  def step(self) -> np.ndarray:
    """[R, K] from one end to the next."""
    return np.diff(self.end, axis=1, prepend=0.0)

  def step_time(self, skip: int = 20) -> float:
    """Mean over ranks and steps, without the first `skip`, in which a pipeline of steps fills."""
    return float(self.step[:, skip:].mean())

  def waited(self, skip: int = 20) -> float:
    """Mean waiting of ranks for others a step, transfers left out."""
    return float(np.nansum(np.maximum(self.exit - self.enter - self.transfer, 0),
                           axis=0)[:, skip:].mean())


def along(mesh: dict[str, int], axes: str) -> tuple[tuple[int, ...], ...]:
  """The groups of ranks along some axes, joined by commas, each in the axes' order."""
  names = list(mesh)
  chosen = [names.index(name) for name in axes.split(",")]
  rest = [at for at in range(len(names)) if at not in chosen]
  ranks = np.arange(math.prod(mesh.values())).reshape(tuple(mesh.values()))
  rows = ranks.transpose(rest + chosen).reshape(-1, math.prod(ranks.shape[c] for c in chosen))
  return tuple(map(tuple, rows.tolist()))


def rank_groups(mesh: dict[str, int], axes: str, busy: float, transfer: float,
                **more: Any) -> Place:
  """A collective along some axes that all ranks of the mesh go through."""
  groups = along(mesh, axes)
  return Place(axes, groups, {rank: busy for group in groups for rank in group}, transfer, **more)


def pipeline(stages: int, data: int, micro: int, work: Sequence[float], *, as_pairs: bool = True,
             transfer: float = 0.2e-3) -> tuple[dict[str, int], tuple[Place, ...]]:
  """Micro-batches forward through all stages and backward again, in twice the time, then a sum of 2
  ms over replicas.

  Each transfer between two stages is a collective of its own, along "stage", in which these alone
  take part, in the order in which micro-batches go through the stages. The sender's compute lies
  before it, and the receiver's before its next one.

  Args:
    stages: S, slower axis of the mesh.
    data: replicas of each stage.
    micro: micro-batches a step.
    work: [S] seconds of a micro-batch forward on each stage.
    as_pairs: transfers are point-to-point; else both ranks meet as in a collective of two.
    transfer: seconds of each.
  """
  mesh = {"stage": stages, "data": data}
  owed = np.zeros(stages)
  places = []
  for back in (False, True):
    stage_of = list(range(stages))[::-1 if back else 1]
    for _ in range(micro):
      for at, stage in enumerate(stage_of):
        owed[stage] += work[stage] * (2.0 if back else 1.0)
        if at + 1 == stages:
          continue
        target = stage_of[at + 1]
        groups = tuple((stage * data + d, target * data + d) for d in range(data))
        busy = {group[i]: float(owed[(stage, target)[i]]) for group in groups for i in range(2)}
        owed[[stage, target]] = 0.0
        pair = ((stage, target),)
        places.append(Place("stage", groups, busy, transfer, pairs=pair if as_pairs else (),
                            index_groups=() if as_pairs else pair))
  groups = along(mesh, "data")
  places.append(Place("data", groups, {r: float(owed[r // data]) for g in groups for r in g}, 2e-3))
  return mesh, tuple(places)


@functools.lru_cache(maxsize=1)
def _drawn(shape: tuple[int, ...], seed: int) -> np.ndarray:
  return np.random.default_rng(seed).standard_normal(shape)


def work(job: Job, without: Sequence[Cause] = ()) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
  """[C, R, K] busy (NaN where a rank takes no part), [R, K] gaps and [C, R, K] transfers; the noise
  is the same with and without causes."""
  shape = len(job.places), job.ranks, job.steps
  busy = np.full(shape, np.nan)
  transfer = np.zeros(shape)
  for c, place in enumerate(job.places):
    busy[c, list(place.busy)] = np.array(list(place.busy.values()))[:, None]
    transfer[c] = place.transfer
  if job.noise:
    busy *= np.maximum(1 + job.noise * _drawn(shape, job.seed), 0.1)
  gap = np.full(shape[1:], STEP_GAP)
  for number, cause in enumerate(job.causes):
    if cause not in without:
      _strike(job, cause, np.random.default_rng((job.seed, 2, number)), busy, gap, transfer)
  return busy, gap, transfer


def _strike(job: Job, cause: Cause, random: np.random.Generator, busy: np.ndarray, gap: np.ndarray,
            transfer: np.ndarray) -> None:
  at = np.arange(job.steps)
  during = ((at >= round(cause.begin * job.steps)) & (at < round(cause.end * job.steps))
            & (at % cause.every == cause.every - 1))
  ranks = np.array(cause.ranks or range(job.ranks))
  if cause.kind == "contention":
    for c, place in enumerate(job.places):
      for group in place.groups if cause.axis in (None, place.axis) else ():
        if set(group) & set(ranks.tolist()):
          transfer[np.ix_([c], list(group), np.flatnonzero(during))] += cause.seconds
    return
  if cause.kind == "pause":
    drawn = random.random((job.processes or job.ranks, job.steps)) < cause.probability
    gap[ranks] += cause.seconds * during * drawn[job.process_of[ranks]]
    return
  for number, rank in enumerate(ranks.tolist()):
    own = during & (at % len(ranks) == number) if cause.kind == "rotating" else during
    for c, part in _parts(job, cause, rank).items():
      seconds = cause.seconds * part
      busy[c, rank] += own * (random.exponential(seconds, job.steps) if cause.kind == "jitter"
                              else seconds)


def _parts(job: Job, cause: Cause, rank: int) -> dict[int, float]:
  """How much of the cause lies before which collectives of a rank."""
  if cause.layer is not None:
    where = [(place.phase, place.layer) for place in job.places]
    return {where.index((cause.phase, cause.layer)): 1.0}
  if cause.place is not None:
    return {cause.place: 1.0}
  parts = {c: place.busy[rank] for c, place in enumerate(job.places) if rank in place.busy}
  return {c: part / sum(parts.values()) for c, part in parts.items()}


def meet(busy: np.ndarray, transfer: np.ndarray, groups: Sequence[Any],
         pairs: Sequence[bool] | None = None, between: np.ndarray | None = None
         ) -> tuple[np.ndarray, np.ndarray]:
  """[C, R, K] entries and exits, s on a clock common to all, NaN where a rank takes no part.

  Args:
    busy, transfer: [C, R, K] s before each collective, and of it, the same in a group.
    groups: [C] lists of those that meet, all of one size.
    pairs: [C] whether the second of each two waits for the first alone.
    between: [R, K] s before each step.
  """
  enter, leave = np.full((2, *busy.shape), np.nan)
  members, time = [np.array(own) for own in groups], np.zeros(busy.shape[1])
  for k in range(busy.shape[2]):
    time = time + (0.0 if between is None else between[:, k])
    for c, at in enumerate(members):  # [G, M]
      ready = time[at] + busy[c, at, k]
      out = ready.max(axis=1) + transfer[c, at[:, 0], k]
      enter[c, at, k] = time[at] = ready
      if pairs is not None and pairs[c]:
        time[at[:, 1]] = out
      else:
        time[at] = out[:, None]
      leave[c, at, k] = time[at]
  return enter, leave


def timestamps(busy: Any, transfers: Sequence[float], groups: Sequence[Any] | None = None,
               sources: Sequence[int] | None = None) -> tuple[np.ndarray, np.ndarray]:
  """The same in ns, of transfers of [C] s, and ranks that wait for those of their group (all, by
  default), or for their source, -1 for none."""
  busy = np.asarray(busy, float)
  if sources is not None:
    groups = [[(source, target) for target, source in enumerate(sources) if source >= 0]]
  transfer = np.broadcast_to(np.asarray(transfers)[:, None, None], busy.shape)
  enter, leave = meet(busy, transfer, groups or [[range(busy.shape[1])]] * len(busy),
                      [sources is not None] * len(busy))
  return nanoseconds(enter), nanoseconds(leave)


def play(job: Job, without: Sequence[Cause] = ()) -> Played:
  """Plays the job, without some of its causes."""
  busy, gap, transfer = work(job, without)
  between = gap + job.update * (np.arange(job.steps) > 0)
  enter, leave = meet(busy, transfer, [place.groups for place in job.places],
                      [bool(place.pairs) for place in job.places], between)
  return Played(enter, leave, transfer, gap)


def gain(job: Job, *causes: Cause) -> float:
  """How many times as fast the job is without these causes."""
  return play(job).step_time() / play(job, causes).step_time()


def write(directory: str | pathlib.Path, job: Job, **more: Any) -> Played:
  """Writes the job as a recorder would have; `more` is of `write_timestamps`. Returns the truth."""
  found = play(job)
  present = np.isfinite(found.enter)
  if job.missing:
    present &= np.random.default_rng((job.seed, 1)).random(found.gap.shape) >= job.missing
  of_slot = np.argsort(job.slots or range(len(job.places)))
  start = found.end - found.step + found.gap + job.update * (np.arange(job.steps) > 0)
  columns = {"start_ns": start, "end_ns": found.end + job.update, "gap_ns": found.gap,
             "gc_ns": found.gap - STEP_GAP, **(_phases(job, found, start) if job.every else {})}
  write_timestamps(directory, *(nanoseconds(np.nan_to_num(times[of_slot])) for times in found[:2]),
                   settings={"mesh": job.mesh, "axis": list(job.mesh)},
                   collectives=[job.places[at].plan for at in of_slot], present=present[of_slot],
                   columns={name: nanoseconds(values) for name, values in columns.items()},
                   plan={"clock": "marks", "detail": {"every": job.every}} if job.every else None,
                   process_of=job.process_of, hosts=job.hosts, every=job.every, **more)
  return found


def _phases(job: Job, found: Played, start: np.ndarray) -> dict[str, np.ndarray]:
  """[R, K] what a recorder sums up of each step; all ranks take part in all collectives."""
  busy = found.enter - np.concatenate([start[None], found.exit[:-1]])
  spent = {phase: sum((busy[c] for c, place in enumerate(job.places) if place.phase == phase),
                      np.full(start.shape, job.update if phase == "update" else 0.0))
           for phase in ("forward", "backward", "update")}
  return {**{f"{phase}_ns": seconds for phase, seconds in spent.items()},
          "sync_ns": (found.exit - found.enter).sum(axis=0), "last_exit_ns": found.exit[-1],
          "cpu_ns": sum(spent.values())}


def write_timestamps(directory: str | pathlib.Path, enter: np.ndarray, leave: np.ndarray, *,
                     run: str = "made-up", settings: dict[str, Any] | None = None,
                     collectives: Sequence[dict[str, Any]] | None = None,
                     plan: dict[str, Any] | None = None, left_out: Sequence[int] = (),
                     present: np.ndarray | None = None, columns: Columns | None = None,
                     process_of: np.ndarray | None = None, hosts: int | None = None,
                     every: int | None = None, attempt: int = 0, first_step: int = 0,
                     keep: Callable[[Columns], np.ndarray] | None = None) -> None:
  """Writes [C, R, K] timestamps, ns, as a run of processes whose clocks have nothing in common.

  `collectives` say what the plan does of each; ranks `left_out` left no rows. `present` [C, R, K]
  are those that take part, and a step of a rank without any has no row in `steps`. `columns` are
  of that table, [R, K] each; by default steps start at their first entry and end at their last
  exit. `process_of` [R] is by default each rank's own. Of an observed run one step in `every` is
  detailed, with those rows of its collectives alone for which `keep` is true.
  """
  path = pathlib.Path(directory)
  slots, number, size = enter.shape
  entries = [{"slot": c, "name": "psum", "primitives": ["psum"], "axis": "data", "bytes": 4096,
              "phase": "backward", **told} for c, told in enumerate(collectives or [{}] * slots)]
  if present is None:
    present = np.ones(enter.shape, bool)
    for c, entry in enumerate(entries):
      if "groups" in entry:
        present[c] = np.isin(np.arange(number), np.concatenate(entry["groups"]))[:, None]
  process_of = np.arange(number) if process_of is None else process_of
  processes = int(process_of[-1]) + 1
  plan = {"clock": "synthetic", "collectives": entries, "marks": [], **(plan or {})}
  rundir.write_json(path / "run.json", {
      "schema_version": schema.SCHEMA_VERSION, "run": run, "attempt": 0, "ranks": number,
      "processes": processes, "settings": settings or {}, "clock": plan["clock"], "plan": plan})
  of_step = {"start_ns": enter[0], "end_ns": leave[-1],
             "gap_ns": np.zeros((number, size), np.int64), **(columns or {})}
  steps = np.arange(size) + first_step
  detailed = is_detailed(steps, every) if every else np.ones(size, bool)
  for process in range(processes):
    ranks = np.flatnonzero(process_of == process)
    if set(ranks.tolist()) <= set(left_out):
      continue
    write_process_file(path, f"host{process * (hosts or processes) // processes}", run, process,
                       ranks, attempt)
    origin = 10**15 + 7 * 10**14 * process
    r, k = np.nonzero(present.any(axis=0)[ranks])
    PartStore(path, "steps", run, process).append({
        **whose(steps[k], ranks[r], process, attempt),
        **{name: values[ranks[r], k] + origin * (name in ("start_ns", "end_ns", "last_exit_ns"))
           for name, values in of_step.items()}})
    r, k, c = np.nonzero((present & detailed)[:, ranks].transpose(1, 2, 0))
    rows = {**whose(steps[k], ranks[r], process, attempt), "collective": c.astype(np.int32),
            **{name: np.array([entry[name] for entry in entries])[c]
               for name in ("name", "axis", "bytes")},
            "enter_ns": enter[c, ranks[r], k] + origin, "exit_ns": leave[c, ranks[r], k] + origin}
    PartStore(path, "collectives", run, process).append(
        picked(rows, keep(rows)) if keep else rows)
