"""Two versions of the package on the same runs: what their reports say otherwise, and what they take.

    git worktree add ../before COMMIT       # and its native clock built, or copied, into it
    python -m experiments.measure.versions --old=../before --runs=runs/seed5/in8-005-straggler,...

The JSON of the report on each run is compared entry by entry, and what differs is listed by kind.
Report and live view are timed on made-up runs in processes of their own, the versions taking turns
in an order drawn anew each round, and the newer one a second time, which is the noise.
"""  # noqa: E501

from __future__ import annotations

import functools
import json
import math
import os
import pathlib
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from absl import app, flags

from experiments.lib import measured, paired
from jaxpace.testing import made_up_runs
from jaxpace.testing.made_up_faults import Fault
from jaxpace.testing.made_up_runs import MadeUpJob

HERE = pathlib.Path(__file__).parents[2]
_NEAR = 1e-9
"""Relative difference up to which two numbers are equal: sums in another order."""
_CODES = ("code", "codes")
"""What the last word of a code's name is."""
_FAULTS = (Fault("pause", 30e-3, (0,), probability=0.1, mechanism="gc"),
           Fault("contention", 5e-3, begin=0.5))
_MODULES = ("jaxpace.diagnosis.live.follower", "jaxpace.reporting.watch.follower")
"""Where versions have the live view's reader, the newest first."""
_PART = 20
"""Steps of a part of the runs that grow."""
_POLLED = 10
"""Parts that appear one by one, with a poll after each."""

# Run by either version: polls a run that grows by a part at a time, and says what a poll takes.
_POLL = """
import importlib, json, os, pathlib, sys, time
made, place, count = pathlib.Path(sys.argv[1]), pathlib.Path(sys.argv[2]), int(sys.argv[3])
for name in sys.argv[4:]:
  try:
    follower = importlib.import_module(name).Follower(place)
    break
  except ModuleNotFoundError:
    continue
files = sorted(made.rglob("*.parquet"))
def part(path):
  return path.name.rpartition(".")[0].rpartition(".")[2]
def show(chosen):
  for path in files:
    if part(path) in chosen:
      os.link(path, place / path.relative_to(made))
parts = sorted({part(path) for path in files})
show(parts[:-count])
follower.poll(0.0, time.time())
took = []
for number, new in enumerate(parts[-count:]):
  show([new])
  begin = time.perf_counter(), time.process_time()
  look = follower.poll(1.0 + number, time.time())
  took.append((time.perf_counter() - begin[0], time.process_time() - begin[1]))
print(json.dumps({"wall": [wall for wall, _ in took], "cpu": [cpu for _, cpu in took]}))
"""


def differences(old: Any, new: Any, where: str = "") -> Iterator[tuple[str, str, Any, Any]]:
  """What differs between two JSON documents.

  Args:
    old: the older one, or a part of it.
    new: the newer one.
    where: path of the part.

  Yields:
    Path with * for places in lists, kind ("code added", "added", "gone", "length", "words",
    "number" or "value"), what is old and what is new; None where there is none.
  """
  if isinstance(old, Mapping) and isinstance(new, Mapping):
    for key in sorted({*old, *new}):
      path = f"{where}.{key}".lstrip(".")
      if key not in old:
        added = "code added" if key.rpartition("_")[2] in _CODES else "added"
        yield path, added, None, new[key]
      elif key not in new:
        yield path, "gone", old[key], None
      else:
        yield from differences(old[key], new[key], path)
  elif isinstance(old, list) and isinstance(new, list):
    if len(old) != len(new):
      yield where, "length", len(old), len(new)
    for one, other in zip(old, new, strict=False):
      yield from differences(one, other, f"{where}.*")
  elif _number(old) and _number(new):
    if not math.isclose(old, new, rel_tol=_NEAR):
      yield where, "number", old, new
  elif old != new:
    words = isinstance(old, str) and isinstance(new, str)
    yield where, "words" if words else "value", old, new


def _number(value: Any) -> bool:
  return isinstance(value, int | float) and not isinstance(value, bool)


def counted(found: Sequence[tuple[str, str, Any, Any]]) -> list[dict[str, Any]]:
  """Differences by kind and path: how many, and the first of them."""
  rows: dict[tuple[str, str], dict[str, Any]] = {}
  for path, kind, old, new in found:
    row = rows.setdefault((kind, path), {"kind": kind, "path": path, "times": 0,
                                         "old": old, "new": new})
    row["times"] += 1
  return [rows[key] for key in sorted(rows)]


def command(tree: pathlib.Path, arguments: Sequence[str]) -> tuple[float, float, str]:
  """Runs a tree's Python in a process of its own.

  Returns:
    Seconds by the clock and of the processor, interpreter start included; and what it said.

  Raises:
    RuntimeError: it failed.
  """
  # As a user's: byte code is kept from one start to the next.
  environment = {name: value for name, value in os.environ.items()
                 if name != "PYTHONDONTWRITEBYTECODE"} | {"PYTHONPATH": str(tree)}
  begin, before = time.perf_counter(), resource.getrusage(resource.RUSAGE_CHILDREN)
  with tempfile.TemporaryDirectory() as elsewhere:
    ended = subprocess.run([sys.executable, *arguments], cwd=elsewhere, capture_output=True,
                           text=True, env=environment, check=False)
  wall, after = time.perf_counter() - begin, resource.getrusage(resource.RUSAGE_CHILDREN)
  if ended.returncode:
    raise RuntimeError(f"{tree.name} ended with status {ended.returncode}: {ended.stderr[-2000:]}")
  return wall, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime, ended.stdout


def report(tree: pathlib.Path, run: pathlib.Path, out: pathlib.Path) -> tuple[float, float]:
  """Has a tree report on a run, as JSON; seconds by the clock and of the processor."""
  return command(tree, ["-m", "jaxpace.cli", "report", str(run), "--json", str(out)])[:2]


def compare(old: pathlib.Path, new: pathlib.Path, runs: Sequence[pathlib.Path]
            ) -> list[dict[str, Any]]:
  """Reports of both on every run: how many entries the newer has, and what differs, by kind."""
  rows = []
  for run in runs:
    with tempfile.TemporaryDirectory() as folder:
      documents = []
      for tree in (old, new):
        out = pathlib.Path(folder) / "report.json"
        report(tree, run.absolute(), out)
        documents.append(json.loads(out.read_text()))
    rows.append({"run": run.parent.name if run.name == "run" else run.name,
                 "entries": _entries(documents[1]), "differences": counted(
                     list(differences(*documents)))})
  return rows


def _entries(value: Any) -> int:
  if isinstance(value, Mapping | list):
    return sum(_entries(one) for one in (value.values() if isinstance(value, Mapping) else value))
  return 1


def poll(tree: pathlib.Path, made: pathlib.Path) -> tuple[float, float]:
  """Median seconds of one poll of the live view of a run that grew by a part: by the clock, of the
  processor."""
  with tempfile.TemporaryDirectory(dir=made.parent) as folder:
    place = pathlib.Path(folder) / "run"
    for path in sorted(made.rglob("*")):
      target = place / path.relative_to(made)
      if path.is_dir():
        target.mkdir(parents=True, exist_ok=True)
      elif path.suffix != ".parquet":
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(path.read_bytes())
    said = json.loads(command(tree, ["-c", _POLL, str(made), str(place), str(_POLLED),
                                     *_MODULES])[2])
  return float(np.median(said["wall"])), float(np.median(said["cpu"]))


def timed(old: pathlib.Path, new: pathlib.Path, folder: pathlib.Path, ranks: Sequence[int],
          steps: int, rounds: int, progress: Callable[[str, int], Callable[[int], None]]
          ) -> list[dict[str, Any]]:
  """Times report, `watch --once` and a poll of a growing run for both versions.

  Args:
    old: the older tree.
    new: the newer one.
    folder: where the runs are made.
    ranks: of each made-up run.
    steps: of each.
    rounds: in which each is timed once.
    progress: makes what is called with the number of rounds done.

  Returns:
    A row for each run and command: medians of both in seconds, and the ratio new to old and new to
    new with their intervals, by the clock and by the processor's time.
  """
  rows = []
  for size in ranks:
    processes = max(1, size // 64)
    job = MadeUpJob(ranks=size, steps=steps, processes=processes, hosts=processes, noise=0.05,
                    late={min(17, size - 1): 5e-3}, host_columns=True, faults=_FAULTS)
    made, growing = folder / f"of-{size}", folder / f"growing-{size}"
    made_up_runs.write(made, job)
    made_up_runs.write(growing, job, part_steps=_PART)
    out = folder / "report.json"
    commands: dict[str, Callable[[pathlib.Path], tuple[float, float]]] = {
        "report": functools.partial(_report, run=made, out=out),
        "watch --once": functools.partial(_once, run=made),
        f"a poll after {_PART} more steps": functools.partial(poll, made=growing)}
    for name, call in commands.items():
      arms = {"old": old, "new": new, "new again": new}
      took: dict[str, list[tuple[float, float]]] = {arm: [] for arm in arms}

      def block(arm: str, call: Callable[[pathlib.Path], tuple[float, float]] = call,
                took: dict[str, list[tuple[float, float]]] = took,
                arms: dict[str, pathlib.Path] = arms) -> float:
        took[arm].append(call(arms[arm]))
        return took[arm][-1][0]

      for arm in ("old", "new"):  # files in memory, byte code written
        call(arms[arm])
      paired.interleave({arm: functools.partial(block, arm) for arm in arms}, rounds,
                        progress=progress(f"{name}, {size} ranks", rounds))
      rows.append({"command": name, "ranks": size, "steps": steps, **_row(took)})
  return rows


def _report(tree: pathlib.Path, run: pathlib.Path, out: pathlib.Path) -> tuple[float, float]:
  return report(tree, run, out)


def _once(tree: pathlib.Path, run: pathlib.Path) -> tuple[float, float]:
  return command(tree, ["-m", "jaxpace.cli", "watch", str(run), "--once"])[:2]


def _row(took: Mapping[str, Sequence[tuple[float, float]]]) -> dict[str, Any]:
  row: dict[str, Any] = {}
  for place, what in enumerate(("wall", "cpu")):
    values = {arm: np.array([one[place] for one in own]) for arm, own in took.items()}
    row[what] = {"median_s": {arm: float(np.median(own)) for arm, own in values.items()},
                 "new": paired.ratio_of_means(values["new"], values["old"]).to_json(),
                 "null": paired.ratio_of_means(values["new again"], values["new"]).to_json()}
  row["rounds"] = len(next(iter(took.values())))
  return row


def page(figures: Mapping[str, Any]) -> list[str]:
  """The figures in Markdown."""
  lines = measured.introduction("Two versions on the same runs", dict(figures))
  lines += [figures["note"], ""] if figures["note"] else []
  lines += [f"Old is tree {figures['old']}, new is tree {figures['new']}.", "",
            "## What the reports say", "",
            f"JSON of `jaxpace report` on {len(figures['compared'])} recorded runs, entry by "
            "entry. Numbers count as equal within 1e-9 of each other. A * stands for a place in a "
            "list.", ""]
  lines += measured.table(
      ("run", "entries", "codes added", "other differences"),
      [(row["run"], row["entries"], _times(row, lambda kind: kind == "code added"),
        _times(row, lambda kind: kind != "code added")) for row in figures["compared"]])
  kinds: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
  for row in figures["compared"]:
    for one in row["differences"]:
      kinds.setdefault((one["kind"], one["path"]), []).append({**one, "run": row["run"]})
  if kinds:
    lines += ["Every difference, those of one kind at one path together; the first as an example:",
              ""]
    lines += measured.table(
        ("kind", "where", "runs", "times", "old", "new"),
        [(kind, f"`{path}`", len(own), sum(one["times"] for one in own), _short(own[0]["old"]),
          _short(own[0]["new"])) for (kind, path), own in sorted(kinds.items())])
  if figures["timed"]:
    lines += ["## What they take", "",
              f"Made-up runs of {figures['timed'][0]['steps']} steps with a late rank, pauses and "
              "slow transfers. Commands in processes of their own, start included; a poll is that "
              f"of `jaxpace watch` after {_PART} steps of every rank appeared, the median of "
              f"{_POLLED} in one process. Ratios are of means over "
              f"{figures['timed'][0]['rounds']} rounds with Student's 95 % intervals; *noise* is "
              "the new version against itself.", ""]
    for what, title in (("cpu", "Processor time"), ("wall", "By the clock")):
      lines += measured.table(
          (title, "ranks", "old, s", "new, s", "new to old", "noise"),
          [(row["command"], row["ranks"], row[what]["median_s"]["old"],
            row[what]["median_s"]["new"], _ratio(row[what]["new"]), _ratio(row[what]["null"]))
           for row in figures["timed"]])
  return lines


def _times(row: Mapping[str, Any], wanted: Callable[[str], bool]) -> int:
  return sum(one["times"] for one in row["differences"] if wanted(one["kind"]))


def _short(value: Any) -> str:
  text = "–" if value is None else json.dumps(value, ensure_ascii=False)
  return (text if len(text) <= 120 else text[:117] + "...").replace("|", "\\|")


def _ratio(values: Sequence[float]) -> str:
  return f"{values[0]:.3f} [{values[1]:.3f}, {values[2]:.3f}]"


def _tree(path: pathlib.Path) -> str:
  found = subprocess.run(["git", "-C", str(path), "rev-parse", "--short", "HEAD"],
                         capture_output=True, text=True, check=False)
  return found.stdout.strip() or path.name


def main(argv: list[str]) -> None:
  args = flags.FLAGS
  if len(argv) > 1 or not args.old or not args.runs and not args.ranks:
    raise app.UsageError("Name the older checkout with --old, and recorded runs with --runs.")
  old = pathlib.Path(args.old).absolute()
  if not (old / "jaxpace").is_dir():
    sys.exit(f"versions: {args.old} is no checkout of jaxpace: `git worktree add` makes one.")
  figures = measured.circumstances("experiments.measure.versions")
  runs = [path / "run" if (path / "run").is_dir() else path
          for path in map(pathlib.Path, args.runs)]
  try:
    found = compare(old, HERE, runs)
    print(f"{len(found)} reports compared", file=sys.stderr, flush=True)
    with tempfile.TemporaryDirectory() as folder:
      took = timed(old, HERE, pathlib.Path(folder), [int(one) for one in args.ranks], args.steps,
                   args.rounds, measured.progress)
  except (OSError, RuntimeError) as error:
    sys.exit(f"versions: {error}")
  figures |= {"note": args.note, "old": _tree(old), "new": _tree(HERE), "compared": found,
              "timed": took}
  measured.write(figures, page(figures), pathlib.Path(args.out))


if __name__ == "__main__":
  flags.DEFINE_string("old", "", "Checkout of the older version.")
  flags.DEFINE_list("runs", [], "Recorded runs whose reports are compared.")
  flags.DEFINE_list("ranks", ["8", "1024"], "Sizes of the made-up runs that are timed.")
  flags.DEFINE_integer("steps", 600, "Their steps.", lower_bound=2 * _PART * _POLLED)
  flags.DEFINE_integer("rounds", 8, "Rounds of timing.", lower_bound=2)
  flags.DEFINE_string("note", "", "A sentence on the circumstances, for the page.")
  flags.DEFINE_string("out", "docs/measurements/versions.json",
                      "Where the figures go; a table beside it.")
  app.run(main)
