"""Pauses for garbage collection, on several processes: left alone, aligned, frozen, in early ranks'
slack, or chosen.

    python -m experiments.measure.pauses                                    # about eight minutes on two cores
    python -m experiments.measure.pauses --processes=2 --block_seconds=120 --auto_seconds=120      # a verdict in four
    python -m experiments.measure.pauses --processes=2 --block_seconds=10 --auto_seconds=10

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
from experiments.lib.paired import Estimate, estimate, jackknifed, ratio_of_means, rounds_needed
from experiments.measure import pauses_worker
from experiments.measure.pauses_worker import AGAIN, ALONE, OFF, STAGES, Setup

LIMIT = 0.005  # "auto" may be slower than doing nothing by as much

_SETTINGS: dict[str, tuple[Any, str]] = {
    "heap": (150_000, "Container objects alive in each process."),
    "churn": (4000, "Of those, replaced each step."),
    "every": (30, "Steps between aligned collections; the interpreter's own come about as often."),
    "work_ms": (3.0, "Work of a step, ms."),
    "compute": (False,
                "Work is computing; otherwise sleeping, as where the work is done by an "
                "accelerator."),
    "late_ms": (120.0, "By which one process of four is later in the stage of that name, ms."),
    "block_seconds": (30.0, "Time for the blocks of each number of processes, s."),
    "auto_seconds": (60.0, "Time for mode auto on four processes, s; in proportion on others."),
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
    found: of each process `blocks` and `auto`, as `pauses_worker.work` wrote them.
    every: steps between aligned collections.

  Returns:
    By stage and arm: step time in ms, ratio to "alone" in the same round; predictions; what "auto"
    did. Intervals are [mean, low, high].
  """
  processes = len(found)
  stages: dict[str, Any] = {}
  for stage in pauses_worker.stages(processes):
    arms = STAGES[stage]
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
  auto = judge_auto(found, every)
  auto["paired"] = paired(found[0]["blocks"], auto["shares"])
  return {"processes": processes, "base_ms": base, "stages": stages, "oracle": oracle, "auto": auto}


def paired(blocks: list[dict[str, Any]], shares: dict[str, float]) -> dict[str, Any]:
  """What "auto" cost or gained by the blocks of the stage "balanced", which were taken in turns,
  unlike its own run.

  Each mode's mean step time against "alone" in the same rounds, weighted by the share of periods
  that "auto" spent in it. The cost of changing the mode isn't in it.

  Returns:
    The ratio and A/A's, [ratio, low, high], a verdict, and the rounds it would take to show that
    nothing is lost.
  """
  step = {arm: np.asarray([block["step"] for block in blocks if block["stage"] == "balanced"
                           and block["arm"] == arm])
          for arm in STAGES["balanced"]}
  base, again = step[ALONE], ratio_of_means(step[AGAIN], step[ALONE])
  # In slack is the same as aligned where nobody is late.
  mixed = sum(share * step["aligned" if mode == "in-slack" else mode]
              for mode, share in shares.items())
  ratio = ratio_of_means(np.asarray(mixed), base)
  close = max(1 - again.low, again.high - 1) <= LIMIT
  verdict = ("no" if ratio.high <= 1 + LIMIT else "YES" if ratio.low > 1 + LIMIT
             else "not shown either way"
             if close else "inconclusive: A/A fails")
  return {"ratio": ratio.to_json(), "again": again.to_json(), "over_limit": verdict,
          "rounds": len(base), "rounds_needed":
          rounds_needed(Estimate(*(value - 1 for value in (again.value, again.low, again.high))),
                        len(base), LIMIT)}


def judge_auto(found: list[dict[str, Any]], every: int) -> dict[str, Any]:
  """What "auto" chose, and its step time, trial included, against its own periods left alone.

  Each step counts, warm-up aside. The interval is over periods.
  """
  auto = found[0]["auto"]
  if any(one["auto"]["modes"] != auto["modes"] for one in found):
    raise RuntimeError("The processes did not change the mode at the same steps.")
  count = len(auto["times"]) // every * every
  times = np.asarray(auto["times"][:count]).reshape(-1, every).mean(axis=1)[2:]
  modes = [auto["modes"][k + every // 2] for k in range(0, count, every)][2:]
  left = np.asarray([mode == ALONE for mode in modes])

  def against_left(periods: np.ndarray) -> float:
    alone = times[periods][left[periods]]
    return float(times[periods].mean() / alone.mean()) if len(alone) else float("nan")

  ratio, low, high = jackknifed(against_left, len(times)).to_json()
  shares = {mode: modes.count(mode) / len(modes) for mode in sorted(set(modes))}
  return {"steps": len(auto["times"]), "found": auto["found"], "shares": shares,
          "ratio": [ratio, low, high], "within_limit": bool(low <= 1 + LIMIT),
          "shown_within_limit": bool(high <= 1 + LIMIT)}


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
              "aligned_predicted_ms", "aligned_measured_ms"))] for run in figures["runs"]]),
      "## Auto", "",
      "One run of mode `auto` beside the stage `balanced`, its trial included: mean step time "
      "against that of its own",
      f"periods left alone. Limit: +{100 * LIMIT:g} %.", "",
      *measured.table(
          ["processes", "steps", "chosen at the end", "share of periods", "against alone",
           "over the limit?"],
          [[run["processes"], run["auto"]["steps"], run["auto"]["found"]["chosen"],
            ", ".join(f"{mode} {100 * share:.0f} %"
                      for mode, share in run["auto"]["shares"].items()),
            _interval(run["auto"]["ratio"]), _verdict(run["auto"])] for run in figures["runs"]]),
      "That compares periods at different times. The blocks above took turns: each mode's mean "
      "step time there,",
      "weighted by the share of periods that `auto` spent in it, against `alone` in the same "
      "rounds; what changing the",
      "mode costs is not in it. Rounds needed: with which four runs in five would show that "
      "nothing is lost, by A/A's",
      "width.", "",
      *measured.table(
          ["processes", "against alone", "A/A", "over the limit?", "rounds", "rounds needed"],
          [[run["processes"], _interval(found["ratio"]), _interval(found["again"]),
            found["over_limit"], found["rounds"], found["rounds_needed"]] for run in figures["runs"]
           for found in [run["auto"]["paired"]]])]
  return lines


_ABOUT = {
    "balanced": ["All processes do the same work."],
    "one late":
    ["One process is late throughout; the others are early by more than a collection takes."],
    "no heap":
    ["The control: no heap, and JAX's own objects frozen beforehand, so collections take next "
     "to nothing.",
     "No arm should differ."],
}


def _interval(values: list[float]) -> str:
  median, low, high = (100 * (value - 1) for value in values)
  return f"{median:+.1f} % [{low:+.1f}, {high:+.1f}]"


def _verdict(auto: dict[str, Any]) -> str:
  if set(auto["shares"]) == {ALONE}:
    return "nothing was tried in so few steps"
  if auto["shown_within_limit"]:
    return "no"
  return "not shown either way" if auto["within_limit"] else "YES"


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
