"""Writes observed runs whose truth is known: many collectives a step, in loops, each with groups of
its own.

The job is a transformer's step under plain `jit` on a mesh of data x fsdp x tensor: a loop over the
layers forward and one backward, parameters gathered and gradients scattered over `fsdp`,
activations summed over `tensor`, gradients over `data`, a norm over all. Each rank has a time of
its own, t; a collective lets the ranks of a group out together at

    t = max over the group of (t + busy) + transfer,

so that one rank's lateness reaches others through whatever collectives join them.
"""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from jaxpace.core.detail import every, is_detailed
from jaxpace.record.columns import Columns
from jaxpace.record.parts import PartStore
from jaxpace.runs import rundir, schema
from tests.synthetic.synthetic_runs import keys, nanoseconds, write_process_file

KINDS = ("late", "pause", "rotating", "jitter", "contention")


@dataclasses.dataclass(frozen=True)
class LayerFault:
  """One thing that goes wrong.

  Kinds: "late" makes `ranks` busy for longer in `layer`, in each step ("forward" or "backward", as
  `phase` says; without a layer a part of it in each); "pause" stops a process in the gap before a
  step now and then, to collect garbage; "rotating" makes another rank late in `layer` every
  `period` steps; "jitter" makes everyone's work in each layer longer by an exponential amount,
  `seconds` a step on average; "contention" makes the transfers along `axis` longer, by `seconds` a
  step.
  """

  kind: str
  seconds: float
  ranks: tuple[int, ...] = ()
  layer: int | None = None
  phase: str = "forward"
  begin: float = 0.0
  end: float = 1.0
  """From and to which share of the run."""
  probability: float = 1.0
  period: int = 1
  axis: str | None = None
  """Of "contention": "data", "fsdp" or "tensor"; None means all transfers."""

  def __post_init__(self) -> None:
    if self.kind not in KINDS:
      raise ValueError(f"{self.kind!r} is not one of {', '.join(KINDS)}.")


@dataclasses.dataclass(frozen=True)
class ObservedJob:
  """What the ranks of a synthetic observed job do. Durations in seconds, of a step."""

  data: int = 2
  fsdp: int = 2
  tensor: int = 1
  layers: int = 4
  steps: int = 300
  processes: int = 2
  hosts: int = 2
  forward: float = 20e-3
  backward: float = 40e-3
  update: float = 2e-3
  gap: float = 0.5e-3
  transfer: float = 12e-3
  """Of all collectives of a step together."""
  noise: float = 0.0
  """Standard deviation of a rank's work in a layer, as a share of itself."""
  uneven: float = 0.0
  """By which layers differ in their work, on all ranks alike, as a share of it."""
  transfer_noise: float = 0.0
  """Mean of an exponential part of each transfer, as a share of it."""
  norm: bool = True
  """Whether a sum over all ranks ends the step; without it nothing need join all ranks at once."""
  faults: tuple[LayerFault, ...] = ()
  every: int | None = None
  """Steps of which one is written in detail; None: as many as a recorder would choose."""
  seed: int = 0

  @property
  def ranks(self) -> int:
    """Ranks of the mesh; tensor is the fastest axis."""
    return self.data * self.fsdp * self.tensor


class Occurrence(NamedTuple):
  """One occurrence of a collective in a step."""

  of: int
  name: str
  kind: str
  axis: str
  groups: tuple[tuple[int, ...], ...]
  phase: str
  source: str
  loops: tuple[tuple[str, int, int], ...]
  busy: float  # s before it
  transfer: float


class ObservedTruth(NamedTuple):
  """The job as it really was. C occurrences, R ranks, K steps; seconds."""

  places: tuple[Occurrence, ...]
  busy: np.ndarray  # [C, R, K] from one own exit to the next entry
  wait: np.ndarray  # [C, R, K]
  transfer: np.ndarray  # [C, R, K] of the rank's group
  begin: np.ndarray  # [R, K] own last exit of the step before
  gap: np.ndarray  # [R, K]
  paused: np.ndarray  # [R, K] of it, in pauses
  late: np.ndarray  # [R] what the faults add to each rank's busy time, mean over steps


def places(job: ObservedJob) -> tuple[Occurrence, ...]:
  """The collectives of a step, in their order."""
  mesh = np.arange(job.ranks).reshape(job.data, job.fsdp, job.tensor)
  axes = {"data": mesh.transpose(1, 2, 0), "fsdp": mesh.transpose(0, 2, 1), "tensor": mesh}
  groups = {name: tuple(map(tuple, rows.reshape(-1, rows.shape[-1]).tolist()))
            for name, rows in axes.items()}
  groups["data,fsdp,tensor"] = (tuple(range(job.ranks)),)
  alone = job.fsdp == job.tensor == 1
  bodies = {"forward": [("all-gather", "fsdp", 64), ("all-reduce", "tensor", 81)],
            "backward": [("all-gather", "fsdp", 64), ("all-reduce", "tensor", 81),
                         ("reduce-scatter", "fsdp", 64)]}
  if alone:
    bodies = {"forward": [], "backward": [("all-reduce", "data", 97)]}
  ends = [] if alone else [("all-reduce", "data", 97)]
  size = {"data": job.data, "fsdp": job.fsdp, "tensor": job.tensor}
  layer = np.random.default_rng((job.seed, 7)).normal(1.0, job.uneven, job.layers).clip(0.2)
  found: list[Occurrence] = []
  of = 0
  owed = 0.0
  for which, (phase, body) in enumerate(bodies.items()):
    body = [entry for entry in body if size[entry[1]] > 1]
    turns = layer if phase == "forward" else layer[::-1]
    spent = getattr(job, phase) / layer.sum()
    if not body:
      owed += getattr(job, phase)
      continue
    for turn in range(job.layers):
      for at, (kind, axis, line) in enumerate(body):
        name = f"{kind}.{of + at}" + (f"@{turn}" if turn else "")
        found.append(Occurrence(of + at, name, kind, axis, groups[axis], phase, f"model.py:{line}",
                                ((f"while.{which}", turn, job.layers),),
                                spent * turns[turn] / len(body) + owed, 0.0))
        owed = 0.0
    of += len(body)
  ends = [entry for entry in ends if size[entry[1]] > 1]
  for kind, axis, line in ends + ([("all-reduce", "data,fsdp,tensor", 120)] if job.norm else []):
    found.append(Occurrence(of, f"{kind}.{of}", kind, axis, groups[axis],
                            "update" if "," in axis else "backward", f"train.py:{line}", (),
                            1e-4 + owed, 0.0))
    owed = 0.0
    of += 1
  each = job.transfer / max(1, len(found))
  return tuple(place._replace(transfer=each) for place in found)


def simulate(job: ObservedJob) -> ObservedTruth:
  """Plays the job."""
  at, random = places(job), np.random.default_rng(job.seed)
  shape = len(at), job.ranks, job.steps
  base = np.array([place.busy for place in at])[:, None, None]
  busy = np.repeat(base, job.ranks, axis=1).repeat(job.steps, axis=2)
  if job.noise:
    busy *= np.maximum(1 + job.noise * random.standard_normal(shape, np.float32), 0.1)
  transfer = np.repeat(np.array([place.transfer for place in at])[:, None, None], job.steps, axis=2)
  transfer = np.repeat(transfer, job.ranks, axis=1)
  if job.transfer_noise:
    transfer *= 1 + random.exponential(job.transfer_noise, shape)
  gap = np.full((job.ranks, job.steps), job.gap)
  before = busy.sum(axis=0)
  for i, fault in enumerate(job.faults):
    _strike(job, at, fault, np.random.default_rng((job.seed, i + 1)), busy, transfer, gap)
  paused = gap - job.gap
  late = (busy.sum(axis=0) - before + gap - job.gap).mean(axis=1)
  busy[0] += gap
  busy[0, :, 1:] += job.update
  wait = np.empty(shape)
  if job.norm:  # all leave each step together: the steps don't know of each other
    time = _play(at, np.zeros((job.ranks, job.steps)), busy, transfer, wait)
    starts = np.concatenate([[0.0], np.cumsum(time[0])[:-1]])
    begin = np.repeat(starts[None], job.ranks, axis=0)
  else:
    begin = np.empty((job.ranks, job.steps))
    time = np.zeros((job.ranks, 1))
    for k in range(job.steps):
      begin[:, k] = time[:, 0]
      own = slice(k, k + 1)
      time = _play(at, time, busy[..., own], transfer[..., own], wait[..., own])
  return ObservedTruth(at, busy, wait, transfer, begin, gap, paused, late)


def _strike(job: ObservedJob, at: Sequence[Occurrence], fault: LayerFault,
            random: np.random.Generator, busy: np.ndarray, transfer: np.ndarray, gap: np.ndarray
            ) -> None:
  """Adds a fault to what the ranks do."""
  slots, ranks, steps = busy.shape
  own = list(fault.ranks) or list(range(ranks))
  during = np.zeros(steps, bool)
  during[round(fault.begin * steps):round(fault.end * steps)] = True
  if fault.kind == "contention":
    some = [c for c, place in enumerate(at) if fault.axis in (None, place.axis)]
    stretch = np.arange(steps) // fault.period
    struck = during & (random.random(int(stretch[-1]) + 1) < fault.probability)[stretch]
    transfer[np.array(some)[:,
                            None], :, np.flatnonzero(struck)] += (fault.seconds / max(1, len(some)))
    return
  if fault.kind == "pause":
    owner = process_of(job)
    struck = during & (random.random((job.processes, steps)) < fault.probability)
    gap[own] += fault.seconds * struck[owner[own]]
    return
  where = [c for c, place in enumerate(at) if place.loops and place.phase == fault.phase]
  where = where or [c for c, place in enumerate(at) if place.loops]
  if fault.layer is not None and fault.kind != "jitter":
    turns = job.layers - 1 - fault.layer if at[where[0]].phase == "backward" else fault.layer
    where = [next(c for c in where if at[c].loops[0][1] == turns)]
  elif fault.kind == "jitter":
    where = [c for c, place in enumerate(at) if place.loops]
  each = fault.seconds / len(where)
  for c in where:
    if fault.kind == "jitter":
      busy[c, own] += random.exponential(each, (len(own), steps)) * during
    elif fault.kind == "rotating":
      turn = np.array(own)[np.arange(steps) // fault.period % len(own)]
      busy[c, turn, np.arange(steps)] += each * during
    else:
      busy[c, own] += each * during * (random.random(steps) < fault.probability)


def process_of(job: ObservedJob) -> np.ndarray:
  """[R] process of each rank."""
  groups = np.array_split(np.arange(job.ranks), job.processes)
  return np.repeat(np.arange(job.processes), [len(group) for group in groups])


def _play(at: Sequence[Occurrence], time: np.ndarray, busy: np.ndarray, transfer: np.ndarray,
          wait: np.ndarray
          ) -> np.ndarray:
  """Lets the ranks go through the collectives of [R, k] steps that begin at `time`; fills `wait`,
  returns the ends."""
  for c, place in enumerate(at):
    ready = time + busy[c]
    out = np.empty_like(ready)
    groups = np.array(place.groups)
    out[groups] = (ready[groups].max(axis=1) + transfer[c, groups[:, 0]])[:, None]
    wait[c] = out - ready
    time = out
  return time


def write(directory: str | pathlib.Path, job: ObservedJob, *, run: str = "observed",
          first_step: int = 0, attempt: int = 0) -> ObservedTruth:
  """Writes the job as a recorder would have, on clocks with an origin of their own; returns the
  truth."""
  truth = simulate(job)
  path = pathlib.Path(directory)
  path.mkdir(parents=True, exist_ok=True)
  stretch = job.every or every(len(truth.places), job.ranks)
  rundir.write_json(path / "run.json", information(job, truth.places, run, stretch))
  steps = np.arange(job.steps) + first_step
  for process, ranks in enumerate(np.array_split(np.arange(job.ranks), job.processes)):
    write_process_file(path, job, run, process, ranks, attempt)
    origin = 10**15 + 7 * 10**14 * process
    for table, columns in rows(job, truth, ranks, steps,
                               np.flatnonzero(is_detailed(steps, stretch)), process=process,
                               attempt=attempt, origin=origin).items():
      PartStore(path, table, run, process).append(columns)
  return truth


def information(job: ObservedJob, at: Sequence[Occurrence], run: str,
                stretch: int) -> dict[str, Any]:
  """`run.json` of the job."""
  collectives = [{
      "slot": slot, "name": place.name, "primitives": [place.kind], "kind": place.kind,
      "axis": place.axis, "bytes": 1 << 20, "operands": 1, "dtypes": ["float32"],
      "phase": place.phase, "groups": [list(group) for group in place.groups], "rank_pairs": None,
      "operation": f"jit(train_step)/{place.phase}/{place.kind}", "source": place.source,
      "loops": [list(loop) for loop in place.loops], "of": place.of}
                 for slot, place in enumerate(at)]
  mesh = {"data": job.data, "fsdp": job.fsdp, "tensor": job.tensor}
  return {"schema_version": schema.SCHEMA_VERSION, "run": run, "attempt": 0, "ranks": job.ranks,
          "processes": job.processes, "clock": "marks",
          "settings": {"mesh": mesh, "axis": list(mesh)},
          "plan": {"ranks": job.ranks, "clock": "marks", "marks": [], "collectives": collectives,
                   "detail": {"every": stretch}}}


def rows(job: ObservedJob, truth: ObservedTruth, ranks: np.ndarray, steps: np.ndarray,
         detailed: np.ndarray, *, process: int, attempt: int = 0,
         origin: int = 0) -> dict[str, Columns]:
  """Makes the rows of the tables `steps` and `collectives` that a process with these ranks would
  have recorded: [K] `steps`, those at the places `detailed` in detail, its clock showing `origin`
  ns at the job's start."""
  begin = truth.begin[ranks]
  own_busy, own_wait = truth.busy[:, ranks], truth.wait[:, ranks]
  leave = begin + np.cumsum(own_busy + own_wait, axis=0)  # [C, r, K]
  number, size = len(ranks), len(steps)
  sync = own_wait.sum(axis=0)
  phase = {name: sum((own_busy[c] for c, place in enumerate(truth.places) if place.phase == name),
                     np.zeros((number, size))) for name in ("forward", "backward", "update")}
  gap = truth.gap[ranks]
  started = np.where(np.arange(size) > 0, job.update, 0.0)
  head = truth.places[0].phase
  phase[head] = phase[head] - gap - started
  phase["update"] = phase["update"] + job.update

  def times(values: np.ndarray) -> np.ndarray:
    return (nanoseconds(values) + origin).reshape(-1)

  def durations(values: np.ndarray) -> np.ndarray:
    return nanoseconds(values).reshape(-1)

  first = np.tile(np.arange(size) == 0, number)
  made: dict[str, Columns] = {"steps": {
      **keys(ranks, steps, process, attempt), "start_ns": times(begin + started + gap),
      "end_ns": times(leave[-1] + job.update),
      **{f"{name}_ns": durations(values) for name, values in phase.items()},
      "sync_ns": durations(sync), "last_exit_ns": times(leave[-1]),
      "gap_ns": np.ma.masked_array(durations(gap), first),
      "cpu_ns": durations(sum(phase.values(), np.zeros((number, size)))),
      "gc_ns": durations(truth.paused[ranks])}}
  slots, some = len(truth.places), len(detailed)
  if some:
    cells = slots * number * some
    names, axes = (np.array([getattr(place, key) for place in truth.places])
                   for key in ("name", "axis"))
    # a step's rows of a rank stand together
    slot = np.tile(np.arange(slots, dtype=np.int32), number * some)
    enter = (leave - own_wait)[..., detailed]
    made["collectives"] = {
        **{name: np.repeat(values, slots)
           for name, values in keys(ranks, steps[detailed], process, attempt).items()},
        "collective": slot, "name": names[slot], "axis": axes[slot],
        "bytes": np.full(cells, 1 << 20, np.int64), "enter_ns": times(np.moveaxis(enter, 0, -1)),
        "exit_ns": times(np.moveaxis(leave[..., detailed], 0, -1))}
  return made
