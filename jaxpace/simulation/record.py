"""Writes a simulated job as a recorded run: the same tables, so that report, what-if, replay and
the rest work.

Beside the tables it writes the processes' places, as `jaxpace doctor` would read them (a GPU hangs
next to its network card, or, where its path is slow, on the other socket), and the floor that
`jaxpace bench` would measure on that fabric were it healthy and quiet.
"""

from __future__ import annotations

import contextlib
import dataclasses
import pathlib
import uuid
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, cast

import jax
import numpy as np

from jaxpace.costs import alpha_beta
from jaxpace.costs.fabric_file import SCHEMA
from jaxpace.hosts.locality.job import FOLDER
from jaxpace.hosts.locality.types import Cpu, Device, Gpu, Locality, Nic, NumaNode
from jaxpace.record.parts import PartStore
from jaxpace.runs import rundir, schema
from jaxpace.simulation.fabric import Fabric
from jaxpace.simulation.job import Steps

SIMULATED = "simulated"
"""Kind of the document of a floor that nobody measured."""
_POINTS = 4
_LEAST = 1024.0


def place(fabric: Fabric, process: int, ranks: Sequence[int]) -> Locality:
  """Where a process runs.

  Args:
    fabric: simulated.
    process: its number in the job.
    ranks: of the fabric that are its own, all of one node.
  """
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


def quiet(fabric: Fabric, seconds: Callable[[Fabric, float], float], ranks: int,
          size: float) -> dict[str, Any]:
  """The document of `jaxpace bench`, of all-reduces over a job's ranks on the fabric without its
  slow paths.

  Args:
    fabric: simulated.
    seconds: of an all-reduce of so many bytes on a fabric.
    ranks: of the job.
    size: bytes of its largest all-reduce.
  """
  healthy = dataclasses.replace(fabric, slow_paths={})
  sizes = sorted({max(1.0, round(max(size, _LEAST) / 4**i)) for i in range(_POINTS)})
  took = [seconds(healthy, each) for each in sizes]
  a, b = alpha_beta.coefficients(alpha_beta.ALL_REDUCE, alpha_beta.RING, ranks)
  beta = max((took[-1] - took[0]) / (sizes[-1] - sizes[0]) / b, 0.0) if b else 0.0
  alpha = max((took[0] - b * sizes[0] * beta) / a, 0.0) if a else 0.0
  return {"schema": SCHEMA, "kind": SIMULATED, "levels": [
      {"level": "simulated fabric", "ranks": None, "measured": ranks,
       "collectives": {alpha_beta.ALL_REDUCE: {
           "algorithm": alpha_beta.RING, "alpha": alpha, "beta": beta, "points": [
               {"bytes": round(each), "seconds": value}
               for each, value in zip(sizes, took, strict=True)]}}}]}


FLOOR_FILE = "fabric.json"
"""What collectives take on a quiet fabric, beside the run: for `--floor` and `--fabric`."""
_NS = 1e9
_SAMPLE = 0.25
"""s of the run from one sample of the hosts to the next, about."""


class JobRecord(NamedTuple):
  """What of a job belongs in `run.json`."""

  name: str
  hosts: list[str]  # of each process; ranks are dealt to them in blocks
  ranks: int
  bytes: list[int]  # of each collective
  forward: float  # s, mean; with `backward`, how compute is split into the two
  backward: float  # s, mean
  update: float  # s
  max_delay: float
  pacer: str
  config: dict[str, Any]
  notices: list[str] = []  # noqa: RUF012  # what a reader of the run must know
  # of each process, as `jaxpace.hosts.locality` writes them
  places: list[dict[str, Any]] = []  # noqa: RUF012
  # what collectives take on a quiet fabric, as `jaxpace bench` writes it
  floor: dict[str, Any] | None = None
  # of each process: s its connections are busy in a s of transfer; empty: unknown
  busy: list[float] = []  # noqa: RUF012


class RunWriter:
  """Writes one job, part by part. Its methods may raise `OSError`."""

  def __init__(self, directory: str | pathlib.Path, recording: JobRecord, seed: int):
    """Makes the run directory.

    A simulated run of the same config and seed gets the same id, so the same bytes. What another
    run left in the directory is moved to `.previous`, as a live recorder does.

    Raises:
      rundir.ForeignDirectoryError: the directory holds something else's run.json.
      OSError: it can't be written.
    """
    self._path, self._made = pathlib.Path(directory), recording
    made_of = uuid.uuid5(uuid.NAMESPACE_OID, repr((recording, seed)))
    self._run = run = f"simulated-{made_of.hex[:12]}"
    rundir.prepare(self._path)
    rundir.set_aside(self._path, run)
    for table in schema.TABLES:  # the same run again: made anew
      for path in sorted((self._path / table).glob(f"{run}-*.parquet")):
        path.unlink()
    self._processes = np.array_split(np.arange(recording.ranks), len(recording.hosts))
    self._stores = [{table: PartStore(self._path, table, run, p)
                     for table in ("steps", "collectives", "hosts")}
                    for p in range(len(recording.hosts))]
    self._exit = np.int64(0)  # last exit so far, on the job's own clock
    self._end = np.int64(-1)  # end of the last step; negative before the first
    self._step = 0
    self._sent = 0.0  # s of transfers so far
    self._sampled = 0  # steps from one sample of the hosts to the next; 0 before it is known
    rundir.write_json(self._path / rundir.RUN_FILE, self._info(run, seed))
    for process, ranks in enumerate(self._processes):
      rundir.write_json(self._path / "process" / f"{process}.json", {
          "schema_version": schema.SCHEMA_VERSION, "run": run, "attempt": 0, "process": process,
          "hostname": recording.hosts[process], "pid": 0, "ranks": ranks.tolist(),
          "closed_cleanly": True})
    for process, place in enumerate(recording.places):
      rundir.write_json(self._path / FOLDER / f"{process}.json", {"run": run, **place})
    if recording.floor is not None and self._owns(self._path / FLOOR_FILE):
      rundir.write_json(self._path / FLOOR_FILE, recording.floor)

  def write(self, steps: Steps,
            progress: Callable[[int, int], None] | None = None) -> None:
    """Appends steps, kept by rank; those a job never got to (NaN) are left out.

    Args:
      steps: as a simulation with `by_rank` returns them.
      progress: called with the processes written and their number.
    """
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
    update = np.int64(round(self._made.update * _NS))
    gap = _ns(steps.gap)
    start = base[:, None] + update + gap
    end = leave[:, -1:] + update + np.zeros_like(gap)
    compute = _ns(steps.compute)
    both = self._made.forward + self._made.backward
    forward = np.rint(compute * (self._made.forward / both if both else 0.0)).astype(np.int64)
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
    if self._made.busy:
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
      busy = np.concatenate([np.asarray(first, np.float64), sent[kept]]) * self._made.busy[process]
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
    columns["bytes"] = np.repeat(np.asarray(self._made.bytes, np.int64), length)
    # null where a rank was not waited for
    columns["enter_ns"] = enter.transpose(2, 1, 0).reshape(-1)
    columns["exit_ns"] = np.repeat(leave.T[:, None], ranks, axis=1).reshape(-1)
    return columns

  def _names(self) -> list[str]:
    slots = len(self._made.bytes)
    return ["psum" if slots == 1 else f"psum.{c}" for c in range(slots)]

  def _info(self, run: str, seed: int) -> dict[str, Any]:
    made = self._made
    collectives = [{"slot": c, "name": name, "primitives": ["psum"], "axis": "data",
                    "bytes": made.bytes[c], "operands": 1, "dtypes": ["float32"],
                    "phase": "backward"}
                   for c, name in enumerate(self._names())]
    return {
        "schema_version": schema.SCHEMA_VERSION, "run": run, "attempt": 0, "ranks": made.ranks,
        "processes": len(made.hosts), "axis": "data", "clock": "simulated", "simulated": True,
        "job": made.name, "seed": seed,
        "pacer": made.pacer or None,
        "settings": {"max_delay": made.max_delay, "slots": len(made.bytes), "share": True,
                     "axis": ["data"], "mesh": {"data": made.ranks}},
        "plan": {"axis": "data", "ranks": made.ranks, "clock": "simulated", "share": True,
                 "marks": [], "carrier": len(made.bytes) - 1,
                 "collectives": collectives, "notices": made.notices},
        "config": made.config}


def _ns(seconds: np.ndarray) -> np.ndarray:
  return np.rint(np.asarray(seconds, np.float64) * _NS).astype(np.int64)
