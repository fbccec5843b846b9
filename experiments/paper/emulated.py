"""Table 1's counterpart that is measured: real processes, real collectives, pauses of the
collector, on one machine.

    python -m experiments.paper.emulated                                            # about eight minutes
    python -m experiments.paper.emulated --processes=2 --seconds=20 --out=/tmp/emulated.json

Each process stands for a node. Its compute is slept, so that the machine's cores don't set the
pace; the last one is slower throughout; the sum over all processes is gloo's; full collections come
when Python's own collector has them, and last as long as a large heap's would, asleep. Without and
with the pacers, without and with aligned housekeeping: all arms take turns in short blocks, in
random order, and only ratios within a round are used. No process makes another one slower here
except by being late, so the pacers can gain nothing, and must not cost. Writes
docs/measurements/emulated.json and .md.
"""  # noqa: E501

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys
import tempfile
import textwrap
from typing import Any

import numpy as np
from absl import app, flags

import jaxpace
from experiments.lib import measured
from experiments.lib.paired import Estimate, jackknifed, ratio_of_means
from experiments.paper.emulated_worker import AGAIN, ARMS, HOUSEKEEPING, OFF, Setup, work

OUT = pathlib.Path("docs/measurements/emulated.json")
MODULE = "experiments.paper.emulated"


def launch(processes: int, setup: Setup) -> list[list[dict[str, Any]]]:
  """Runs one number of processes; what each of them wrote."""
  with tempfile.TemporaryDirectory() as root:
    subprocess.run([sys.executable, "-m", "jaxpace.cli", "run", "--no-record", "--nproc",
                    str(processes), "--logs", f"{root}/logs", "--", sys.executable, "-m", MODULE,
                    f"--worker={root}",
                    *(f"--{name}={value}" for name, value in setup._asdict().items())],
                   check=True, env={**os.environ, "JAX_PLATFORMS": "cpu"})
    return [json.loads((pathlib.Path(root) / f"{n}.json").read_text()) for n in range(processes)]


def judge(found: list[list[dict[str, Any]]], setup: Setup) -> dict[str, Any]:
  """Turns the processes' blocks into a row of the table.

  Args:
    found: of each process its blocks, as `emulated_worker.work` wrote them; the first one's with
      times.
    setup: of the run.

  Returns:
    Of each arm the mean step in ms, its CV over steps, and both against "neither" as [ratio, low,
    high] (throughput of the arm over that without); predictions of what the collector costs, and
    what it did.
  """
  processes = len(found)
  times = {arm: np.array([block["times"] for block in found[0] if block["arm"] == arm])
           for arm in ARMS}
  base = times[OFF]
  arms = {}
  for arm, values in times.items():
    gain = ratio_of_means(base.mean(axis=1), values.mean(axis=1))
    arms[arm] = {"step_ms": 1e3 * float(values.mean()), "cv": _cv(values),
                 "throughput": gain.to_json(), "cv_ratio": _ratio_of_cv(values, base).to_json()}
  fulls = [block["fulls"] for blocks in found for block in blocks if block["arm"] in (OFF, AGAIN)]
  chance, aligned = float(np.sum(fulls)) / (len(fulls) * setup.every), 1 / setup.every
  alone = (base.mean() + times[AGAIN].mean()) / 2
  return {"processes": processes, "rounds": len(base), "arms": arms, "oracle": {
      "chance": chance, "alone_ms": setup.pause_ms * (1 - (1 - chance)**processes),
      "aligned_ms": setup.pause_ms * aligned,
      "measured_ms": 1e3 * float(alone - times[HOUSEKEEPING].mean())}}


def _cv(values: np.ndarray) -> float:
  """Of all steps of an arm: [rounds, steps]."""
  return float(values.std() / values.mean())


def _ratio_of_cv(values: np.ndarray, base: np.ndarray) -> Estimate:
  """With its 95 % interval over rounds."""
  return jackknifed(lambda rounds: _cv(values[rounds]) / _cv(base[rounds]), len(base))


def _slept_ms(setup: dict[str, Any], run: dict[str, Any]) -> float:
  """What a step would take of sleep alone: the late process's work, and the pauses, unaligned."""
  return float(setup["work_ms"] * (1 + setup["late"]) + run["oracle"]["alone_ms"])


def tables(figures: dict[str, Any]) -> list[str]:
  """The figures as a page."""
  setup = figures["setup"]
  lines = measured.introduction("Coordination on real processes, emulated nodes", figures)
  lines += textwrap.wrap(
      f"Measured. Each process stands for a node: {setup['work_ms']:g} ms of compute, slept, with "
      f"{100 * setup['jitter']:g} % jitter, the last one {100 * setup['late']:g} % slower; gloo's "
      f"sum over all processes; full collections about once in {setup['every']} steps of a "
      f"process, each made {setup['pause_ms']:g} ms longer by sleeping. That is more often than "
      "where pauses were measured, so that minutes suffice. Throughput of all processes together, "
      "with over without; all arms took turns in blocks. "
      f"{measured.about_intervals(figures.get('intervals'), 'as many rounds as the table says')}",
      116)
  lines += ["", *throughput(figures)]
  lines += ["Variation of the step (CV over all steps of an arm), and what the pauses cost:", ""]
  lines += measured.table(
      ["processes", "CV, neither", "CV, housekeeping", "CV, both", "both over neither",
       "chance of a pause", "closed form: saved by aligning, ms", "measured, ms"],
      [[run["processes"], *(f"{run['arms'][arm]['cv']:.3f}" for arm in (OFF, HOUSEKEEPING, "both")),
        _interval(run["arms"]["both"]["cv_ratio"]), run["oracle"]["chance"],
        run["oracle"]["alone_ms"] - run["oracle"]["aligned_ms"], run["oracle"]["measured_ms"]]
       for run in figures["runs"]])
  off = [run["processes"] for run in figures["runs"] if not run["arms"][AGAIN]["throughput"][1] <= 1
         <= run["arms"][AGAIN]["throughput"][2]]
  if off:
    lines += [*textwrap.wrap(
        f"`{AGAIN}` is the A/A control, and should enclose 0. With {' and '.join(map(str, off))} "
        "processes it doesn't: there these intervals are too narrow, and an effect of its size "
        "is none.", 116), ""]
  slow = [(run["processes"], run["arms"][OFF]["step_ms"], _slept_ms(setup, run))
          for run in figures["runs"]]
  said = ", ".join(
      f"with {processes} processes it takes {step:.0f} ms, of which sleep and pauses make "
      f"{slept:.0f}"
      for processes, step, slept in slow if step > 2 * slept)
  if said:
    lines += [*textwrap.wrap(
        f"Sleeps alone don't pace the step: {said}; the rest is gloo and Python, whose processes "
        "share the machine's cores.", 116), ""]
  return lines + textwrap.wrap(
      "Closed form: a pause of d that strikes each of N processes with probability p costs d (1 - "
      "(1 - p)^N) a step, d p where all pause together. Pacing can gain nothing here: processes "
      "that wait for gloo are asleep.", 116)


def throughput(figures: dict[str, Any]) -> list[str]:
  """The table of throughput by arm."""
  return measured.table(
      ["processes", "rounds", "step, neither, ms", *(arm for arm in ARMS if arm != OFF)],
      [[run["processes"], run["rounds"], run["arms"][OFF]["step_ms"],
        *(_percent(run["arms"][arm]["throughput"]) for arm in ARMS if arm != OFF)]
       for run in figures["runs"]])


def _percent(ratio: list[float]) -> str:
  middle, low, high = (100 * (value - 1) for value in ratio)
  return f"{middle:+.1f} % [{low:+.1f}, {high:+.1f}]"


def _interval(ratio: list[float]) -> str:
  return "{:.2f} [{:.2f}, {:.2f}]".format(*ratio)


def main(argv: list[str]) -> None:
  if len(argv) > 1:
    raise app.UsageError(f"Unknown arguments: {' '.join(argv[1:])}")
  args = flags.FLAGS
  setup = Setup(*(getattr(args, name) for name in Setup._fields))
  if args.worker:
    jaxpace.distributed.initialize()
    work(pathlib.Path(args.worker), setup)
    return
  try:
    counts = [int(count) for count in args.processes]
  except ValueError:
    counts = []
  if not counts or min(counts) < 2:
    raise app.UsageError(
        f"--processes={','.join(args.processes)} must be whole numbers from 2, such as 2,4,8.")
  figures = measured.circumstances(MODULE)
  figures.update(setup=setup._asdict(), runs=[])
  for processes in counts:
    figures["runs"].append(judge(launch(processes, setup), setup))
    measured.write(figures, tables(figures), pathlib.Path(args.out))


def define_flags() -> None:
  """Defines this program's flags."""
  flags.DEFINE_list("processes", ["2", "4", "8", "16"],
                    "Numbers of processes, one after the other.")
  flags.DEFINE_float("work_ms", 30.0, "Compute of a step, slept, ms.", lower_bound=0.0)
  flags.DEFINE_float("jitter", 0.03, "Its deviation on each process, as a share of it.",
                     lower_bound=0.0)
  flags.DEFINE_float("late", 0.1, "By which the last process is slower, as a share.",
                     lower_bound=0.0)
  flags.DEFINE_float("pause_ms", 60.0, "By which a full collection is made longer, asleep, ms.",
                     lower_bound=0.0)
  flags.DEFINE_integer("every", 30, "Steps between aligned collections.", lower_bound=4)
  flags.DEFINE_integer("churn", 3500, "Container objects replaced in a step.", lower_bound=101)
  flags.DEFINE_float("seconds", 90.0, "For the blocks of each number of processes, s.",
                     lower_bound=0.0)
  flags.DEFINE_string("out", str(OUT), "Where the figures go.")
  flags.DEFINE_string("worker", "",
                      "Used by the program itself: where a process writes what it found.")


if __name__ == "__main__":
  define_flags()
  app.run(main)
