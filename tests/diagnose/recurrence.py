"""An exact recurrence of jobs whose ranks meet in groups: what a run's report must agree with.

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
import pathlib
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from tests.diagnose import grouped

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

  @property
  def plan(self) -> dict[str, object]:
    """Its entry in the plan."""
    if self.pairs:
      return {"name": "ppermute", "primitives": ["ppermute"], "axis": self.axis,
              "pairs": [list(pair) for pair in self.pairs]}
    if self.index_groups:
      return {"axis": self.axis, "index_groups": [list(group) for group in self.index_groups]}
    return {"axis": self.axis, "groups": [list(group) for group in self.groups]}


@dataclasses.dataclass(frozen=True)
class Cause:
  """What goes wrong, by a known amount.

  Kinds: "late" makes `ranks` busy for longer before collective `place` (None: a part before each
  of theirs, in proportion to what they do); "pause" makes their gap longer in one step of `every`;
  "contention" makes transfers along `axis` longer, of the groups that hold one of `ranks` (none:
  of all), by `seconds` a transfer.
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

  @property
  def ranks(self) -> int:
    """R; the last axis is the quickest."""
    return int(np.prod(list(self.mesh.values())))


class Played(NamedTuple):
  """What happened. C collectives, R ranks, K steps; seconds, NaN where a rank takes no part."""

  enter: np.ndarray  # [C, R, K]
  exit: np.ndarray  # [C, R, K]
  end: np.ndarray  # [R, K] last exit of each step
  gap: np.ndarray  # [R, K]
  waiting: np.ndarray  # [R, K] for others, transfers left out

  def step_time(self, skip: int = 20) -> float:
    """Mean over ranks and steps, without the first `skip`, in which a pipeline of steps fills."""
    return float((self.end[:, -1] - self.end[:, skip - 1]).mean() / (self.end.shape[1] - skip))

  def waited(self, skip: int = 20) -> float:
    """Mean waiting of ranks a step."""
    return float(self.waiting[:, skip:].mean())


def along(mesh: dict[str, int], axes: str) -> tuple[tuple[int, ...], ...]:
  """The groups of ranks along some axes, joined by commas, each in the axes' order."""
  names = list(mesh)
  chosen = [names.index(name) for name in axes.split(",")]
  rest = [at for at in range(len(names)) if at not in chosen]
  ranks = np.arange(int(np.prod(list(mesh.values())))).reshape(tuple(mesh.values()))
  rows = ranks.transpose(rest + chosen).reshape(-1, int(np.prod([ranks.shape[c] for c in chosen])))
  return tuple(map(tuple, rows.tolist()))


def rank_groups(mesh: dict[str, int], axes: str, busy: float, transfer: float) -> Place:
  """A collective along some axes that all ranks of the mesh go through."""
  groups = along(mesh, axes)
  return Place(axes, groups, {rank: busy for group in groups for rank in group}, transfer)


def pipeline(stages: int, data: int, micro: int, work: Sequence[float], *, as_pairs: bool = True,
             transfer: float = 0.2e-3, backward: float = 2.0, reduce: float = 2e-3
             ) -> tuple[dict[str, int], tuple[Place, ...]]:
  """Micro-batches forward through all stages and backward again, then a sum over replicas.

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
    backward: how many times as long backward takes.
    reduce: seconds of the sum over replicas.
  """
  mesh = {"stage": stages, "data": data}
  owed = np.zeros(stages)
  places = []
  for back in (False, True):
    stage_of = list(range(stages))[::-1 if back else 1]
    for _ in range(micro):
      for at, stage in enumerate(stage_of):
        owed[stage] += work[stage] * (backward if back else 1.0)
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
  places.append(Place("data", groups, {r: float(owed[r // data]) for g in groups for r in g},
                      reduce))
  return mesh, tuple(places)


@functools.lru_cache(maxsize=1)
def _base(mesh: tuple[tuple[str, int], ...], places: int, ranks: int, steps: int, seed: int
          ) -> np.ndarray:
  return np.random.default_rng(seed).standard_normal((places, ranks, steps))


def work(job: Job, without: Sequence[Cause] = ()) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
  """[C, R, K] busy (NaN where a rank takes no part), [R, K] gaps and [C, R, K] transfers; the noise
  is the same with and without causes."""
  shape = len(job.places), job.ranks, job.steps
  busy = np.full(shape, np.nan)
  transfer = np.zeros(shape)
  for c, place in enumerate(job.places):
    for rank, seconds in place.busy.items():
      busy[c, rank] = seconds
    transfer[c] = place.transfer
  if job.noise:
    drawn = _base(tuple(job.mesh.items()), *shape, job.seed)
    busy *= np.maximum(1 + job.noise * drawn, 0.1)
  gap = np.full(shape[1:], STEP_GAP)
  for cause in job.causes:
    if cause not in without:
      _strike(job, cause, busy, gap, transfer)
  return busy, gap, transfer


def _strike(job: Job, cause: Cause, busy: np.ndarray, gap: np.ndarray, transfer: np.ndarray
            ) -> None:
  during = np.zeros(job.steps, bool)
  during[round(cause.begin * job.steps):round(cause.end * job.steps)] = True
  during &= np.arange(job.steps) % cause.every == cause.every - 1
  if cause.kind == "contention":
    for c, place in enumerate(job.places):
      for group in place.groups if cause.axis in (None, place.axis) else ():
        if not cause.ranks or set(group) & set(cause.ranks):
          transfer[np.ix_([c], list(group), np.flatnonzero(during))] += cause.seconds
    return
  for rank in cause.ranks:
    if cause.kind == "pause":
      gap[rank] += cause.seconds * during
      continue
    own = [c for c, place in enumerate(job.places) if rank in place.busy]
    parts = {c: job.places[c].busy[rank] for c in own} if cause.place is None else {cause.place: 1.}
    for c, part in parts.items():
      busy[c, rank] += cause.seconds * part / sum(parts.values()) * during


def play(job: Job, without: Sequence[Cause] = ()) -> Played:
  """Plays the job, without some of its causes."""
  busy, gap, transfer = work(job, without)
  slots, ranks, steps = busy.shape
  enter, leave = np.full((2, slots, ranks, steps), np.nan)
  end, waiting = np.zeros((2, ranks, steps))
  members = [np.array(place.groups) for place in job.places]
  time = np.zeros(ranks)
  for k in range(steps):
    time = time + gap[:, k]
    for c, place in enumerate(job.places):
      at = members[c]  # [G, M]
      ready = time[at] + busy[c, at, k]
      last = ready.max(axis=1, keepdims=True) + transfer[c, at, k].max(axis=1, keepdims=True)
      out = np.broadcast_to(last, ready.shape).copy()
      if place.pairs:
        out[:, 0] = ready[:, 0]
      enter[c, at, k], leave[c, at, k] = ready, out
      waiting[at, k] += np.maximum(out - ready - transfer[c, at, k], 0)
      time[at] = out
    end[:, k] = time
  return Played(enter, leave, end, gap, waiting)


def gain(job: Job, *causes: Cause) -> float:
  """How many times as fast the job is without these causes."""
  return play(job).step_time() / play(job, causes).step_time()


def write(directory: str | pathlib.Path, job: Job) -> Played:
  """Writes the job as a run of a process for each rank, and returns what happened."""
  found = play(job)
  present = np.isfinite(found.enter)
  if job.missing:
    lost = np.random.default_rng((job.seed, 1)).random(found.end.shape) < job.missing
    present &= ~lost
  start = np.concatenate([np.zeros((job.ranks, 1)), found.end[:, :-1]], axis=1) + found.gap
  of_slot = np.argsort(job.slots or range(len(job.places)))
  grouped.write(directory, _ns(found.enter[of_slot]), _ns(found.exit[of_slot]),
                settings={"mesh": job.mesh, "axis": list(job.mesh)},
                collectives=[job.places[at].plan for at in of_slot], gap=found.gap,
                start=_ns(start), end=_ns(found.end), present=present[of_slot],
                columns={"gc_ns": np.where(found.gap > STEP_GAP, _ns(found.gap - STEP_GAP), 0)})
  return found


def _ns(seconds: np.ndarray) -> np.ndarray:
  return np.rint(np.nan_to_num(seconds) * 1e9).astype(np.int64)
