"""A command in a process of its own: what it said, and what it took."""

from __future__ import annotations

import json
import os
import pathlib
import platform
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from absl import flags


class Ended(NamedTuple):
  """A command that succeeded."""

  said: str  # standard output
  wall: float  # s, the interpreter's start included
  cpu: float  # s, user and system, of it and the children it waited for
  # GiB of resident memory, at most at once; what this process had when it forked counts, if that is
  # more
  peak: float

  def figures(self) -> dict[str, float]:
    """By the names they have in a file of figures."""
    return {"wall_s": self.wall, "cpu_s": self.cpu, "peak_gib": self.peak}


def run(command: Sequence[str], cores: int | None = None) -> Ended:
  """Runs a command from the repository's root, on so many of the cores allowed here; all of them by
  default.

  Raises:
    RuntimeError: it failed; the end of what it wrote to standard error is in the message.
  """
  allowed = sorted(os.sched_getaffinity(0))[:cores]
  with tempfile.TemporaryFile("w+") as output, tempfile.TemporaryFile("w+") as errors:
    begin = time.perf_counter()
    process = subprocess.Popen(command, stdout=output, stderr=errors,
                               cwd=pathlib.Path(__file__).parents[2],
                               preexec_fn=lambda: os.sched_setaffinity(0, allowed))
    _, status, usage = os.wait4(process.pid, 0)
    wall, process.returncode = time.perf_counter() - begin, os.waitstatus_to_exitcode(status)
    for file in (output, errors):
      file.seek(0)
    said, complaint = output.read(), errors.read()
  if process.returncode:
    raise RuntimeError(
        f"{' '.join(command)} ended with status {process.returncode}: {complaint[-2000:]}")
  return Ended(said, wall, usage.ru_utime + usage.ru_stime, gibibytes(usage))


def reports(directory: pathlib.Path, repeats: int,
            cores: int) -> tuple[list[dict[str, float]], dict[str, Any]]:
  """Makes the report on a run, each time in a process of its own, and prints what it takes.

  Args:
    directory: run directory; gets `report.json`.
    repeats: how often.
    cores: that it may use.

  Returns:
    What each took, as `Ended.figures`; and the last report.
  """
  output = directory.resolve() / "report.json"
  took: list[dict[str, float]] = []
  document: dict[str, Any] = {}
  command = [sys.executable, "-m", "jaxpace.cli", "report", str(directory.resolve()), "--json",
             str(output)]
  for i in range(repeats):
    ended = run(command, cores)
    document = json.loads(output.read_text())
    took.append(ended.figures())
    print(
        f"  report {i + 1}: {ended.wall:.2f} s wall, {ended.cpu:.2f} s processor, "
        f"{ended.peak:.2f} GiB", flush=True)
  return took, document


def gibibytes(usage: resource.struct_rusage) -> float:
  """Peak resident memory; Linux counts it in KiB, macOS in bytes."""
  return usage.ru_maxrss * (1 if sys.platform == "darwin" else 1024) / 2**30


def summary(runs: Sequence[Mapping[str, float]]) -> dict[str, dict[str, float]]:
  """Median and greatest of every figure over the runs."""
  return {name: {"median": round(statistics.median(r[name] for r in runs), 3),
                 "worst": round(max(r[name] for r in runs), 3)} for name in runs[0]}


def circumstances(module: str, given: Sequence[flags.FlagHolder[Any]],
                  measured: str) -> dict[str, Any]:
  """What goes before the figures: the command with its flags, what was measured, the machine."""
  return {"command": " ".join(["python -m", module,
                               *(f"--{flag.name}={flag.value}" for flag in given)]),
          "measured": measured, "machine": platform.machine(), "python": platform.python_version()}


def write(figures: Mapping[str, Any], output: str) -> None:
  """Writes figures as JSON, and prints them."""
  text = json.dumps(figures, indent=1)
  path = pathlib.Path(output)
  path.parent.mkdir(parents=True, exist_ok=True)
  path.write_text(text + "\n")
  print(text)
