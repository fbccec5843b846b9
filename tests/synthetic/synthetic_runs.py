"""Writes recorded runs whose truth is known: for tests, and to measure the report on large ones.

The job is a barrier model: all ranks leave collective c of step k at

    base[k, c] = base[k, c-1] + max over ranks of busy[r, k, c] + transfer[k, c],

and every process reads all that on a clock with an origin of its own.
"""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Iterable

import numpy as np

from jaxpace.record.columns import Columns, whose
from jaxpace.record.parts import PartStore
from jaxpace.runs import rundir, schema
from jaxpace.runs.run import PAUSES
from tests.synthetic.synthetic_faults import Extra, Fault, strike


@dataclasses.dataclass(frozen=True)
class SyntheticJob:
  """What the ranks of a synthetic job do. Durations in seconds."""

  ranks: int = 4
  steps: int = 200
  processes: int = 2
  hosts: int = 2
  forward: float = 10e-3
  backward: float = 20e-3
  update: float = 1e-3
  gap: float = 0.5e-3
  transfer: float = 2e-3
  collectives: int = 1
  """Collectives of a step; the backward pass is divided evenly among them."""
  noise: float = 0.0
  """Standard deviation of forward and backward, as a share of themselves, independent by rank and
  step."""
  late: dict[int, float] = dataclasses.field(default_factory=dict)
  """Seconds by which these ranks' forward pass is longer, in every step."""
  delays: dict[int, float] = dataclasses.field(default_factory=dict)
  """Delays applied to these ranks in every step."""
  compile: float = 0.0
  """Extra time of the first two steps, in the gap of every rank."""
  faults: tuple[Fault, ...] = ()
  transfer_noise: float = 0.0
  """Mean of an exponential part of the transfer, as a share of it."""
  host_columns: bool = False
  """Whether the host's columns of the table `steps` and the table `hosts` are written, one sample a
  `sample_steps`."""
  sample_steps: int = 20
  seed: int = 0


@dataclasses.dataclass(frozen=True)
class Truth:
  """The job as it really was. R ranks, K steps, C collectives; int64 nanoseconds."""

  forward: np.ndarray  # [R, K]
  backward: np.ndarray  # [R, K]
  update: np.ndarray  # [R, K]
  gap: np.ndarray  # [R, K]
  delay: np.ndarray  # [R, K]
  busy: np.ndarray  # [C, R, K] time from one exit to the next entry, the delay included
  transfer: np.ndarray  # [C, K]
  enter: np.ndarray  # [C, R, K] on a clock common to all
  exit: np.ndarray  # [C, R, K]
  start: np.ndarray  # [R, K]
  end: np.ndarray  # [R, K]
  extra: Extra  # what the faults added, seconds


def simulate(job: SyntheticJob) -> Truth:
  """Plays the job."""
  random = np.random.default_rng(job.seed)
  shape = job.ranks, job.steps

  def noisy(mean: float) -> np.ndarray:
    if not job.noise:
      return np.full(shape, mean)
    return np.maximum(mean * (1 + job.noise * random.standard_normal(shape, np.float32)),
                      0.1 * mean)

  forward, backward = noisy(job.forward), noisy(job.backward)
  gap, delay = np.full(shape, job.gap), np.zeros(shape)
  for target, longer in ((forward, job.late), (delay, job.delays)):
    for rank, seconds in longer.items():
      target[rank] += seconds
  gap[:, :2] += job.compile
  transfers = np.full((job.collectives, job.steps), job.transfer)
  if job.transfer_noise:
    transfers += np.random.default_rng((job.seed, 0)).exponential(
        job.transfer_noise * job.transfer, transfers.shape)
  extra = strike(job.faults, job.ranks, job.steps, job.seed)
  forward, gap = forward + extra.forward, gap + extra.gap
  transfers += extra.transfer / job.collectives
  update = np.full(shape, job.update)
  forward, backward, gap, delay, update, transfer = map(
      nanoseconds, (forward, backward, gap, delay, update, transfers))

  busy = np.repeat((backward // job.collectives)[None], job.collectives, axis=0)
  backward = busy.sum(axis=0)
  busy[0] += gap + delay + forward
  busy[0, :, 1:] += update[:, :-1]
  rise = busy.max(axis=1) + transfer  # [C, K] from one base to the next
  base = np.cumsum(rise.T.reshape(-1)).reshape(job.steps, job.collectives).T
  before = np.concatenate([[0], base.T.reshape(-1)[:-1]]).reshape(job.steps, job.collectives).T
  enter = before[:, None] + busy
  leave = np.repeat(base[:, None], job.ranks, axis=1)
  finish = leave[-1] + update
  begun = np.concatenate([np.zeros((job.ranks, 1), np.int64), finish[:, :-1]], axis=1) + gap
  return Truth(forward, backward, update, gap, delay, busy, transfer, enter, leave, begun, finish,
               extra)


def nanoseconds(seconds: np.ndarray) -> np.ndarray:
  return np.rint(seconds * 1e9).astype(np.int64)


def write(directory: str | pathlib.Path, job: SyntheticJob, *, run: str = "synthetic",
          attempt: int = 0, first_step: int = 0,
          origins: Iterable[int] | None = None, part_steps: int = 10_000) -> Truth:
  """Writes the job as a recorder would have; returns the truth.

  `origins` are the nanoseconds that each process's clock shows at the job's start, negative ones
  too; by default all differ. A Parquet part holds `part_steps`.
  """
  truth = simulate(job)
  path = pathlib.Path(directory)
  path.mkdir(parents=True, exist_ok=True)
  origins = (list(origins) if origins is not None
             else [10**15 + 7 * 10**14 * p for p in range(job.processes)])
  rundir.write_json(path / "run.json", _info(job, run))
  for process, ranks in enumerate(np.array_split(np.arange(job.ranks), job.processes)):
    write_process_file(path, f"host{process * job.hosts // job.processes}", run, process, ranks,
                       attempt)
    stores = {table: PartStore(path, table, run, process) for table in ("steps", "collectives")}
    doings = _host_columns(truth, ranks) if job.host_columns else {}
    if job.host_columns:
      samples = _host_samples(job, truth, ranks, process, attempt, origins[process])
      PartStore(path, "hosts", run, process).append(samples)
    for begin in range(0, job.steps, part_steps):
      part = slice(begin, min(begin + part_steps, job.steps))
      made = rows(truth, ranks, part, process=process, attempt=attempt, first_step=first_step,
                  origin=origins[process])
      made["steps"].update({name: np.tile(values[part], len(ranks))
                            for name, values in doings.items()})
      for table, columns in made.items():
        stores[table].append(columns)
  return truth


def write_process_file(path: pathlib.Path, host: str, run: str, process: int, ranks: np.ndarray,
                       attempt: int) -> None:
  """Writes what a process of any synthetic job says of itself."""
  rundir.write_json(
      path / "process" / f"{process}.json",
      {"schema_version": schema.SCHEMA_VERSION, "run": run, "attempt": attempt, "process": process,
       "hostname": host, "pid": 1000 + process,
       "ranks": ranks.tolist(), "closed_cleanly": True})


def rows(truth: Truth, ranks: np.ndarray, part: slice, *, process: int, attempt: int = 0,
         first_step: int = 0, origin: int = 0) -> dict[str, Columns]:
  """Makes the rows of the tables `steps` and `collectives` that a process with these ranks would
  have recorded of a part of the truth's steps, its clock showing `origin` ns at the job's start."""
  own = keys(ranks, np.arange(part.start, part.stop, dtype=np.int64) + first_step, process, attempt)
  return {"steps": _step_rows(truth, own, ranks, part, origin),
          "collectives": _collective_rows(truth, own, ranks, part, origin)}


def _info(job: SyntheticJob, run: str) -> dict:
  collectives = [{"slot": c, "name": "psum" if job.collectives == 1 else f"psum.{c}",
                  "primitives": ["psum"], "axis": "data", "bytes": 4096, "operands": 2,
                  "dtypes": ["float32"], "phase": "backward"}
                 for c in range(job.collectives)]
  return {"schema_version": schema.SCHEMA_VERSION, "run": run, "attempt": 0, "ranks": job.ranks,
          "processes": job.processes, "axis": "data", "clock": "synthetic",
          "plan": {"axis": "data", "ranks": job.ranks, "clock": "synthetic", "marks": [],
                   "collectives": collectives}}


def keys(ranks: np.ndarray, steps: np.ndarray, process: int, attempt: int) -> Columns:
  """Whose rows are, one rank's after the other's."""
  return whose(np.tile(steps, len(ranks)), np.repeat(ranks, len(steps)), process, attempt)


def _step_rows(truth: Truth, keys: Columns, ranks: np.ndarray, part: slice,
               origin: int) -> Columns:
  def cut(values: np.ndarray) -> np.ndarray:
    return values[ranks, part].reshape(-1)

  gap = np.ma.masked_array(cut(truth.gap),
                           cut(np.arange(truth.gap.shape[1])[None] == np.zeros_like(truth.gap)))
  return {**keys, "start_ns": cut(truth.start) + origin, "end_ns": cut(truth.end) + origin,
          "forward_ns": cut(truth.forward), "backward_ns": cut(truth.backward),
          "update_ns": cut(truth.update), "gap_ns": gap, "delay_ns": cut(truth.delay),
          "delay_applied_ns": cut(truth.delay),
          "sync_ns": cut((truth.exit - truth.enter).sum(axis=0))}


def _host_columns(truth: Truth, ranks: np.ndarray) -> Columns:
  """[K] what the ranks' process shows in each step: CPU time of what it computes, and the faults'
  mechanisms."""
  shown = {name: nanoseconds(values[ranks].sum(axis=0))
           for name, values in truth.extra.shown.items()}
  # Time that a stopped or preempted process loses is no CPU time.
  cpu = ((truth.forward + truth.backward + truth.update)[ranks].sum(axis=0) - shown["preempted"]
         - shown["stopped"])
  paused = [name for name in PAUSES if truth.extra.shown[name].any()]
  return {"cpu_ns": cpu + shown["gc"], "nivcsw": shown["preempted"] // 1_000_000,
          "gc_ns": shown["gc"], **{f"{name}_ns": shown[name] for name in paused if name != "gc"}}


def _host_samples(job: SyntheticJob, truth: Truth, ranks: np.ndarray, process: int, attempt: int,
                  origin: int) -> Columns:
  """Samples of the process's host: the links are busy while a transfer runs, and for as long as a
  fault holds them."""
  at = np.unique(np.append(np.arange(0, job.steps, job.sample_steps), job.steps - 1))
  quiet = truth.transfer.sum(axis=0) * 1e-9 - truth.extra.transfer
  busy = np.cumsum(nanoseconds(quiet + truth.extra.busy[ranks].max(axis=0)))
  number = len(at)
  return {"time_ns": truth.end[ranks[0], at] + origin,
          "process": np.full(number, process, np.int32),
          "attempt": np.full(number, attempt, np.int32), "tcp_busy_ns": busy[at] - busy[0],
          "retransmits": np.zeros(number, np.int64), "throttled_ns": np.zeros(number, np.int64)}


def _collective_rows(truth: Truth, keys: Columns, ranks: np.ndarray, part: slice,
                     origin: int) -> Columns:
  slots = len(truth.enter)
  columns = {name: np.tile(values, slots) for name, values in keys.items()}
  columns["collective"] = np.repeat(np.arange(slots, dtype=np.int32), len(keys["step"]))
  names = np.array(["psum" if slots == 1 else f"psum.{c}" for c in range(slots)])
  columns["name"] = np.repeat(names, len(keys["step"]))
  columns["axis"] = np.full(len(columns["step"]), "data")
  columns["bytes"] = np.full(len(columns["step"]), 4096, np.int64)
  for name, values in (("enter_ns", truth.enter), ("exit_ns", truth.exit)):
    columns[name] = (np.concatenate([values[c, ranks, part].reshape(-1) for c in range(slots)])
                     + origin)
  return columns
