"""The demo: four processes train a CNN, one of them late on purpose, and jaxpace says which and by
how much.

    python -m experiments.examples.demo --workdir=runs/demo
    python -m experiments.examples.demo --workdir=runs/healthy --late_ms=0
"""

from __future__ import annotations

import json
import os
import pathlib
import shutil
import sys
import time
from typing import Any

from absl import app, flags

from jaxpace.cli.main import main as jaxpace_command

_WORKDIR = flags.DEFINE_string("workdir", "runs/demo",
                               "Directory of the run, its logs and its report.")
_NPROC = flags.DEFINE_integer("nproc", 4, "Processes, one rank each.", lower_bound=2)
_STEPS = flags.DEFINE_integer("steps", None, "Steps to train instead of the config's.",
                              lower_bound=20)
_LATE_RANK = flags.DEFINE_integer("late_rank", 2, "Rank made late on purpose.", lower_bound=0)
_LATE_MS = flags.DEFINE_float("late_ms", 15.0,
                              "By how many milliseconds a step; 0 for a healthy job.",
                              lower_bound=0)
_MIN_ACCURACY = flags.DEFINE_float("min_accuracy", 0.95,
                                   "Held-out accuracy below which the demo fails.", lower_bound=0,
                                   upper_bound=1)

CONFIG = pathlib.Path(__file__).parents[2] / "configs" / "digits.py"
STRAGGLER = "persistent_straggler"
TURNS = 0.1
"""Lateness, as a share of the mean step, that four processes on two cores really have: they take
turns at the cores, and one that is always woken last is a little late in every step. More than that
in a healthy job is a false alarm."""


def worker_command(workdir: pathlib.Path) -> list[str]:
  """Returns the command of every process, from the flags."""
  command = [sys.executable, "-m", "experiments.examples.digits.main", f"--config={CONFIG}",
             f"--workdir={workdir}", f"--late_rank={_LATE_RANK.value}",
             f"--late_ms={_LATE_MS.value}"]
  return command + ([f"--config.steps={_STEPS.value}"] if _STEPS.value else [])


def found_late(report: dict[str, Any]) -> dict[int, float]:
  """Returns the ranks that a report calls late for good, latest first, and their lateness in
  seconds."""
  ranks = [rank for finding in report["findings"] if finding["mode"] == STRAGGLER
           for rank in finding["ranks"]]
  lateness = {row["rank"]: row["lateness"] for row in report["per_rank"]}
  return {rank: lateness[rank] for rank in sorted(ranks, key=lambda rank: -lateness[rank])}


def judge(report: dict[str, Any], accuracy: float, late_rank: int | None, late_s: float,
          min_accuracy: float
          ) -> tuple[str, list[str]]:
  """Compares a report with the truth that only the demo knows.

  Args:
    report: the JSON report, read.
    accuracy: of the trained model on held-out images, 0 to 1.
    late_rank: rank made late on purpose, or None.
    late_s: by how many seconds per step.
    min_accuracy: accuracy that the training must reach.

  Returns:
    One line that puts the truth beside what was found, and what is wrong, nothing if all is well.
  """
  found = found_late(report)
  injected = "nobody" if late_rank is None else f"rank {late_rank}, {1e3 * late_s:.1f} ms"
  named = ("; ".join(f"rank {rank}, {1e3 * lateness:.1f} ms" for rank, lateness in found.items())
           or "nobody")
  wrong = []
  if accuracy < min_accuracy:
    wrong.append(f"the held-out accuracy is {accuracy:.1%}, below {min_accuracy:.0%}")
  worst = max(found.values(), default=0.0) / report["step_time"]["mean"]
  if late_rank is None and worst > TURNS:
    wrong.append(f"nobody was made late, yet the report finds rank {next(iter(found))} late by "
                 f"{worst:.0%} of the step: is there other load on this machine?")
  if late_rank is not None and next(iter(found), None) != late_rank:
    wrong.append(f"rank {late_rank} was made late, but the report does not name it as the latest")
  return f"late: injected: {injected}; found: {named}", wrong


def main(argv: list[str]) -> None:
  """Trains, reports, and compares the report with the truth."""
  if len(argv) > 1:
    raise app.UsageError(
        f"What is {argv[1]!r}? All arguments are flags: --workdir=DIR, --late_ms=15, ...")
  late = _LATE_MS.value > 0
  if late and _LATE_RANK.value >= _NPROC.value:
    raise app.UsageError(f"--late_rank={_LATE_RANK.value}, but the ranks of {_NPROC.value} "
                         f"processes are 0 to {_NPROC.value - 1}: choose one of them, or a "
                         "larger --nproc.")
  began = time.monotonic()
  workdir = pathlib.Path(_WORKDIR.value).absolute()
  # of an earlier demo: they must not pass for this one's
  for name in ("result.json", "report.json", "report.html"):
    (workdir / name).unlink(missing_ok=True)
  shutil.rmtree(workdir / "tensorboard", ignore_errors=True)
  os.environ.setdefault("JAX_PLATFORMS", "cpu")

  fault = (f"rank {_LATE_RANK.value} is made {_LATE_MS.value:g} ms late in every step" if late
           else "nobody is made late")
  print(f"demo: {_NPROC.value} processes train a CNN on the digits images; {fault}.", flush=True)
  status = jaxpace_command(
      ["run", "--no-record", "--nproc", str(_NPROC.value), "--logs", str(workdir / "logs"), "--",
       *worker_command(workdir)])
  if status:
    sys.exit(status)
  print(flush=True)
  status = jaxpace_command(["report", str(workdir), "--json", str(workdir / "report.json"),
                            "--html", str(workdir / "report.html")])
  if status:
    sys.exit(status)

  report = json.loads((workdir / "report.json").read_text())
  accuracy = json.loads((workdir / "result.json").read_text())["test_accuracy"]
  line, wrong = judge(report, accuracy, _LATE_RANK.value if late else None, 1e-3 * _LATE_MS.value,
                      _MIN_ACCURACY.value)
  print(f"\naccuracy on held-out images: {accuracy:.1%}\n{line}\n"
        f"report: {workdir / 'report.json'}; demo took {time.monotonic() - began:.0f} s",
        flush=True)
  if wrong:
    sys.exit("demo failed: " + "; ".join(wrong))


if __name__ == "__main__":
  app.run(main)
