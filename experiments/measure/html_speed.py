"""Measures `jaxpace report --html` on a large synthetic run: time to make it, size, first paint,
time of a zoom.

    python -m experiments.measure.html_speed
    python -m experiments.measure.html_speed --ranks=1024 --processes=128 --repeats=1
    --output=docs/measurements/html_1024.json

writes the run, makes its page in a process of its own, opens that in a headless Chromium, and
writes the numbers.
"""

from __future__ import annotations

import itertools
import os
import pathlib
import shutil
import statistics
import subprocess
import sys
import tempfile
from typing import Any

from absl import app, flags

from experiments.lib import child, chromium
from jaxpace.testing import made_up_runs
from jaxpace.testing.made_up_faults import Fault

_RANKS = flags.DEFINE_integer("ranks", 64, "Ranks of the synthetic run.", lower_bound=2)
_STEPS = flags.DEFINE_integer("steps", 100_000, "Steps of the synthetic run.", lower_bound=60)
_PROCESSES = flags.DEFINE_integer("processes", 8, "Processes of the synthetic run.", lower_bound=1)
_REPEATS = flags.DEFINE_integer("repeats", 3, "Times the page is made and opened.", lower_bound=1)
_RUN = flags.DEFINE_string("run", None, "Take this run, written before; default is a new one.")
_KEEP = flags.DEFINE_string("keep", None, "Write the run here and keep it.")
_OUTPUT = flags.DEFINE_string("output", "docs/measurements/html_speed.json",
                              "Where the numbers go.")
_TARGET = {"seconds": 20.0, "megabytes": 5.0, "first_paint_s": 2.0}
_FAULTS = (Fault("pause", 30e-3, (0,), probability=0.1, mechanism="gc"),
           Fault("contention", 5e-3, begin=0.5))
_AT_A_TIME = 20_000_000
"""Rank-steps made up at a time."""

_ZOOM = """async times => {
  const took = [], from = document.getElementById('from'), to = document.getElementById('to');
  const low = Number(from.min), high = Number(from.max), frame = () => new Promise(requestAnimationFrame);
  for (let i = 0; i < times; i++) {
    const begin = performance.now(), middle = low + (high - low) * (i + 0.5) / times;
    from.value = Math.round(middle - (high - low) / 8);
    to.value = Math.round(middle + (high - low) / 8);
    document.getElementById('window-form').requestSubmit();
    await frame();
    took.push(performance.now() - begin);
  }
  return took;
}"""  # noqa: E501


def write(run: pathlib.Path) -> None:
  """Writes the run; one so large that its truth would not fit in memory as several attempts, after
  restarts."""
  attempts = -(-_RANKS.value * _STEPS.value // _AT_A_TIME)
  edges = [_STEPS.value * i // attempts for i in range(attempts + 1)]
  print(f"Writing {_RANKS.value} ranks x {_STEPS.value:,} steps to {run} ...", flush=True)
  for attempt, (begin, end) in enumerate(itertools.pairwise(edges)):
    job = made_up_runs.MadeUpJob(ranks=_RANKS.value, steps=end - begin, processes=_PROCESSES.value,
                                 hosts=_PROCESSES.value,
                                 noise=0.05, late={min(17, _RANKS.value - 1): 5e-3},
                                 host_columns=True, faults=_FAULTS, seed=attempt)
    made_up_runs.write(run, job, attempt=attempt, first_step=begin)
    print(f"  {end:,} steps", flush=True)


def make(run: pathlib.Path, page: pathlib.Path) -> dict[str, float]:
  """Makes the page in a new process: wall and processor seconds, interpreter start included, and
  peak resident GiB."""
  command = [sys.executable, "-m", "jaxpace", "report", str(run.resolve()), "--html", str(page)]
  return {**child.run(command).figures(), "megabytes": page.stat().st_size / 1e6}


def look(page: pathlib.Path, program: str) -> dict[str, float]:
  """Opens the page in a new browser: seconds to the first paint and until all is drawn,
  milliseconds of a zoom."""
  from playwright.sync_api import sync_playwright

  with sync_playwright() as playwright:
    browser = playwright.chromium.launch(executable_path=program, args=list(chromium.FLAGS))
    opened = browser.new_page(viewport={"width": 1280, "height": 900})
    said: list[str] = []
    opened.on("console", lambda message: said.append(message.text))
    opened.goto(page.as_uri())
    opened.wait_for_selector("html[data-ready=yes]", timeout=120_000)
    drawn = opened.evaluate("performance.now()") / 1e3
    paint = (opened.evaluate("performance.getEntriesByName('first-contentful-paint')[0].startTime")
             / 1e3)
    zoom = opened.evaluate(_ZOOM, 20)
    browser.close()
  if said:
    raise RuntimeError(f"The browser complains: {said}")
  return {"first_paint_s": paint, "all_drawn_s": drawn, "zoom_ms": statistics.median(zoom),
          "worst_zoom_ms": max(zoom)}


def main(argv: list[str]) -> None:
  if len(argv) > 1:
    raise app.UsageError(f"Unknown arguments: {' '.join(argv[1:])}")
  program = chromium.find()
  if program is None:
    raise app.UsageError("Chromium is needed; on Debian: apt install chromium")
  folder = pathlib.Path(tempfile.mkdtemp(prefix="html-speed-"))
  try:
    run = pathlib.Path(_RUN.value or _KEEP.value or folder / "run")
    if not _RUN.value:
      write(run)
    runs: list[dict[str, Any]] = []
    for i in range(_REPEATS.value):
      runs.append(make(run, folder / "report.html"))
      runs[-1] |= look(folder / "report.html", program)
      print(f"  page {i + 1}: " + ", ".join(f"{name} {value:.2f}"
                                            for name, value in runs[-1].items()), flush=True)
    version = subprocess.run([program, "--version"], capture_output=True, text=True,
                             check=True).stdout.strip()
    result = {
        **child.circumstances(
            "experiments.measure.html_speed", (_RANKS, _STEPS, _PROCESSES, _REPEATS),
            "jaxpace report RUN --html FILE in a new process, interpreter start included; the page "
            "in a new browser; a zoom of all charts over steps, to the next frame"),
        "cores": len(os.sched_getaffinity(0)), "browser": version, "load": os.getloadavg()[0],
        "target": _TARGET, **child.summary(runs)}
    result["within_target"] = (result["wall_s"]["worst"] <= _TARGET["seconds"]
                               and result["megabytes"]["worst"] <= _TARGET["megabytes"]
                               and result["first_paint_s"]["worst"] <= _TARGET["first_paint_s"])
    child.write(result, _OUTPUT.value)
  finally:
    shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
  app.run(main)
