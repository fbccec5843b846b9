"""What only an NVIDIA GPU can tell about jaxpace on one, in one program that asserts and prints its
figures.

    python -m experiments.labs.gpu_check                            # all sections; about 9 minutes
    python -m experiments.labs.gpu_check --quick                    # fewer repetitions; about 4 minutes
    python -m experiments.labs.gpu_check --only=timestamp,delay         # some sections
    python -m experiments.labs.gpu_check --list

It needs jax with its CUDA plugin (`pip install "jax[cuda13]"`), numpy and the checkout on
PYTHONPATH; pyarrow for the arm in which a `jaxpace.Recorder` runs. What is missing is said, and the
rest is done.

Every section runs in a process of its own, so that neither an error on the device nor a hang nor
XLA's flags reach the others; a section that fails, crashes or takes too long counts as failed. Ends
with 0 if all is well or no GPU is visible (one line says so), 1 if a check failed, 2 for a bad
argument. Writes --out (.json) and a Markdown table beside it after each section, so that an end
before time loses only what had not been done.
"""  # noqa: E501

from __future__ import annotations

import argparse
import dataclasses
import functools
import importlib
import json
import os
import pathlib
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Sequence
from typing import Any

ROOT = pathlib.Path(__file__).resolve().parents[2]
if str(ROOT) not in sys.path:  # started as a file
  sys.path.insert(0, str(ROOT))

from experiments.labs.gpu import hosttime  # noqa: E402
from experiments.labs.gpu.bench import Bench, shown  # noqa: E402
from experiments.lib import measured  # noqa: E402

NO_GRAPHS = "--xla_gpu_enable_command_buffer="


@dataclasses.dataclass(frozen=True)
class Section:
  """A part that runs in a process of its own."""

  module: str
  about: str
  limit_s: float
  function: str = "run"
  arguments: tuple[str, ...] = ()
  xla_flags: str = ""
  cached: bool = True  # whether what other sections compiled may be used


SECTIONS = {
    "machine": Section("machine", "GPU, driver and versions", 40),
    "stamp": Section("stamps", "resolution, order and cost of stamps", 60),
    "delay": Section("delays", "delays asked, and what is out of range", 60),
    "injected": Section("injected",
                        "known lengths before and after the collective; delays a pacer asks for",
                        60),
    "whole_loop": Section("whole_loop", "no way through the host, by trace and by program", 75,
                          cached=False),
    "steps_2ms": Section("steps", "overhead on a step of about 2 ms", 75, arguments=("2ms",)),
    "steps_20ms": Section("steps", "overhead on a step of about 20 ms", 130, arguments=("20ms",)),
    "bitwise": Section("steps", "parameters after 50 steps", 60, "run_bits", cached=False),
    "host_time": Section("hosttime", "device time against the host's clock", 30),
    "stamp_callback": Section("stamps", "the host callback clock beside it", 30, "run_callback"),
    "marks": Section("marks",
                     "marks of observed programs: arrival, cost, truth, no host in the loop", 60),
    "processes": Section("processes", "observed steps over NCCL: bits, overhead, who is late", 150,
                         cached=False),
    "stamp_no_graphs": Section("stamps", "stamps with command buffers off", 40,
                               xla_flags=NO_GRAPHS),
    "bitwise_fixed": Section("steps", "the same with --xla_gpu_deterministic_ops", 60, "run_bits",
                             cached=False, xla_flags="--xla_gpu_deterministic_ops=true"),
}
"""In order of what matters most, in case time runs out."""


def arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
  """Reads the command line; ends the program with status 2 where it is bad."""
  parser = argparse.ArgumentParser(prog="python -m experiments.labs.gpu_check", allow_abbrev=False,
                                   description="Checks jaxpace on an NVIDIA GPU.")
  parser.add_argument("--only", default="", help="sections to run, separated by commas")
  parser.add_argument("--quick", action="store_true", help="fewer repetitions")
  parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("gpu.json"),
                      help="file for the figures (.json)")
  parser.add_argument("--limit_s", type=float, default=570.0,
                      help="seconds after which no section is started")
  parser.add_argument("--list", action="store_true", help="list the sections and end")
  parser.add_argument("--platform", default="gpu",
                      help="of the devices; cpu tries the program itself, not a GPU")
  parser.add_argument("--clock", default="",
                      help="clock under test; stream on a GPU, native on the CPU")
  hidden = argparse.SUPPRESS
  parser.add_argument("--size", choices=("full", "quick", "tiny"), default="", help=hidden)
  parser.add_argument("--child", type=pathlib.Path, help=hidden)
  parser.add_argument("--section", default="", help=hidden)
  given = parser.parse_args(words)
  given.clock = given.clock or ("native" if given.platform == "cpu" else "stream")
  given.size = given.size or ("quick" if given.quick else "full")
  names = [name.strip() for name in given.only.split(",") if name.strip()]
  if unknown := [name for name in names if name not in SECTIONS]:
    parser.error(f"no section is called {', '.join(unknown)}; there are {', '.join(SECTIONS)}")
  if given.out.suffix != ".json":
    parser.error(f"--out={given.out} must end in .json; the table goes beside it, in .md")
  if not given.limit_s > 0:
    parser.error(f"--limit_s={given.limit_s} must be positive")
  given.sections = names or list(SECTIONS)
  return given


# One section, in its own process.


def run_section(name: str, bench: Bench) -> dict[str, Any]:
  """Runs a section; an exception is printed, kept, and counts as a failure."""
  section = SECTIONS[name]
  result: dict[str, Any] = {}
  try:
    module = importlib.import_module(f"experiments.labs.gpu.{section.module}")
    getattr(module, section.function)(bench, *section.arguments)
  except Exception as error:
    traceback.print_exc()
    result["error"] = f"{type(error).__name__}: {error}"[:2000]
  return bench.to_json() | result


def child(given: argparse.Namespace) -> int:
  """What a section's process does; the results go to a file."""
  from experiments.labs.gpu import machine

  if reason := machine.no_device(given.platform):
    given.child.write_text(json.dumps({"skipped": reason}))
    return 0
  limit = SECTIONS[given.section].limit_s if given.section else 60.0
  bench = Bench(given.platform, given.clock, given.size, min(limit, given.limit_s),
                given.child if given.section else None)
  given.child.write_text(json.dumps(run_section(given.section, bench)))
  return 0


# All of them.


def environment(section: Section, cache: str, folder: str) -> dict[str, str]:
  """What a section's process is started with: memory taken as it is needed, since several share the
  GPU."""
  paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
  added = {"PYTHONPATH": os.pathsep.join(paths), "PYTHONUNBUFFERED": "1",
           "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
  if section.cached:
    added |= {"JAX_COMPILATION_CACHE_DIR": cache, "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}
  flags = f"{os.environ.get('XLA_FLAGS', '')} {section.xla_flags.format(folder=folder)}".strip()
  return {**os.environ, **added, **({"XLA_FLAGS": flags} if flags else {})}


def start(name: str, given: argparse.Namespace, cache: str, left_s: float) -> dict[str, Any]:
  """Runs a section in a process of its own and returns what it left, or what became of it."""
  section = SECTIONS[name]
  with tempfile.TemporaryDirectory() as folder:
    out = pathlib.Path(folder) / "section.json"
    command = [sys.executable, "-m", "experiments.labs.gpu_check", f"--section={name}",
               f"--child={out}", f"--platform={given.platform}", f"--clock={given.clock}",
               f"--size={given.size}", f"--limit_s={left_s}"]
    # Twice its own measure: compiling is not in it.
    longest = max(10.0, min(2 * section.limit_s + 60, left_s))
    process = subprocess.Popen(command, env=environment(section, cache, folder))
    error = ""
    try:
      if status := process.wait(timeout=longest):
        error = f"its process ended with status {status}"
    except subprocess.TimeoutExpired:
      error = f"took longer than {longest:.0f} s and was ended"
    finally:
      if process.poll() is None:
        process.kill()
        process.wait()
    result: dict[str, Any] = json.loads(out.read_text()) if out.exists() else {}
    if not result and not error:
      error = "its process left nothing"
    return result | ({"error": error} if error else {})


def failures(results: dict[str, dict[str, Any]]) -> list[str]:
  """A line for each check that failed and each section that did."""
  lines = []
  for name, result in results.items():
    lines += [f"{name}: {check['name']}: {shown(check['value'])} {check['unit']}"
              + (f" (wanted {check['limit']})" if check["limit"] else "")
              for check in result.get("checks", ()) if not check["passed"]]
    if "error" in result:
      lines.append(f"{name}: {result['error'].splitlines()[0] if result['error'] else 'failed'}")
  return lines


def drift(results: dict[str, dict[str, Any]]) -> tuple[float, float, float]:
  """Drift of the GPU's timer against the host's clock over all sections; see `hosttime.drift`."""
  return hosttime.drift(sorted(offset for result in results.values()
                               for offset in result.get("offsets", ())))


def lines_of(figures: dict[str, Any]) -> list[str]:
  """The Markdown beside the figures."""
  lines = measured.introduction("jaxpace on a GPU", figures)
  failed = failures(figures["sections"])
  checks = sum(len(result.get("checks", ())) for result in figures["sections"].values())
  lines += [
      f"{checks} checks, {len(failed)} failures. Not run: "
      f"{', '.join(figures['not_run']) or 'none'}.", ""]
  lines += [f"- {line}" for line in failed] + ([""] if failed else [])
  if figures.get("drift"):
    ppm, seconds, residual = figures["drift"]
    lines += [f"The GPU's timer against the host's clock over {seconds:.0f} s: {ppm:.4g} ppm, at "
              f"most {residual * 1e-3:.4g} us from a straight line.", ""]
  for name, result in figures["sections"].items():
    lines += [f"## {name}: {SECTIONS[name].about}", ""]
    if "error" in result:
      lines += [f"Failed: {result['error'].splitlines()[0]}", ""]
    rows = [(check["name"], f"{shown(check['value'])} {check['unit']}".strip(),
             check["limit"] or "yes", "passed" if check["passed"] else "**failed**")
            for check in result.get("checks", ())]
    rows += [(figure["name"], f"{shown(figure['value'])} {figure['unit']}".strip(), "", "")
             for figure in result.get("figures", ())]
    if rows:
      lines += measured.table(("what", "seen", "wanted", ""),
                              [[str(cell).replace("|", "\\|") for cell in row]
                               for row in rows])
    lines += [f"{note}\n" for note in result.get("notes", ())]
  return lines


def main(words: Sequence[str] | None = None) -> int:
  """Runs the sections and returns the status to end with."""
  given = arguments(words)
  if given.list:
    print("\n".join(f"{name:<16} {section.about}" for name, section in SECTIONS.items()))
    return 0
  if given.child is not None:
    return child(given)
  begun = time.monotonic()
  # not without ending the section's process
  signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
  figures: dict[str, Any] = (measured.circumstances("experiments.labs.gpu_check")
                             | {"sections": {}, "not_run": []})
  left = functools.partial(_left, begun, given.limit_s)
  with tempfile.TemporaryDirectory() as cache:
    for number, name in enumerate(given.sections):
      if left() < 15:
        figures["not_run"] = given.sections[number:]
        break
      print(f"[{time.monotonic() - begun:5.0f} s] {name}: {SECTIONS[name].about}", flush=True)
      result = start(name, given, cache, left())
      if "skipped" in result:
        print(f"No GPU is visible to JAX, so nothing was checked: {result['skipped']}")
        return 0
      if "error" in result:
        print(f"  FAILED  {name}: {result['error'].splitlines()[0]}", flush=True)
      figures["sections"][name] = result
      found = drift(figures["sections"])
      figures["drift"] = list(found) if found[1] > 0 else None
      _write(figures, given.out)
  _write(figures, given.out)
  return _verdict(figures, given)


def _left(begun: float, limit_s: float) -> float:
  return limit_s - (time.monotonic() - begun)


def _write(figures: dict[str, Any], out: pathlib.Path) -> None:
  out.parent.mkdir(parents=True, exist_ok=True)
  out.write_text(json.dumps(figures, indent=1) + "\n")
  out.with_suffix(".md").write_text("\n".join(lines_of(figures)).rstrip("\n") + "\n")


def _verdict(figures: dict[str, Any], given: argparse.Namespace) -> int:
  print("\n" + "\n".join(lines_of(figures)))
  failed = failures(figures["sections"])
  print(f"Written to {given.out} and {given.out.with_suffix('.md')}.")
  if figures["not_run"]:
    print(f"There was no time for: {', '.join(figures['not_run'])}. Run them with --only.")
  print(f"{len(failed)} failures." if failed else "All checks passed.")
  return 1 if failed else 0


if __name__ == "__main__":
  sys.exit(main())
