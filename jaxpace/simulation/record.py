"""Writes a simulated job as a recorded run: the same tables, so that report, what-if, replay and
the rest work."""

from __future__ import annotations

import contextlib
import pathlib
import uuid
from collections.abc import Callable
from typing import Any, NamedTuple, cast

import jax
import numpy as np

from jaxpace.hosts.locality.job import FOLDER
from jaxpace.record.parts import PartStore
from jaxpace.runs import rundir, schema
from jaxpace.simulation.job import Steps
from jaxpace.simulation.surroundings import SIMULATED

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
