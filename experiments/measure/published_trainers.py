"""Published trainers, from their own files, bare and observed: the same bits, every step recorded?

    git clone https://github.com/google/flax sources/flax
    git clone https://github.com/jax-ml/jax sources/jax
    ...
    python -m experiments.measure.published_trainers --sources=sources

Each trainer is the file as published, but for the lines that observe and record its step and for
smaller numbers (published_jitted.py, published_pmapped.py and published_flax.py beside this). The
data are made up, and packages that an example needs for data, vocabulary and logs alone are stood
in for where they are not installed. Each runs bare and observed, by one process with four forced
devices and by two of two devices that gloo connects; after every step all arrays of the step's
arguments and results are compared bit for bit. With --by=run nothing is observed by a line of the
trainer: `jaxpace run` starts what runs bare, and finds the step. With --platform=cuda each process
is a rank on one GPU that all share: each says that it is a host of its own, so that NCCL connects
them through sockets. Writes docs/measurements/published_trainers.json and .md. Takes a minute for
each trainer.
"""

from __future__ import annotations

import json
import os
import pathlib
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from absl import app, flags

from experiments.lib import measured
from experiments.measure.published_examples import EXAMPLES, facts_of, rows_of
from jaxpace.hosts.launch import environment
from jaxpace.runs import ring_file

_MODULE = "experiments.measure.published_trainers"
_ROOT = pathlib.Path(__file__).parents[2]
_LONGEST = 600
"""Seconds after which an arm counts as standing still."""
_MOMENT = 10
"""Seconds that a process has to end after the other one ended badly."""


def define_flags() -> None:
  """Defines this program's flags."""
  flags.DEFINE_string("sources", "", "Folder of the clones: flax, jax, dm-haiku, ....")
  flags.DEFINE_list("trainers", ",".join(EXAMPLES), "Which to run.")
  flags.DEFINE_list("processes", "1,2", "By how many processes: 1, 2 or both; on a GPU as many as "
                    "the trainer has devices.")
  flags.DEFINE_enum("platform", "cpu", ["cpu", "cuda"], "Where they run.")
  flags.DEFINE_enum("by", "observe", ["observe", "run"], "Observed by a line of the trainer, or by "
                    "`jaxpace run`, which finds the step.")
  flags.DEFINE_integer("steps", 20, "Steps of each.", lower_bound=1)
  flags.DEFINE_string("scratch", "", "Folder for what runs leave; bare ones there count again.")
  flags.DEFINE_bool("resume", False, "Keep the rows of other trainers in --out.")
  flags.DEFINE_string("out", "docs/measurements/published_trainers.json",
                      "File the figures are written to.")


def _placed(platform: str, devices: int, process: int) -> dict[str, str]:
  """What a process is told of its devices."""
  if platform == "cpu":
    return {"JAX_PLATFORMS": "cpu",
            "XLA_FLAGS": f"--xla_force_host_platform_device_count={devices}"}
  return {"JAX_PLATFORMS": "cuda,cpu", **environment.own_host(f"host{process}"),
          # Two starts of one program sum in the same order.
          "XLA_FLAGS": "--xla_gpu_deterministic_ops=true"}


def arm(name: str, sources: pathlib.Path, steps: int, how: str, folder: pathlib.Path,
        processes: int, platform: str = "cpu") -> list[dict[str, Any]]:
  """One trainer in processes of its own; what each left in `folder`. `how` is "bare", "observed" or
  "run"."""
  command = [sys.executable, "-m", "experiments.measure.published_examples", name, str(sources),
             str(steps), "observed" if how == "observed" else "bare", str(folder)]
  if how == "run":
    command = [sys.executable, "-m", "jaxpace", "run", "--out", str(folder / "run"), "--", *command]
  devices = EXAMPLES[name].devices // processes
  paths = [str(_ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
  shared = os.environ | {"MPLBACKEND": "agg", "PYTHONPATH": os.pathsep.join(paths),
                         "KERAS_BACKEND": "jax"}
  if processes > 1:
    with socket.socket() as probe:
      probe.bind(("localhost", 0))
      shared["TRAINER_COORDINATOR"] = f"localhost:{probe.getsockname()[1]}"
      shared["TRAINER_PROCESSES"] = str(processes)
  children = []
  for process in range(processes):
    own = shared | _placed(platform, devices, process) | (
        {"TRAINER_PROCESS": str(process)} if processes > 1 else {})
    with (folder / f"output{process}.txt").open("w") as output:
      children.append(subprocess.Popen(command, cwd=folder, env=own, stdout=output,
                                       stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL))
  _wait(children)
  return [_left(folder, process) for process in range(processes)]


def _wait(children: Sequence[subprocess.Popen[bytes]]) -> None:
  """Waits for all; where one ends badly the others are given a moment."""
  end = time.monotonic() + _LONGEST
  while time.monotonic() < end and any(child.poll() is None for child in children):
    if any(child.poll() for child in children):
      end = min(end, time.monotonic() + _MOMENT)
    time.sleep(0.1)
  for child in children:
    if child.poll() is None:
      child.kill()
      child.wait()


def _left(folder: pathlib.Path, process: int) -> dict[str, Any]:
  left = folder / f"left{process}.json"
  if left.exists():
    return json.loads(left.read_text())
  output = (folder / f"output{process}.txt").read_text(errors="replace")
  return {"digests": [], "failed": f"ended early or stood still:\n{output[-3000:]}", "said": [],
          "plan": {}, "standing_in": []}


def run(name: str, sources: pathlib.Path, steps: int, processes: int, scratch: pathlib.Path,
        by: str = "observe", platform: str = "cpu") -> dict[str, Any]:
  """A trainer bare and observed, compared."""
  seen = "observed" if by == "observe" else "run"
  example = EXAMPLES[name]
  row: dict[str, Any] = {
      "trainer": name, "file": example.file, "how": example.how, "processes": processes, "by": by,
      "lines_changed": 0 if by == "run" else _lines(example.edits)}
  folders = {which: scratch / f"{name}_{processes}_{steps}_{which}"
             for which in ("bare", seen)}
  left = {}
  for which, folder in folders.items():
    if which == "bare" and (folder / "whole").exists():
      left[which] = [_left(folder, process) for process in range(processes)]
      continue
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    left[which] = arm(name, sources, steps, which, folder, processes, platform)
    failed = [one["failed"] for one in left[which] if one["failed"]]
    if failed:
      return {**row, "failed": f"{which}: {_clearest(failed)}"}
    (folder / "whole").touch()
  return row | _compared(left["bare"], left[seen]) | {
      "largest": _largest(folders, processes), **left[seen][0]["plan"],
      "said": left[seen][0]["said"], "standing_in": left["bare"][0]["standing_in"],
      **_reported(folders[seen] / "run"), **(_found(folders[seen]) if by == "run" else {})}


def _found(folder: pathlib.Path) -> dict[str, Any]:
  """What `jaxpace run` took for the step, what of it is timed, and what was said."""
  info = folder / "run" / "run.json"
  settings = json.loads(info.read_text()).get("settings", {}) if info.exists() else {}
  said = [line for line in (folder / "output0.txt").read_text(errors="replace").splitlines()
          if line.startswith("jaxpace: ")]
  step, run = settings.get("step"), folder / "run"
  programs = (ring_file.read_plan(run, 0)[-1].programs if ring_file.path_of(run, 0).exists()
              else ())
  taken = (step or {}).get("programs", [])
  return {"step": step, "printed": said,
          **facts_of([one for one in programs if one.name in taken])}


def _lines(edits: Iterable[tuple[str, str]]) -> int:
  return sum(1 for _, new in edits for line in new.splitlines()
             if "_watched" in line or "_observe" in line)


def _clearest(failed: list[str]) -> str:
  """Of several failures the one that is not of another process's going away."""
  return min(failed, key=lambda one: "gloo" in one.lower() or "closed" in one.lower())


def _compared(bare: list[dict[str, Any]], observed: list[dict[str, Any]]) -> dict[str, Any]:
  """Which arrays differ, and since which step; of all processes."""
  different: dict[str, int] = {}
  problem = ""
  for process, (one, two) in enumerate(zip(bare, observed, strict=True)):
    if len(one["digests"]) != len(two["digests"]):
      problem = f"{len(one['digests'])} steps bare, {len(two['digests'])} observed"
    for k, (left, right) in enumerate(zip(one["digests"], two["digests"], strict=False)):
      if left.keys() != right.keys():
        problem = f"step {k} has other arrays when observed"
      for path in left:
        if left[path] != right.get(path):
          different.setdefault(f"{process}: {path}", k)
  return {"steps": len(bare[0]["digests"]), "arrays": len(bare[0]["digests"][-1]),
          "different": different, "problem": problem}


def _largest(folders: dict[str, pathlib.Path], processes: int) -> float:
  largest = 0.0
  for process in range(processes):
    one, two = (np.load(folder / f"last{process}.npz") for folder in folders.values())
    largest = max([largest, *(_relative(one[key], two[key]) for key in one.files if key in two)])
  return largest


def _relative(one: np.ndarray, two: np.ndarray) -> float:
  """Largest difference of two arrays, relative to the largest number of the first."""
  one, two = one.astype(np.float64), two.astype(np.float64)
  return float(np.abs(one - two).max(initial=0.0) / (np.abs(one).max(initial=0.0) or 1.0))


def _reported(folder: pathlib.Path) -> dict[str, Any]:
  """What the report says, and how many steps each rank has in the trace."""
  done = subprocess.run([sys.executable, "-m", "jaxpace", "report", str(folder), "--json", "-"],
                        capture_output=True, text=True, check=False, cwd=_ROOT,
                        env=os.environ | {"JAX_PLATFORMS": "cpu"})
  if done.returncode:
    return {"reported_steps": 0, "verdict": "", "report_failed": done.stderr[-2000:]}
  report = json.loads(done.stdout)
  return {"reported_steps": min(rows_of(folder)), "verdict": report["verdict"],
          "verdict_code": report["verdict_code"]}


_WHERE = {
    "cpu": "One process has all the devices, forced on the CPU; two share them and are connected "
           "by gloo.",
    "cuda": "All processes share one GPU, each as a host of its own; NCCL connects them through "
            "sockets."}


def to_markdown(figures: dict[str, Any]) -> str:
  """The page."""
  lines = [
      *measured.introduction("Published trainers, bare and observed", figures),
      "Files as they are published, at these commits, but for the lines that observe and record "
      "the step, and smaller numbers; data made up; what only loads data, makes vocabularies or "
      "writes logs is stood in for where it isn't installed. "
      f"{_WHERE[figures.get('platform', 'cpu')]} After every step all arrays "
      "of the step's arguments and results are compared bit for bit. Recorded: steps of the rank "
      "with the fewest in the trace. Warned: jaxpace said before the first difference that bits "
      "may differ or why the step runs without timestamps. Verdict: code of what the report says "
      "of the job, which nothing disturbed but the machine's other programs. Trainers may be run "
      "one at a time and the record resumed: the command, the date and the load above are the "
      "last one's, and each row has the load average at its own start.", "",
      *(f"- {name}: {commit}" for name, commit in figures["commits"].items()), ""]
  rows = []
  for row in figures["trainers"]:
    if _by(row) == "run":
      continue
    first = [row["trainer"], row["processes"], row.get("load") or "not kept", row["how"]]
    if row.get("failed"):
      rows.append([*first, "fails: " + row["failed"].strip().splitlines()[-1], *[""] * 9])
      continue
    kinds = ", ".join(f"{count} {kind}" for kind, count in row.get("collectives", {}).items())
    rows.append([*first, kinds or "none", row.get("untimed", 0), row.get("marks_a_step", 0),
                 f"{row['reported_steps']} of {row['steps']}", row["arrays"],
                 len(row["different"]), f"{row['largest']:.1e}", warned(row),
                 "; ".join(row.get("bare_reasons", [])), row.get("verdict_code")])
  return "\n".join([*lines, *measured.table(
      ["example", "processes", "load", "how it is compiled", "collectives timed", "not timed",
       "timestamps a step and device", "recorded", "arrays", "that differ", "largest difference",
       "warned", "programs without timestamps, and why", "verdict"], rows),
      *_unchanged(figures), ""])


def _unchanged(figures: dict[str, Any]) -> list[str]:
  """Those that `jaxpace run` started."""
  rows = [_of_run(row) for row in figures["trainers"] if _by(row) == "run"]
  return ["## Started by `jaxpace run`", "",
          "The same trainers, bare but for what ends them after so many steps: `jaxpace run -- "
          "python ...` finds the step. Recorded: steps of the rank with the fewest in the trace. "
          "The arrays are compared as above.", "",
          *measured.table(["example", "processes", "load", "taken for the step", "recorded",
                           "arrays", "that differ", "verdict"], rows)] if rows else []


def _of_run(row: dict[str, Any]) -> list[Any]:
  first = [row["trainer"], row["processes"], row["load"]]
  if row.get("failed"):
    return [*first, "fails: " + row["failed"].strip().splitlines()[-1], "", "", "", ""]
  step = ", ".join((row["step"] or {}).get("programs", [])) or "nothing"
  return [*first, step, f"{row['reported_steps']} of {row['steps']}", row["arrays"],
          len(row["different"]), row.get("verdict_code")]


def _by(row: dict[str, Any]) -> str:
  return row.get("by", "observe")


def warned(row: dict[str, Any]) -> str:
  """Whether jaxpace said something before the first difference; without one, while it ran."""
  first = min(row["different"].values(), default=row["steps"] - 1)
  return "yes" if any(step <= first for step, _ in row["said"]) else "no"


def _commit(clone: pathlib.Path) -> str:
  said = subprocess.run(["git", "-C", str(clone), "rev-parse", "HEAD"], capture_output=True,
                        text=True, check=False)
  return said.stdout.strip()[:12] or "an unknown commit"


def main(argv: list[str]) -> None:
  del argv
  its = flags.FLAGS
  sources = pathlib.Path(its.sources).expanduser().resolve()
  clones = {EXAMPLES[name].file.split("/")[0] for name in its.trainers}
  absent = sorted(name for name in clones if not (sources / name).is_dir())
  if not its.sources or absent:
    raise SystemExit(f"--sources: give the folder that holds clones of {', '.join(absent)}.")
  out = pathlib.Path(its.out)
  before = json.loads(out.read_text()) if its.resume else {"commits": {}, "trainers": []}
  figures: dict[str, Any] = {
      **measured.circumstances(_MODULE), "commits": before["commits"] | {
          name: _commit(sources / name) for name in sorted(clones)}, "steps": its.steps,
      "platform": its.platform,
      "trainers": [row for row in before["trainers"] if row["trainer"] not in its.trainers
                   or str(row["processes"]) not in its.processes or _by(row) != its.by]}
  scratch = pathlib.Path(its.scratch or tempfile.mkdtemp()).resolve()
  for name in its.trainers:
    for processes in map(int, its.processes):
      load = round(os.getloadavg()[0], 1)
      row = {**run(name, sources, its.steps, processes, scratch, its.by, its.platform),
             "load": load}
      for folder in (scratch, sources):  # what others can't have
        row = json.loads(json.dumps(row).replace(f"{folder}/", ""))
      figures["trainers"].append(row)
      # Written after each: what is finished is not lost.
      measured.write(figures, to_markdown(figures).splitlines(), out)
      print(_line(row), file=sys.stderr, flush=True)


def _line(row: dict[str, Any]) -> str:
  start = f"{row['trainer']} by {row['processes']}, {row['by']}: "
  if row.get("failed"):
    return start + f"fails, {row['failed'].strip().splitlines()[-1][:300]}"
  return start + (
      f"{len(row['different'])} of {row['arrays']} arrays differ in {row['steps']} steps"
      f" ({row['largest']:.1e}), {row['reported_steps']} recorded, "
      f"{sum(row.get('collectives', {}).values())} collectives timed, "
      f"{row.get('untimed', 0)} not; {row.get('bare_reasons') or ''} {row['problem']} "
      f"warned {row['said']}; {row['verdict']} {row.get('step') or ''} {row.get('printed') or ''}"
      f"{row.get('report_failed', '')}")


if __name__ == "__main__":
  define_flags()
  app.run(main)
