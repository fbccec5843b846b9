"""Measures what `jaxpace watch` takes of a core while a run grows.

    python -m experiments.measure.watch_cost --output=docs/measurements/watch_cost.json

plays a recorded job in real time: every process writes a part of each table and its own file every
2 s, as recorders do, each process at a time of its own, and merges them. `jaxpace watch` shows it
on a pseudo-terminal of 120 x 40. Its processor time (user and system, of all its threads) is taken
over the time after the start.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import pathlib
import platform
import sys
import tempfile
import time
from typing import Any

import numpy as np
import psutil
from absl import app, flags

from experiments.lib.terminal import Terminal
from jaxpace.testing import made_up_runs
from jaxpace.testing.made_up_runs import MadeUpJob
from jaxpace.trace.parts import PartStore

_RANKS = flags.DEFINE_integer("ranks", 64, "Ranks of the job.", lower_bound=1)
_PROCESSES = flags.DEFINE_list("processes", ["8", "64"],
                               "Processes of the job; a measurement each.")
_SECONDS = flags.DEFINE_float("seconds", 60.0, "Seconds measured, after 10 s of start.",
                              lower_bound=5.0)
_STEP = flags.DEFINE_float("step", 0.05, "Seconds a step takes.", lower_bound=1e-3)
_EVERY = flags.DEFINE_float("every", 1.0, "Seconds between two looks.", lower_bound=0.1)
_OUTPUT = flags.DEFINE_string("output", None,
                              "Where the numbers go; default is standard output only.")

_FLUSH = 2.0
_START = 10.0
_TARGET = 0.02


def grow(directory: str, ranks: int, processes: int, step: float, seconds: float) -> None:
  """Writes the run in real time for so many seconds."""
  path = pathlib.Path(directory)
  number = round(_FLUSH / step)
  job = MadeUpJob(ranks=ranks, steps=number, processes=processes, hosts=processes,
                  forward=0.3 * step, backward=0.5 * step,
                  update=0.02 * step, gap=0.02 * step, transfer=0.1 * step, noise=0.02,
                  transfer_noise=0.1, host_columns=True)
  truth = made_up_runs.simulate(job)
  length = int(truth.end.max())
  stores: dict[tuple[str, int], PartStore] = {}
  begin = time.monotonic()
  due = [(begin + _FLUSH * (1 + process / processes), process, 0) for process in range(processes)]
  owned = np.array_split(np.arange(ranks), processes)
  while due and due[0][0] < begin + seconds:
    when, process, turn = due.pop(0)
    time.sleep(max(when - time.monotonic(), 0.0))
    rows = made_up_runs.rows(truth, owned[process], slice(0, number), process=process,
                             first_step=turn * number, origin=10**15 + turn * length)
    for table, columns in rows.items():
      if (table, process) not in stores:
        stores[table, process] = PartStore(path, table, "growing", process)
      stores[table, process].append(columns)
    info = path / "process" / f"{process}.json"
    values = json.loads(info.read_text()) | {"closed_cleanly": False, "wall_ns": time.time_ns()}
    written = info.with_name(f".{info.name}.tmp")
    written.write_text(json.dumps(values))
    os.replace(written, info)
    due.append((when + _FLUSH, process, turn + 1))


def measure(ranks: int, processes: int, step: float, seconds: float,
            every: float) -> dict[str, Any]:
  """Measures one job."""
  with tempfile.TemporaryDirectory() as folder:
    path = pathlib.Path(folder) / "run"
    made_up_runs.write(path, MadeUpJob(ranks=ranks, steps=2, processes=processes, hosts=processes),
                       run="growing")
    for part in path.rglob("*.parquet"):
      part.unlink()
    for file in (path / "process").iterdir():
      file.write_text(json.dumps(json.loads(file.read_text()) | {"closed_cleanly": False}))
    context = multiprocessing.get_context("spawn")
    job = context.Process(target=grow, args=(str(path), ranks, processes, step,
                                             _START + seconds + 5), daemon=True)
    job.start()
    command = [sys.executable, "-m", "jaxpace.cli", "watch", str(path), "--every", str(every)]
    try:
      with Terminal(command, columns=120, lines=40) as watch:
        time.sleep(_START)
        process = psutil.Process(watch.process.pid)
        before, begin, at = process.cpu_times(), time.monotonic(), len(watch.shown)
        time.sleep(seconds)
        after, wall = process.cpu_times(), time.monotonic() - begin
        memory = process.memory_info().rss
        if watch.process.poll() is not None or b"Where the step goes" not in watch.shown[at:]:
          raise RuntimeError(f"The view shows no run: {bytes(watch.shown[-2000:])!r}")
    finally:
      job.terminate()
      job.join()
  user, system = after.user - before.user, after.system - before.system
  return {"ranks": ranks, "processes": processes, "step_s": step, "every_s": every,
          "seconds": round(wall, 2), "user_s": round(user, 2), "system_s": round(system, 2),
          "core_share": (user + system) / wall, "resident_mib": round(memory / 2**20, 1)}


def main(_: list[str]) -> None:
  load = os.getloadavg()[0]
  runs = [measure(_RANKS.value, int(processes), _STEP.value, _SECONDS.value, _EVERY.value)
          for processes in _PROCESSES.value]
  result = {"command": " ".join(["python -m experiments.measure.watch_cost", *sys.argv[1:]]),
            "load_at_start": round(load, 2),
            "cores": os.cpu_count(), "platform": platform.platform(),
            "python": platform.python_version(), "target_core_share": _TARGET, "runs": runs}
  text = json.dumps(result, indent=1) + "\n"
  print(text, end="")
  if _OUTPUT.value:
    pathlib.Path(_OUTPUT.value).write_text(text)


if __name__ == "__main__":
  app.run(main)
