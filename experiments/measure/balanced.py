"""One rank slower for real: what sharing work by speed recovers, beside even counts and counts chosen by hand.

    python -m experiments.measure.balanced
    python -m experiments.measure.balanced --rounds=2 --learn=40 --jobs=quota-16       # to try it

Real processes over gloo, a core each; the last one has a CPU quota (control group), or a busy neighbour pinned to its
core; as a third, four processes whose micro-batches are sleeps. Stage after stage it is 1 to 3 times slower. In each
stage counts first follow by themselves; then blocks with even counts, with even counts again (A/A), shared by speed,
with the best fixed counts chosen from measured speeds, and without the slow rank take turns in random order, in one
run. Writes docs/measurements/balanced.json and .md. Nothing else should run meanwhile. The quota takes the right to
make control groups; jobs that can't be run are named in the file.
"""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys
import tempfile
from typing import Any

import numpy as np
from absl import app, flags

import jaxpace
from experiments.lib import measured
from experiments.lib.paired import estimate
from experiments.measure import balanced_worker
from experiments.measure.balanced_worker import AGAIN, CHOSEN, EVEN, SHARED, WITHOUT, Setup
from jaxpace.coordination.apportion import even

STAGES = (1.0, 1.2, 1.5, 2.0, 3.0, 1.0)
JOBS = {  # name: kind, processes, micro-batches, stages
    "quota-16": ("quota", 2, 16, STAGES), "quota-32": ("quota", 2, 32, STAGES),
    "neighbour-32": ("neighbour", 2, 32, (1.0, 2.0, 1.0)),
    "sleep-16": ("sleep", 4, 16, STAGES), "sleep-32": ("sleep", 4, 32, STAGES),
}


def launch(name: str, learn: int, block: int, rounds: int) -> list[dict[str, Any]]:
  """Runs one job; returns its stages.

  Raises:
    RuntimeError: a process failed; the end of what was said is in the message.
  """
  kind, processes, total, slow = JOBS[name]
  setup = Setup(kind, total, slow, learn, block, rounds)
  with tempfile.TemporaryDirectory() as root:
    out = pathlib.Path(root) / "stages.json"
    command = [sys.executable, "-m", "jaxpace.cli", "launch", "--nproc", str(processes), "--logs", f"{root}/logs", "--",
               sys.executable, "-m", "experiments.measure.balanced", f"--worker={out}",
               f"--setup={json.dumps(setup._asdict())}"]
    flags_of_xla = f"{os.environ.get('XLA_FLAGS', '')} --xla_cpu_multi_thread_eigen=false".strip()
    ended = subprocess.run(command, env=os.environ | {"XLA_FLAGS": flags_of_xla, "JAX_PLATFORMS": "cpu"},
                           stdout=sys.stderr, stderr=subprocess.PIPE, text=True)
    if ended.returncode:
      raise RuntimeError(f"{name}: {ended.stderr[-2000:]}")
    stages: list[dict[str, Any]] = json.loads(out.read_text())
    return stages


def judge(stage: dict[str, Any]) -> dict[str, Any]:
  """What a stage has shown."""
  seconds = {arm: np.asarray(values) for arm, values in stage["seconds"].items()}
  each, chosen = np.asarray(stage["each"]), np.asarray(stage["chosen"])
  equal = even(int(chosen.sum()), len(chosen))

  def ends(counts: Any) -> float:
    return float((np.asarray(counts) * each).max())

  lost = ends(equal) - ends(chosen)
  result: dict[str, Any] = {
      "slow": stage["slow"], "counts": stage["counts"], "chosen": stage["chosen"], "rounds": len(seconds[EVEN]),
      "step_ms": {arm: estimate(values * 1e3).to_json() for arm, values in seconds.items()},
      "change_percent": {arm: estimate((values / seconds[EVEN] - 1) * 100).to_json()
                         for arm, values in seconds.items() if arm != EVEN}}
  if stage["slow"] > 1 and lost > 0.02 * ends(equal):
    saved = seconds[EVEN].mean() - seconds[CHOSEN].mean()
    result["recovered_percent"] = float(f"{100 * (seconds[EVEN].mean() - seconds[SHARED].mean()) / saved:.4g}")
    well = [ends(equal) - ends(counts) >= 0.85 * lost for counts in stage["history"]]
    wrong = [k for k, good in enumerate(well) if not good]
    result["followed_after"] = (wrong[-1] + 1 if wrong else 0) if well[-1] else None
  return result


def lines(figures: dict[str, Any]) -> list[str]:
  """The figures as a page."""
  page = measured.introduction("One rank slower for real: work shared by speed", figures)
  page += ["Step: mean of a block, process 0. Change: against even counts in the same round. Recovered: of what the "
           "best fixed counts save, in percent. Followed: steps after which the counts save 85 % of it for good, of "
           "those at the beginning of the stage. "
           + measured.about_intervals(figures.get("intervals"), f"{figures['rounds']} rounds"), ""]
  for name, job in figures["jobs"].items():
    kind, processes, total, _ = JOBS[name]
    page += [f"## {kind}: {processes} processes, {total} micro-batches", ""]
    if "failed" in job:
      page += [f"Could not be run: {job['failed'].strip().splitlines()[-1][:300]}", ""]
      continue
    rows = [[f"{stage['slow']:g}", _interval(stage["step_ms"][EVEN]), *(_interval(stage["change_percent"][arm])
             for arm in (AGAIN, SHARED, CHOSEN, WITHOUT)), stage.get("recovered_percent"), stage.get("followed_after"),
             "/".join(map(str, stage["counts"])), "/".join(map(str, stage["chosen"]))] for stage in job["stages"]]
    page += measured.table(["slower", "even, ms", "even again, %", "shared by speed, %", "best fixed, %",
                            "without it, %", "recovered, %", "followed", "counts", "best fixed counts"], rows)
  return page


def _interval(value: list[float]) -> str:
  return f"{value[0]:.1f} [{value[1]:.1f}, {value[2]:.1f}]"


def define_flags() -> None:
  """Defines this program's flags; not when it is imported, since other programs have flags of the same names."""
  flags.DEFINE_list("jobs", list(JOBS), f"Which of {', '.join(JOBS)}.")
  flags.DEFINE_integer("rounds", 6, "Rounds of one block of each arm, in each stage.", lower_bound=2)
  flags.DEFINE_integer("block", 12, "Steps of a block.", lower_bound=6)
  flags.DEFINE_integer("learn", 100, "Steps of sharing by speed at the beginning of each stage.", lower_bound=1)
  flags.DEFINE_string("out", "docs/measurements/balanced.json", "File the figures are written to.")
  flags.DEFINE_string("worker", "", "Of the program's own processes: the file to write to.")
  flags.DEFINE_string("setup", "", "Of the program's own processes.")


def main(_: list[str]) -> None:
  its = flags.FLAGS
  if its.worker:
    jaxpace.distributed.initialize()
    given = json.loads(its.setup)
    balanced_worker.work(pathlib.Path(its.worker), Setup(**given | {"slow": tuple(given["slow"])}))
    return
  if unknown := [name for name in its.jobs if name not in JOBS]:
    raise app.UsageError(f"--jobs={','.join(unknown)}: there are {', '.join(JOBS)}.")
  figures: dict[str, Any] = measured.circumstances("experiments.measure.balanced") | {"rounds": its.rounds, "jobs": {}}
  for name in its.jobs:
    try:
      figures["jobs"][name] = {"stages": [judge(stage) for stage in launch(name, its.learn, its.block, its.rounds)]}
    except RuntimeError as error:
      figures["jobs"][name] = {"failed": str(error)}
  measured.write(figures, lines(figures), pathlib.Path(its.out))


if __name__ == "__main__":
  define_flags()
  app.run(main)
