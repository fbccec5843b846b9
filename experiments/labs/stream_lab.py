"""How soon the stream of alarms tells of the fault lab's faults, and how often it tells of none
that is there.

    python -m experiments.labs.stream_lab --runs=runs/fault_lab,runs/fault_lab_seed3     # half a minute for 360 runs

Nothing but the stream is judged; `experiments.labs.fault_lab --judge` judges it by the same rules
beside the reports.
"""  # noqa: E501

from __future__ import annotations

import json
import pathlib
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from absl import app, flags

from experiments.labs.faults import judge, scores
from experiments.lib import measured
from jaxpace.trace.reader import read_run


def judged(directories: Sequence[pathlib.Path], bare: bool = False) -> dict[str, Any]:
  """The stream's figures of all runs in these directories, those of the same seed together.

  Args:
    directories: of the lab's runs.
    bare: as they would be told, had the processes not measured what they do between steps.

  Raises:
    ValueError: a directory holds no run with a label.
  """
  found: dict[int, list[scores.Judged]] = {}
  for directory in directories:
    seed = int(json.loads((directory / "plan.json").read_text())["config"]["seed"])
    ready = judge.labelled(directory)
    for number, one in enumerate(ready):
      run = read_run(one.path / "run")
      found.setdefault(seed, []).append(judge.follow(one,
                                                     judge.without_counters(run) if bare else run))
      if number % 100 == 99:
        print(f"{directory}: {number + 1} of {len(ready)} runs followed", file=sys.stderr,
              flush=True)
  return {str(seed): {"runs": len(runs), "controls": sum(run.control for run in runs),
                      **scores.summary(runs)["detection"]} for seed, runs in sorted(found.items())}


def page(figures: Mapping[str, Any]) -> list[str]:
  """The figures in Markdown."""
  seeds: Mapping[str, Mapping[str, Any]] = figures["seeds"]
  lines = measured.introduction("The stream of alarms, in runs of the fault lab", dict(figures))
  if figures["note"]:
    lines += [figures["note"], ""]
  lines += ["False alarms are all alarms in healthy controls. Of disturbances: by the loops' "
            "own clocks the job lost 5 % or more, over the steps from the onset told to the alarm, "
            "to something that nobody injected. Disturbed: of the controls' stretches of "
            f"{scores.STRETCH} steps those of which the same is true, told or not.", ""]
  lines += measured.table(
      ("seed", "runs", "controls", "healthy steps", "false alarms", "in 10,000 steps",
       "of disturbances", "disturbed"),
      [[seed, one["runs"], one["controls"], one["steps_of_controls"],
        one["false_alarms_in_controls"],
        round(1e4 * one["false_alarms_in_controls"] / max(one["steps_of_controls"], 1), 2),
        one["of_disturbances"], f"{100 * one['disturbed_stretches']:.0f} %"]
       for seed, one in seeds.items()])
  lines += ["Faults that begin mid-run and cost 5 % of the step or more while they last:", ""]
  lines += measured.table(("seed", "faults", "called rightly within 30 steps", "noticed",
                           "median steps", "ever"),
                          [[seed, one["faults"], one["within_30"], one["noticed_within_30"],
                            one["median"], one["detected"]] for seed, one in seeds.items()])
  lines += ["Steps to the alarm, by kind; –: never.", ""]
  lines += measured.table(("seed", "fault", "steps"),
                          [[seed, kind, ", ".join(measured.cell(steps) for steps in found)]
                           for seed, one in seeds.items()
                           for kind, found in one["by_kind"].items()])
  return lines


def define_flags() -> None:
  """Defines this program's flags."""
  flags.DEFINE_list("runs", ["runs/fault_lab"],
                    "Directories that `experiments.labs.fault_lab --make` made.")
  flags.DEFINE_bool("bare", False, "Without the columns of causes.")
  flags.DEFINE_string("note", "", "A sentence on the circumstances, for the page.")
  flags.DEFINE_string("out", "docs/measurements/stream_lab.json",
                      "Where the figures go; a table beside it.")


def main(argv: list[str]) -> None:
  if len(argv) > 1:
    raise app.UsageError(
        f"What is {argv[1]!r}? All arguments are flags: --runs=DIR,DIR, --bare, --note, --out.")
  args = flags.FLAGS
  try:
    seeds = judged([pathlib.Path(path) for path in args.runs], args.bare)
  except (OSError, ValueError) as error:
    sys.exit(f"stream_lab: {error}")
  figures = {**measured.circumstances("experiments.labs.stream_lab"), "note": args.note,
             "seeds": seeds}
  measured.write(figures, page(figures), pathlib.Path(args.out))


if __name__ == "__main__":
  define_flags()
  app.run(main)
