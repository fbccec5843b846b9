"""Flax's published examples, from their own files, bare and observed: the same bits?

    git clone https://github.com/google/flax
    python -m experiments.measure.published_trainers --flax=flax

Each trainer is the file as published, with nothing changed but the lines that observe and record
its step (and smaller numbers in its config). The data are made up, and packages that an example
needs for data, vocabulary and logs alone are stood in for where they are not installed. Each runs
20 steps on eight forced devices, bare and observed, in a process of its own; after every step all
arrays of the step's arguments and results are compared bit for bit. Writes
docs/measurements/published_trainers.json and .md. Takes some minutes.
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

from experiments.lib import measured
from experiments.measure.published_examples import EXAMPLES

_MODULE = "experiments.measure.published_trainers"


def define_flags() -> None:
  """Defines this program's flags."""
  flags.DEFINE_string("flax", "", "A clone of github.com/google/flax.")
  flags.DEFINE_list("trainers", ",".join(EXAMPLES), "Which to run.")
  flags.DEFINE_integer("steps", 20, "Steps of each.", lower_bound=1)
  flags.DEFINE_string("out", "docs/measurements/published_trainers.json",
                      "File the figures are written to.")


def child(name: str, clone: pathlib.Path, steps: int, observed: bool, folder: pathlib.Path
          ) -> dict[str, Any]:
  """One trainer in a process of its own; what it left in `folder`."""
  command = [sys.executable, "-m", "experiments.measure.published_examples", name, str(clone),
             str(steps), "observed" if observed else "bare", str(folder)]
  root = pathlib.Path(__file__).parents[2]
  done = subprocess.run(
      command, cwd=folder, capture_output=True, text=True, check=False,
      env=os.environ | {"JAX_PLATFORMS": "cpu", "MPLBACKEND": "agg", "PYTHONPATH": str(root),
                        "XLA_FLAGS": "--xla_force_host_platform_device_count=8"})
  left = folder / "left.json"
  if not left.exists():
    raise SystemExit(f"{name} ended early. The end of what it said:\n{done.stderr[-3000:]}")
  return json.loads(left.read_text())


def run(name: str, clone: pathlib.Path, steps: int) -> dict[str, Any]:
  """A trainer bare and observed, compared."""
  with tempfile.TemporaryDirectory() as scratch:
    arms = {}
    for arm in ("bare", "observed"):
      folder = pathlib.Path(scratch) / arm
      folder.mkdir()
      arms[arm] = child(name, clone, steps, arm == "observed", folder)
    bare, observed = arms["bare"], arms["observed"]
    different: dict[str, int] = {}
    for k, (left, right) in enumerate(zip(bare["digests"], observed["digests"], strict=True)):
      if left.keys() != right.keys():
        raise SystemExit(f"{name}: step {k} has other arrays when observed.")
      for path in left:
        if left[path] != right[path]:
          different.setdefault(path, k)
    last = [np.load(pathlib.Path(scratch) / arm / "last.npz") for arm in arms]
    largest = max((_relative(last[0][key], last[1][key]) for key in last[0].files), default=0.0)
  return {"trainer": name, "file": EXAMPLES[name].file, "how": EXAMPLES[name].how,
          "steps": len(bare["digests"]), "arrays": len(bare["digests"][-1]),
          "different": different, "largest": largest, **observed["plan"],
          "lines_added": observed["lines_added"], "reported_steps": observed["reported_steps"],
          "standing_in": observed["standing_in"]}


def _relative(one: np.ndarray, two: np.ndarray) -> float:
  """Largest difference of two arrays, relative to the largest number of the first."""
  one, two = one.astype(np.float64), two.astype(np.float64)
  return float(np.abs(one - two).max(initial=0.0) / (np.abs(one).max(initial=0.0) or 1.0))


def to_markdown(figures: dict[str, Any]) -> str:
  """The page."""
  lines = [
      *measured.introduction("Published trainers, bare and observed", figures),
      f"Files of github.com/google/flax at {figures['commit']}, as they are but for the lines that "
      "observe and record the step, and smaller numbers in their configs; data made up; what only "
      "loads data, makes vocabularies or writes logs is stood in for where it isn't installed. "
      "Eight forced CPU devices, each run in a process of its own. After every step all arrays of "
      "the step's arguments and results are compared bit for bit. Steps in the trace: rows that "
      "the recorder wrote for one rank.", ""]
  rows = []
  for row in figures["trainers"]:
    kinds = ", ".join(f"{count} {kind}" for kind, count in row["collectives"].items())
    rows.append([row["trainer"], row["how"], kinds or "none", row["untimed"], row["marks_a_step"],
                 row["steps"], row["arrays"], len(row["different"]), f"{row['largest']:.1e}",
                 row["reported_steps"], "; ".join(row["bare_reasons"])])
  return "\n".join([*lines, *measured.table(
      ["example", "how it is compiled", "collectives timed", "not timed",
       "marks a step and device", "steps", "arrays", "that differ", "largest difference",
       "steps in the trace", "ran bare, and why"], rows), ""])


def _commit(clone: pathlib.Path) -> str:
  said = subprocess.run(["git", "-C", str(clone), "rev-parse", "HEAD"], capture_output=True,
                        text=True, check=False)
  return said.stdout.strip()[:12] or "an unknown commit"


def main(argv: list[str]) -> None:
  del argv
  its = flags.FLAGS
  clone = pathlib.Path(its.flax).expanduser().resolve()
  if not its.flax or not (clone / "examples").is_dir():
    raise SystemExit("--flax: give a clone of github.com/google/flax, the folder that holds "
                     "examples/.")
  figures: dict[str, Any] = {**measured.circumstances(_MODULE), "commit": _commit(clone),
                             "steps": its.steps, "trainers": []}
  for name in its.trainers:
    row = run(name, clone, its.steps)
    figures["trainers"].append(row)
    out = pathlib.Path(its.out)
    # Written after each: what is finished is not lost.
    measured.write(figures, to_markdown(figures).splitlines(), out)
    print(f"{name}: {len(row['different'])} of {row['arrays']} arrays differ in {row['steps']} "
          f"steps; {sum(row['collectives'].values())} collectives timed, {row['untimed']} not "
          f"{row['bare_reasons'] or ''}", file=sys.stderr, flush=True)


if __name__ == "__main__":
  define_flags()
  app.run(main)
