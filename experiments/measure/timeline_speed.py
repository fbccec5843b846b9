"""Measures how long a timeline takes: `jaxpace report RUN --steps A:B --perfetto FILE`, interpreter
start included.

    python -m experiments.measure.timeline_speed

writes a synthetic run with late ranks, pauses and contention, makes its report with a timeline and
without in processes of their own, and writes the numbers.
"""

from __future__ import annotations

import pathlib
import statistics
import subprocess
import sys
import tempfile
import time

from absl import app, flags

from experiments.lib import measured
from jaxpace.testing import made_up_runs
from jaxpace.testing.made_up_faults import Fault

_TARGET_SECONDS = 5.0
_FAULTS = (Fault("pause", 30e-3, (0,), probability=0.1, mechanism="gc"),
           Fault("contention", 5e-3, begin=0.5))


def define_flags() -> None:
  """Defines this program's flags; not when it is imported, since other programs have flags of the
  same names."""
  flags.DEFINE_integer("ranks", 64, "Ranks of the synthetic run.", lower_bound=2)
  flags.DEFINE_integer("steps", 2000, "Steps of the synthetic run.", lower_bound=100)
  flags.DEFINE_integer("shown", 200, "Steps of the timeline.", lower_bound=1)
  flags.DEFINE_integer("repeats", 5, "Times each file is made.", lower_bound=1)
  flags.DEFINE_string("out", "docs/measurements/timeline_speed.json", "Where the figures go.")


def main(argv: list[str]) -> None:
  if len(argv) > 1:
    raise app.UsageError(f"Unknown arguments: {' '.join(argv[1:])}")
  given = flags.FLAGS
  figures = measured.circumstances("experiments.measure.timeline_speed")
  with tempfile.TemporaryDirectory(prefix="timeline-speed-") as folder:
    run, out = pathlib.Path(folder) / "run", pathlib.Path(folder) / "timeline"
    made_up_runs.write(run, made_up_runs.MadeUpJob(ranks=given.ranks, steps=given.steps,
                                                   processes=8, hosts=8, noise=0.05,
                                                   late={given.ranks // 4: 5e-3}, collectives=2,
                                                   host_columns=True, faults=_FAULTS))
    first = given.steps // 2
    arms: dict[str, list[str]] = {"no timeline": [], "--perfetto": ["--perfetto", str(out)],
                                  "--chrome": ["--chrome", str(out)]}
    rows: dict[str, dict[str, float | None]] = {}
    worst = 0.0
    for name, options in arms.items():
      seconds = [_run(run, first, first + given.shown, options) for _ in range(given.repeats)]
      rows[name] = {"median_s": statistics.median(seconds), "worst_s": max(seconds),
                    "megabytes": out.stat().st_size / 1e6 if options else None}
      print(f"{name:<12} {rows[name]}", flush=True)
      worst = max(worst, *seconds)
  figures |= {"ranks": given.ranks, "steps": given.steps, "shown": given.shown, "rows": rows,
              "target_s": _TARGET_SECONDS, "within_target": worst <= _TARGET_SECONDS}
  lines = measured.introduction("How long a timeline takes", figures)
  lines += [f"`jaxpace report RUN --steps {first}:{first + given.shown}` in a new process, of a "
            f"run of {given.ranks} ranks x {given.steps:,} steps; the report of these steps is "
            f"made beside the timeline. At most {_TARGET_SECONDS:g} s are wanted.", ""]
  lines += measured.table(["with", "median, s", "longest, s", "megabytes"],
                          [[name, row["median_s"], row["worst_s"], row["megabytes"]]
                           for name, row in rows.items()])
  measured.write(figures, lines, pathlib.Path(given.out))


def _run(run: pathlib.Path, first: int, last: int, options: list[str]) -> float:
  command = [sys.executable, "-m", "jaxpace.cli", "report", str(run), "--steps", f"{first}:{last}",
             *options]
  begin = time.perf_counter()
  subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
                 cwd=pathlib.Path(__file__).parents[2])
  return time.perf_counter() - begin


if __name__ == "__main__":
  define_flags()
  app.run(main)
