"""Pauses for garbage collection, on several processes: left alone, aligned, frozen.

    python -m experiments.measure.pauses                                    # about four minutes on two cores
    python -m experiments.measure.pauses --processes=2 --block_seconds=10

Real processes, real heaps whose objects are replaced all the time, Python's own collector, and a
sum over all processes (gloo) that each step waits for. All arms take turns in short blocks, in
random order, in one run; only ratios within a round are used. What was measured is set beside the
oracle: a pause of d that strikes each of N processes in a step with probability p costs d (1 - (1 -
p)^N) a step if they pause independently, and d p if they pause together. Writes
docs/measurements/pauses.json and the tables of it, pauses.md.
"""  # noqa: E501

from __future__ import annotations

import json
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
from experiments.measure import pauses_worker
from experiments.measure.pauses_worker import AGAIN, ALONE, OFF, STAGES, Setup

_SETTINGS: dict[str, tuple[Any, str]] = {
    "heap": (150_000, "Container objects alive in each process."),
    "churn": (4000, "Of those, replaced each step."),
    "every": (30, "Steps between aligned collections; the interpreter's own come about as often."),
    "work_ms": (3.0, "Work of a step, ms."),
    "compute": (False,
                "Work is computing; otherwise sleeping, as where the work is done by an "
                "accelerator."),
    "block_seconds": (30.0, "Time for the blocks of each number of processes, s."),
}


def launch(processes: int, setup: Setup, module: str) -> dict[str, Any]:
  """Runs one number of processes and judges what they found."""
  with tempfile.TemporaryDirectory() as root:
    command = [sys.executable, "-m", "jaxpace.cli", "launch", "--nproc", str(processes), "--logs",
               f"{root}/logs", "--", sys.executable, "-m", module, f"--worker={root}",
               *(f"--{k}={v}" for k, v in setup._asdict().items())]
    subprocess.run(command, check=True)
    found = [json.loads((pathlib.Path(root) / f"{n}.json").read_text()) for n in range(processes)]
  return judge(found, setup.every)


def judge(found: list[dict[str, Any]], every: int) -> dict[str, Any]:
  """Turns the processes' figures into ratios and predictions.

  Args:
    found: of each process its `blocks`, as `pauses_worker.work` wrote them.
    every: steps between aligned collections.

  Returns:
    By stage and arm: step time in ms, ratio to "alone" in the same round; predictions. Intervals
    are [mean, low, high].
  """
  processes = len(found)
  stages: dict[str, Any] = {}
  for stage, arms in STAGES.items():
    blocks = [block for block in found[0]["blocks"] if block["stage"] == stage]
    step = {arm: np.asarray([block["step"] for block in blocks if block["arm"] == arm])
            for arm in arms}
    stages[stage] = {"rounds": len(step[ALONE]), "arms": {
        arm: {"step_ms": estimate(1e3 * values).to_json(),
              "ratio": estimate(values / step[ALONE]).to_json()}
        for arm, values in step.items()}}
  alone = [[block for block in one["blocks"] if block["stage"] == "balanced"
            and block["arm"] in (ALONE, AGAIN)]
           for one in found]
  together = [[block for block in one["blocks"] if block["stage"] == "balanced"
               and block["arm"] == "aligned"]
              for one in found]
  chance = _total(alone, "fulls") / _total(alone, "steps")
  pause, aligned_pause = (_total(blocks, "full_seconds") / max(_total(blocks, "fulls"), 1)
                          for blocks in (
                              alone, together))
  balanced = stages["balanced"]["arms"]
  base = balanced[OFF]["step_ms"][0]
  # Differences of means: a median step knows nothing of pauses, but each of these is a mean over a
  # block.
  oracle = {
      "pause_ms": 1e3 * pause, "chance": chance, "aligned_pause_ms": 1e3 * aligned_pause,
      "alone_predicted_ms": 1e3 * pause * (1 - (1 - chance) ** processes),
      "alone_measured_ms": _mean_ms(found[0], ALONE) - _mean_ms(found[0], OFF),
      "aligned_predicted_ms": 1e3 * aligned_pause / every,
      "aligned_measured_ms": _mean_ms(found[0], "aligned") - _mean_ms(found[0], OFF)}
  return {"processes": processes, "base_ms": base, "stages": stages, "oracle": oracle}


def _total(processes: list[list[dict[str, Any]]], name: str) -> float:
  return float(sum(block[name] for blocks in processes for block in blocks))


def _mean_ms(one: dict[str, Any], arm: str) -> float:
  """Mean step time of an arm in the stage "balanced", ms."""
  names = (ALONE, AGAIN) if arm == ALONE else (arm,)
  return 1e3 * float(np.mean([block["step"] for block in one["blocks"]
                              if block["stage"] == "balanced" and block["arm"] in names]))


def tables(figures: dict[str, Any]) -> list[str]:
  """The figures as a page."""
  lines = measured.introduction("Pauses for garbage collection", figures)
  setup = figures["setup"]
  work = "computing" if setup["compute"] else "sleeping"
  lines += [
      f"Each process keeps {setup['heap']:,} container objects alive, besides JAX's own, and "
      "replaces about",
      f"{setup['churn']:,} of them a step; {setup['work_ms']:g} ms of {work}, then a sum over all "
      "processes.",
      f"Aligned collections every {setup['every']} steps. All arms of a stage take turns in blocks "
      "of two periods, in",
      "random order; ratios are within a round. `alone again` is the A/A arm; `never in",
      "full` collects young objects only: the step time without pauses.", "",
      measured.about_intervals(figures.get("intervals"), "as many rounds as the tables say"), ""]
  for stage in STAGES:
    rows = []
    for run in figures["runs"]:
      found = run["stages"].get(stage, {"arms": {}})
      for arm, values in found["arms"].items():
        rows.append([run["processes"], arm, values["step_ms"][0], _interval(values["ratio"]),
                     found["rounds"]])
    if not rows:
      continue
    lines += [f"## {stage.capitalize()}", "", *_ABOUT[stage], "", *measured.table(
        ["processes", "arm", "step, ms", "against alone", "rounds"], rows)]
  lines += [
      "## Against the oracle", "",
      "What pauses add to a step, ms, in the stage `balanced`: predicted from the pauses' own "
      "length d and chance p",
      "(from the interpreter's callbacks, mean over processes) and measured (mean step time less "
      "that of `never in",
      "full`).",
      "The oracle takes pauses to be independent and knows nothing of processes that compete "
      "for cores.", "",
      *measured.table(
          ["processes", "d, ms", "p", "alone: predicted", "measured", "aligned: d, ms", "predicted",
           "measured"],
          [[run["processes"], *(float(run["oracle"][name]) for name in (
              "pause_ms", "chance", "alone_predicted_ms", "alone_measured_ms", "aligned_pause_ms",
              "aligned_predicted_ms", "aligned_measured_ms"))] for run in figures["runs"]])]
  return lines


_ABOUT = {
    "balanced": ["All processes do the same work."],
    "no heap":
    ["The control: no heap, and JAX's own objects frozen beforehand, so collections take next "
     "to nothing.",
     "No arm should differ."],
}


def _interval(values: list[float]) -> str:
  median, low, high = (100 * (value - 1) for value in values)
  return f"{median:+.1f} % [{low:+.1f}, {high:+.1f}]"


def define_flags() -> None:
  """Defines this program's flags; not when it is imported, since other programs have flags of the
  same names."""
  flags.DEFINE_list("processes", ["2", "4", "8"], "Numbers of processes.")
  for name, (default, about) in _SETTINGS.items():
    if isinstance(default, bool):
      flags.DEFINE_bool(name, default, about)
    elif isinstance(default, int):
      flags.DEFINE_integer(name, default, about, lower_bound=2)
    else:
      flags.DEFINE_float(name, default, about, lower_bound=0.0)
  flags.DEFINE_string("out", "docs/measurements/pauses.json", "File the figures are written to.")
  flags.DEFINE_string("worker", "",
                      "Internal: this is one process of several; directory for its figures.")


def main(argv: list[str]) -> None:
  if len(argv) > 1:
    raise app.UsageError(f"Unknown arguments: {' '.join(argv[1:])}")
  setup = Setup(**{name: flags.FLAGS[name].value for name in _SETTINGS})
  if flags.FLAGS.worker:
    jaxpace.distributed.initialize()
    pauses_worker.work(pathlib.Path(flags.FLAGS.worker), setup)
    return
  try:
    counts = [int(count) for count in flags.FLAGS.processes]
  except ValueError:
    counts = []
  if not counts or min(counts) < 2:
    raise app.UsageError(
        f"--processes={','.join(flags.FLAGS.processes)} must be whole numbers from 2, such "
        "as 2,4,8.")
  figures = measured.circumstances("experiments.measure.pauses") | {"setup": setup._asdict()}
  figures["runs"] = [launch(count, setup, "experiments.measure.pauses") for count in counts]
  measured.write(figures, tables(figures), pathlib.Path(flags.FLAGS.out))


if __name__ == "__main__":
  define_flags()
  app.run(main)
