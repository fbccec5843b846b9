"""The fault lab: makes runs with labelled faults and without, has them diagnosed, and says how
often that was right.

    python -m experiments.labs.fault_lab                                  # all of it, about half an hour on two cores
    python -m experiments.labs.fault_lab --make --runs=runs/fault_lab     # only makes the runs; goes on where it was
    stopped
    python -m experiments.labs.fault_lab --judge --runs=runs/fault_lab    # only diagnoses them, again and again
    python -m experiments.labs.fault_lab --record=calls,unchanged         # each run twice: with record(), and by jaxpace.observed

Link and trunk faults need root: hosts are network namespaces then. See docs/how_sure.md.
"""  # noqa: E501

from __future__ import annotations

import dataclasses
import json
import math
import pathlib
import sys
from collections.abc import Mapping
from typing import Any

import numpy as np
from absl import app, flags
from ml_collections import config_flags
from rich.console import Console

from experiments.labs.fabric.machine import LabError
from experiments.labs.faults import judge, make, plan, scores, tables
from experiments.lib import measured

_CONFIG = config_flags.DEFINE_config_file("config", "configs/fault_lab.py", "What is made.",
                                          lock_config=True)
_RUNS = flags.DEFINE_string("runs", "runs/fault_lab", "Directory of the runs.")
_MAKE = flags.DEFINE_bool("make", False, "Only make the runs.")
_JUDGE = flags.DEFINE_bool("judge", False, "Only judge the runs that are there.")
_ONLY = flags.DEFINE_list("only", [], "Only runs whose name holds one of these; their twins too.")
_SKIP = flags.DEFINE_list("skip", [],
                          "No runs whose name holds one of these, to be made later by the "
                          "same command.")
_RECORD = flags.DEFINE_list("record", ["calls"], "How each run is recorded, in turn: calls of "
                            "record(), or unchanged, by jaxpace.observed; those in RUNS/unchanged.")
_NOTE = flags.DEFINE_string("note", "", "A sentence on the circumstances, for the page.")
_OUT = flags.DEFINE_string("out", "docs/measurements/fault_lab.json",
                           "Where the figures go; tables beside it.")


def _show(name: str, done: int, total: int) -> None:
  if sys.stderr.isatty():
    print(f"\r\x1b[K{done} of {total} runs made ({name})", end="", file=sys.stderr, flush=True)
  elif done % 10 == 0 or done == total:
    print(f"{done} of {total} runs made", file=sys.stderr, flush=True)


def _say(sentence: str) -> None:
  print(f"\nfault_lab: {sentence}" if sys.stderr.isatty() else f"fault_lab: {sentence}",
        file=sys.stderr, flush=True)


def main(argv: list[str]) -> None:
  if len(argv) > 1:
    raise app.UsageError(
        f"What is {argv[1]!r}? All arguments are flags: --make, --judge, --runs=DIR, "
        "--only=in8, ...")
  runs = pathlib.Path(_RUNS.value).absolute()
  try:
    specs = plan.plan(_CONFIG.value)
  except ValueError as error:
    sys.exit(f"fault_lab: {error}")
  if _ONLY.value:
    chosen = {spec.name for spec in specs if any(part in spec.name for part in _ONLY.value)}
    chosen |= {spec.twin for spec in specs if spec.name in chosen and spec.twin}
    specs = [spec for spec in specs if spec.name in chosen]
  specs = [spec for spec in specs
           if not any(part in f"{spec.name} {spec.twin}" for part in _SKIP.value)]
  if not _JUDGE.value:
    try:
      failed = make.make(specs, _CONFIG.value, runs, _show, _say, _RECORD.value)
    except KeyboardInterrupt:
      sys.exit(
          f"\nfault_lab: stopped. What is made is in {runs}; the same command goes on from there.")
    except LabError as error:
      sys.exit(f"fault_lab: {error}")
    for name, reason in failed.items():
      _say(f"{name} could not be made: {reason}")
  if not _MAKE.value:
    try:
      _judge(make.places(runs, _RECORD.value), pathlib.Path(_OUT.value))
    except ValueError as error:
      sys.exit(f"fault_lab: {error}")


def _judge(places: Mapping[str, pathlib.Path], out: pathlib.Path) -> None:
  """Diagnoses all runs that are there, shows the figures and writes them; those recorded in another
  way stand beside them."""
  judged: dict[str, list[scores.Judged]] = {}
  loads: list[float] = []
  for way, runs in places.items():
    ready = [one for one in judge.labelled(runs, _ONLY.value)
             if all((place / one.spec.name / make.LABEL).exists() for place in places.values())]
    loads += [load for one in ready
              for load in json.loads((one.path / make.LABEL).read_text())["load"]]
    found = judge.judge(ready, _judged)
    judged |= {how if way == "calls" else f"{way}, {how}": runs for how, runs in found.items()}
    # Run by run it is too much for the record in git: it stays with the runs.
    rows = [{**dataclasses.asdict(one),
             "found": {how: [dataclasses.asdict(f) for f in found[how][number].found]
                       for how in judge.WAYS}}
            for number, one in enumerate(found["all"])]
    (runs / "judged.json").write_text(json.dumps(_finite(rows), indent=1) + "\n")
  figures = {
      **measured.circumstances("experiments.labs.fault_lab"),
      "made": {"runs": len(ready), "record": list(places),
               "load": [float(value) for value in np.percentile(loads, [0, 50, 100])],
               "seed": json.loads((runs / "plan.json").read_text())["config"]["seed"]},
      "note": _NOTE.value,
      "judged": {name: scores.summary(found) for name, found in judged.items()},
      "misjudged": [line if name == "all" else f"{name.removesuffix(', all')}: {line}"
                    for name, found in judged.items() if name.endswith("all")
                    for line in scores.misjudged(found)]}
  console = Console(width=150)
  for name, one in figures["judged"].items():
    console.print(tables.confusion_table(name, one["confusion"]))
  console.print(tables.figures_table(figures["judged"]))
  for line in figures["misjudged"]:
    console.print(line, markup=False, highlight=False, soft_wrap=True)
  measured.write(_finite(figures), tables.markdown(figures), out)


def _finite(value: Any) -> Any:
  """With five digits, and null for what is not a number."""
  if isinstance(value, dict):
    return {key: _finite(entry) for key, entry in value.items()}
  if isinstance(value, list | tuple):
    return [_finite(entry) for entry in value]
  if isinstance(value, float):
    return float(f"{value:.5g}") if math.isfinite(value) else None
  return value


def _judged(done: int, total: int) -> None:
  if done % 50 == 0 or done == total:
    print(f"{done} of {total} runs judged", file=sys.stderr, flush=True)


if __name__ == "__main__":
  app.run(main)
