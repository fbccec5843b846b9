"""Measures `jaxpace report` on a large observed run: wall time and peak memory, interpreter start
included.

    python -m experiments.measure.observed_speed           # a few minutes, and some 2 GB of disk

writes the run as a recorder would (sums of every step; collectives of the drawn steps and of the
first 64), times the command in a process of its own, and writes the numbers. Only `--patterns`
steps are played, with one late rank; all others repeat them.
"""

from __future__ import annotations

import pathlib
import shutil
import tempfile
from typing import Any

import numpy as np
from absl import app, flags

from experiments.lib import child
from jaxpace.core.detail import every, is_detailed
from jaxpace.testing.made_up_observed import (
  LayerFault,
  ObservedJob,
  information,
  rows,
  simulate,
  write_process_file,
)
from jaxpace.trace import rundir
from jaxpace.trace.marks.detail import FIRST
from jaxpace.trace.parts import PartStore

LATE, LAYER = 17, 23
_TARGET = {"seconds": 60.0, "gibibytes": 4.0}
_RUN = "observed"


def make(path: pathlib.Path, job: ObservedJob, steps: int) -> dict[str, int]:
  """Writes a run of `steps` steps that repeat those of the job; returns the rows of each table."""
  truth = simulate(job)
  stretch = every(len(truth.places), job.ranks)
  rundir.write_json(path / "run.json", information(job, truth.places, _RUN, stretch))
  numbers = np.arange(steps)
  pattern = numbers % job.steps
  took = (truth.busy + truth.wait).sum(axis=0)[0]
  begin = np.concatenate([[0.0], np.cumsum(took[pattern])[:-1]])
  full = np.flatnonzero(is_detailed(numbers, stretch) | (numbers < FIRST))
  shift = np.rint((begin - truth.begin[0, pattern]) * 1e9).astype(np.int64)
  written = {"steps": 0, "collectives": 0}
  for process, ranks in enumerate(np.array_split(np.arange(job.ranks), job.processes)):
    write_process_file(path, job, _RUN, process, ranks)
    made = rows(job, truth, ranks, np.arange(job.steps), np.arange(job.steps), process=process,
                origin=10**15 + 7 * 10**14 * process)
    for table, which in (("steps", numbers), ("collectives", full)):
      each = len(truth.places) if table == "collectives" else 1
      # Rows stand by rank, step and, in `collectives`, slot.
      step = np.arange(len(ranks))[:, None] * job.steps + pattern[which]
      at = (step[..., None] * each + np.arange(each)).reshape(-1)
      columns: dict[str, Any] = {name: values[at] for name, values in made[table].items()
                                 if name not in ("name", "axis")}
      columns["step"] = np.tile(np.repeat(which, each), len(ranks))
      for name in ("start_ns", "end_ns", "last_exit_ns", "enter_ns", "exit_ns"):
        if name in columns:
          columns[name] = columns[name] + np.tile(np.repeat(shift[which], each), len(ranks))
      store = PartStore(path, table, _RUN, process)
      for first in range(0, len(at), 1_000_000):
        store.append({name: values[first:first + 1_000_000] for name, values in columns.items()})
      written[table] += len(at)
    if (process + 1) % 16 == 0:
      print(f"  process {process + 1} of {job.processes}", flush=True)
  return written


def main(argv: list[str]) -> None:
  """Makes the run, and the report on it."""
  if len(argv) > 1:
    raise app.UsageError(f"Unknown arguments: {' '.join(argv[1:])}")
  args = flags.FLAGS
  directory = pathlib.Path(args.keep or tempfile.mkdtemp(prefix="observed-speed-"))
  job = ObservedJob(data=args.data, fsdp=args.fsdp, tensor=args.tensor, layers=args.layers,
                    steps=args.patterns, processes=args.processes, hosts=args.processes, noise=0.01,
                    transfer_noise=0.1, uneven=0.2,
                    faults=(LayerFault("late", 8e-3, (LATE,), layer=min(LAYER, args.layers - 1)),))
  try:
    written = None
    if not (directory / "run.json").exists():
      print(f"Writing {job.ranks:,} ranks x {args.steps:,} steps to {directory} ...", flush=True)
      directory.mkdir(parents=True, exist_ok=True)
      written = make(directory, job, args.steps)
    size = sum(f.stat().st_size for f in directory.rglob("*.parquet")) / 2**20
    runs, report = child.reports(directory, args.repeats, args.cores)
    blamed = [r for f in report["findings"] for r in f["ranks"]]
    evidence = " ".join(s for f in report["findings"] for s in f["evidence"])
    options = [args[name] for name in ("data", "fsdp", "tensor", "layers", "steps", "processes",
                                       "patterns", "repeats", "cores")]
    result = {
        **child.circumstances("experiments.measure.observed_speed", options,
                              "jaxpace report RUN --json FILE in a new process, interpreter "
                              "start included"),
        "ranks": job.ranks, "steps": args.steps, "collectives": len(report["collectives"]),
        "rows": written, "distinct_steps": args.patterns, "steps_in_full": report["steps_in_full"],
        "run_mib": round(size, 1), "cores": args.cores, "target": _TARGET, **child.summary(runs),
        "late_rank_named": blamed == [LATE],
        "layer_named": f"turn {min(LAYER, args.layers - 1)} of {args.layers}" in evidence,
        "share_sum": sum(report["shares"].values())}
    result["within_target"] = (result["wall_s"]["worst"] <= _TARGET["seconds"]
                               and result["peak_gib"]["worst"] <= _TARGET["gibibytes"])
    child.write(result, args.output)
  finally:
    if not args.keep:
      shutil.rmtree(directory, ignore_errors=True)


if __name__ == "__main__":
  for name, value in {"data": 16, "fsdp": 8, "tensor": 8, "layers": 40, "steps": 10_000,
                      "processes": 128, "patterns": 20, "repeats": 3, "cores": 2}.items():
    flags.DEFINE_integer(name, value, f"{name.capitalize()}.", lower_bound=1)
  flags.DEFINE_string("keep", None,
                      "Write the run here and keep it, or take the one that is there.")
  flags.DEFINE_string("output", "docs/measurements/observed_speed.json", "Where the numbers go.")
  app.run(main)
