"""Writes a simulated job as a recorded run: the same tables, so that report, what-if, replay and
the rest work.

Beside the tables it writes the processes' places, as `jaxpace doctor` would read them (a GPU hangs
next to its network card, or, where its path is slow, on the other socket), and the floor that
`jaxpace bench` would measure on that fabric were it healthy and quiet.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import pathlib
import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import jax
import numpy as np

from jaxpace.costs import alpha_beta
from jaxpace.costs.fabric_file import SCHEMA
from jaxpace.files.plain import to_plain
from jaxpace.hosts.locality.job import FOLDER
from jaxpace.hosts.locality.types import Cpu, Device, Gpu, Locality, Nic, NumaNode
from jaxpace.record.parts import PartStore
from jaxpace.runs import rundir, schema
from jaxpace.simulation import schedules
from jaxpace.simulation.fabric import Fabric
from jaxpace.simulation.job import Steps
from jaxpace.simulation.settings import JobSettings, Scenario

SIMULATED = "simulated"
"""Kind of the document of a floor that nobody measured."""
_POINTS = 4
_LEAST = 1024.0


def place(fabric: Fabric, process: int, ranks: Sequence[int]) -> Locality:
  """Where a process runs whose ranks of the fabric are these, all of one node."""
  node = ranks[0] // fabric.per_node
  nics = tuple(Nic(name=f"mlx5_{card}", kind="infiniband", pci=f"0000:{0x10 + card:02x}:00.0",
                   up=True, rate_gbps=fabric.card_rate * 8e-9,
                   numa_node=_socket(card, fabric.cards))
               for card in range(fabric.cards))
  gpus = []
  for slot in range(fabric.per_node):
    card = slot * fabric.cards // fabric.per_node
    far = node * fabric.per_node + slot in fabric.slow_paths
    beside = _socket(card, fabric.cards)
    gpus.append(Gpu(pci=f"0000:{0x80 + slot:02x}:00.0", name="simulated",
                    numa_node=1 - beside if far else beside, interconnect="nvlink",
                    nic=f"mlx5_{card}", nic_distance="SYS" if far else "PIX"))
  devices = tuple(Device(id=rank, kind="simulated", platform="gpu", process=process,
                         local_hardware_id=rank % fabric.per_node,
                         gpu=gpus[rank % fabric.per_node].pci)
                  for rank in ranks)
  return Locality(process=process, hostname=f"node{node}",
                  cpu=Cpu("simulated", "0-63", "0-63", ("0-31", "32-63")),
                  numa=(NumaNode(0, "0-31"), NumaNode(1, "32-63")), gpus=tuple(gpus), nics=nics,
                  devices=devices)


def _socket(card: int, cards: int) -> int:
  return 2 * card // cards if cards > 1 else 0


def quiet(job: JobSettings, fabric: Fabric) -> dict[str, Any]:
  """The document of `jaxpace bench`, of all-reduces over a job's ranks on the fabric without its
  slow paths."""
  healthy, ranks = dataclasses.replace(fabric, slow_paths={}), job.shape.ranks
  size = max(job.gradient_bytes / job.buckets, _LEAST)
  sizes = sorted({max(1.0, round(size / 4**i)) for i in range(_POINTS)})
  took = [schedules.load(schedules.rounds(job.algorithm, job.members, each, fabric.per_node),
                         healthy).seconds for each in sizes]
  a, b = alpha_beta.coefficients(alpha_beta.ALL_REDUCE, alpha_beta.RING, ranks)
  beta = max((took[-1] - took[0]) / (sizes[-1] - sizes[0]) / b, 0.0) if b else 0.0
  alpha = max((took[0] - b * sizes[0] * beta) / a, 0.0) if a else 0.0
  return {"schema": SCHEMA, "kind": SIMULATED, "levels": [
      {"level": "simulated fabric", "ranks": None, "measured": ranks,
       "collectives": {alpha_beta.ALL_REDUCE: {
           "algorithm": alpha_beta.RING, "alpha": alpha, "beta": beta, "points": [
               {"bytes": round(each), "seconds": value}
               for each, value in zip(sizes, took, strict=True)]}}}]}


def _busy(job: JobSettings) -> list[float]:
  """Of each process: s its connections are busy in a s of transfer; empty where none is.

  Of the rank whose messages take longest: the mean over a process's ranks would hide one slow card
  among many.
  """
  busy = (np.asarray(job.load.busy)[job.members].reshape(-1, job.shape.per_process)
          .max(axis=1) / max(job.load.seconds, 1e-30))
  return [float(f"{share:.6g}") for share in busy] if busy.any() else []


FLOOR_FILE = "fabric.json"
"""What collectives take on a quiet fabric, beside the run: for `--floor`."""
_NS = 1e9
_SAMPLE = 0.25
"""s of the run from one sample of the hosts to the next, about."""


class RunWriter:
  """Writes one job, part by part. Its methods may raise `OSError`."""

  def __init__(self, directory: str | pathlib.Path, job: JobSettings, scenario: Scenario,
               config: Mapping[str, Any]):
    """Makes the run directory, of a job of a scenario that were read from `config`;
    ForeignFileError, if it holds something else's run.json.

    A simulated run of the same config and seed gets the same id, so the same bytes. What another
    run left in the directory is moved to `.previous`, as a live recorder does.
    """
    self._path, self._job = pathlib.Path(directory), job
    plain = json.dumps(config, default=list)
    made_of = uuid.uuid5(uuid.NAMESPACE_OID, f"{job.name} {scenario.seed} {plain}")
    self._run = run = f"simulated-{made_of.hex[:12]}"
    rundir.prepare(self._path)
    rundir.set_aside(self._path, run)
    for table in schema.TABLES:  # the same run again: made anew
      for path in sorted((self._path / table).glob(f"{run}-*.parquet")):
        path.unlink()
    self._processes = np.arange(job.shape.ranks).reshape(-1, job.shape.per_process)
    self._stores = [{table: PartStore(self._path, table, run, p)
                     for table in ("steps", "collectives", "hosts")}
                    for p in range(len(self._processes))]
    self._busy = _busy(job)
    self._exit = np.int64(0)  # last exit so far, on the job's own clock
    self._step = 0
    self._sent = 0.0  # s of transfers so far
    self._sampled = 0  # steps from one sample of the hosts to the next; 0 before it is known
    rundir.write_json(self._path / rundir.RUN_FILE, self._info(run, scenario, json.loads(plain)))
    for process, (ranks, host) in enumerate(zip(self._processes, job.processes, strict=True)):
      rundir.write_json(self._path / "process" / f"{process}.json", {
          "schema_version": schema.SCHEMA_VERSION, "run": run, "attempt": 0, "process": process,
          "hostname": host, "pid": 0, "ranks": ranks.tolist(), "closed_cleanly": True})
      here = place(scenario.fabric, process, [job.members[rank] for rank in ranks])
      rundir.write_json(self._path / FOLDER / f"{process}.json", {"run": run, **to_plain(here)})
    if job.shape.ranks > 1 and self._owns(self._path / FLOOR_FILE):
      rundir.write_json(self._path / FLOOR_FILE, quiet(job, scenario.fabric))

  def write(self, steps: Steps,
            progress: Callable[[int, int], None] | None = None) -> None:
    """Appends steps, kept by rank, as a simulation with `by_rank` returns them; those a job never
    got to (NaN) are left out."""
    steps = cast(Steps, jax.tree.map(np.asarray, steps))
    count = int(np.isfinite(steps.step_time).sum())
    if not count:
      return
    steps = cast(Steps, jax.tree.map(lambda values: values[:count], steps))
    step_time = _ns(steps.step_time)
    # last exit of the step before
    base = self._exit + np.concatenate([[0], np.cumsum(step_time)[:-1]])
    enter = base[:, None, None] + _ns(steps.enter)
    leave = base[:, None] + _ns(steps.exit)
    job = self._job.job
    update = np.int64(round(float(job.update) * _NS))
    gap = _ns(steps.gap)
    start = base[:, None] + update + gap
    end = leave[:, -1:] + update + np.zeros_like(gap)
    compute = _ns(steps.compute)
    both = float(job.forward) + float(job.backward)
    forward = np.rint(compute * (float(job.forward) / both if both else 0.0)).astype(np.int64)
    first = np.zeros(gap.shape, bool)
    first[0] = self._step == 0
    number = np.arange(self._step, self._step + count, dtype=np.int64)
    rows = {
        "start_ns": start, "end_ns": end, "forward_ns": forward, "backward_ns": compute - forward,
        "sync_ns": (leave[:, None] - enter).sum(axis=2), "update_ns": np.full_like(gap, update),
        "gap_ns": np.ma.masked_array(gap, first), "delay_ns": _ns(steps.asked),
        "delay_applied_ns": _ns(steps.delay),
        **{f"{cause}_ns": _ns(values) for cause, values in sorted(steps.caused.items())},
        **{f"decision_{name}": values.astype(np.float32)
           for name, values in sorted(steps.info.items())}}
    for process, ranks in enumerate(self._processes):
      keys: dict[str, np.ndarray] = {
          "step": np.tile(number, len(ranks)), "rank": np.repeat(ranks.astype(np.int32), count),
          "process": np.full(count * len(ranks), process, np.int32),
          "attempt": np.zeros(count * len(ranks), np.int32)}
      store = self._stores[process]
      store["steps"].append({**keys,
                             **{name: values[:, ranks].T.reshape(-1)
                                for name, values in rows.items()}})
      store["collectives"].append(self._collectives(keys, enter[:, ranks], leave))
      if progress:
        progress(process + 1, len(self._processes))
    if self._busy:
      self._sample(steps, base + step_time)
    self._exit, self._step = np.int64(leave[-1, -1]), self._step + count

  def discard(self) -> None:
    """Takes everything back that was written, as far as that can be done: half of a run is of no
    use."""
    with contextlib.suppress(OSError):
      made = [self._path / rundir.RUN_FILE]
      made += [path for table in schema.TABLES
               for path in (self._path / table).glob(f"{self._run}-*")]
      made += [path for folder in ("process", FOLDER)
               for path in (self._path / folder).glob("*.json")]
      made += [self._path / FLOOR_FILE] if self._owns(self._path / FLOOR_FILE) else []
      for path in made:
        path.unlink(missing_ok=True)
      for folder in (*schema.TABLES, "process", FOLDER, "."):
        with contextlib.suppress(OSError):  # others' files keep it
          (self._path / folder).rmdir()

  @staticmethod
  def _owns(path: pathlib.Path) -> bool:
    """Whether a file is not there, or was written by a simulation."""
    return not path.exists() or (rundir.read_json(path) or {}).get("kind") == SIMULATED

  def _sample(self, steps: Steps, exits: np.ndarray) -> None:
    """Samples of the hosts: how long each process's connections have been busy, as the kernel
    counts it."""
    if not self._sampled:
      self._sampled = max(1, round(_SAMPLE / float(steps.step_time.mean())))
    sent = self._sent + np.cumsum(steps.transfers.sum(axis=1, dtype=np.float64))
    numbers = np.arange(self._step, self._step + len(exits))
    kept = (numbers + 1) % self._sampled == 0
    for process, store in enumerate(self._stores):
      first = [0] if self._step == 0 else []
      times = np.concatenate([np.asarray(first, np.int64), exits[kept]])
      busy = np.concatenate([np.asarray(first, np.float64), sent[kept]]) * self._busy[process]
      if len(times):
        store["hosts"].append({"time_ns": times, "process": np.full(len(times), process, np.int32),
                               "attempt": np.zeros(len(times), np.int32), "tcp_busy_ns": _ns(busy)})
    self._sent = float(sent[-1])

  def close(self) -> None:
    """Merges small parts."""
    for store in self._stores:
      for table in store.values():
        table.compact()

  def _collectives(self, keys: dict[str, np.ndarray], enter: np.ndarray,
                   leave: np.ndarray) -> dict[str, np.ndarray]:
    slots, ranks = enter.shape[2], enter.shape[1]
    columns = {name: np.tile(values, slots) for name, values in keys.items()}
    length = len(keys["step"])
    columns["collective"] = np.repeat(np.arange(slots, dtype=np.int32), length)
    columns["name"] = np.repeat(np.array(self._names()), length)
    columns["axis"] = np.full(slots * length, "data")
    columns["bytes"] = np.full(slots * length, self._bytes)
    # null where a rank was not waited for
    columns["enter_ns"] = enter.transpose(2, 1, 0).reshape(-1)
    columns["exit_ns"] = np.repeat(leave.T[:, None], ranks, axis=1).reshape(-1)
    return columns

  @property
  def _bytes(self) -> int:
    return round(self._job.gradient_bytes / self._job.buckets)

  def _names(self) -> list[str]:
    slots = self._job.buckets
    return ["psum" if slots == 1 else f"psum.{c}" for c in range(slots)]

  def _info(self, run: str, scenario: Scenario, config: dict[str, Any]) -> dict[str, Any]:
    job, ranks = self._job, self._job.shape.ranks
    collectives = [{"slot": c, "name": name, "primitives": ["psum"], "axis": "data",
                    "bytes": self._bytes, "operands": 1, "dtypes": ["float32"],
                    "phase": "backward"}
                   for c, name in enumerate(self._names())]
    return {
        "schema_version": schema.SCHEMA_VERSION, "run": run, "attempt": 0, "ranks": ranks,
        "processes": len(self._processes), "axis": "data", "clock": "simulated", "simulated": True,
        "job": job.name, "seed": scenario.seed,
        "pacer": job.pacer_text or None,
        "settings": {"max_delay": scenario.max_delay, "slots": job.buckets, "share": True,
                     "axis": ["data"], "mesh": {"data": ranks}},
        "plan": {"axis": "data", "ranks": ranks, "clock": "simulated", "share": True,
                 "marks": [], "carrier": job.buckets - 1,
                 "collectives": collectives, "notices": []},
        "config": config}


def _ns(seconds: np.ndarray) -> np.ndarray:
  return np.rint(np.asarray(seconds, np.float64) * _NS).astype(np.int64)
