"""What being measured costs, one loop a process: starts of the program, bare and instrumented, in
turns.

    python -m experiments.measure.overhead_starts

`experiments.measure.overhead` lets several loops take turns in one process. What each then costs
also depends on how many there are: they share the compiler's pool of threads and one heap. A user
has one loop. Here every figure is of a process of its own; a round starts each kind once, in an
order drawn anew. Nothing else should run meanwhile. Writes docs/measurements/overhead_starts.json
and .md. Takes some twenty minutes.
"""

from __future__ import annotations

import json
import os
import pathlib
import random
import subprocess
import sys
import tempfile
import time
from typing import Any

import numpy as np
from absl import app, flags

from experiments.lib import measured
from experiments.lib.paired import METHOD, estimate
from experiments.measure.overhead_loops import Loop, batch_for, mlp, one_device
from experiments.measure.overhead_where import ARMS

_MODULE = "experiments.measure.overhead_starts"
_BLOCK_SECONDS = 0.1


def define_flags() -> None:
  flags.DEFINE_list("sizes_ms", "5,20", "Sizes of the bare step to aim at, in ms.")
  flags.DEFINE_list("arms", ",".join(ARMS), "Kinds of loops.")
  flags.DEFINE_integer("rounds", 14, "Starts of each kind.", lower_bound=4)
  flags.DEFINE_float("seconds", 4.0, "How long a loop runs in each start.", lower_bound=0.5)
  flags.DEFINE_string("out", "docs/measurements/overhead_starts.json",
                      "File the figures are written to.")
  flags.DEFINE_string("arm", "", "Internal: run this loop alone.")
  flags.DEFINE_integer("batch", 0, "Internal: with this batch; 0 finds one for the first size.")


def _one_loop(arm: str, batch: int, seconds: float) -> dict[str, float]:
  """Runs one loop; seconds of a step: the median of blocks, and the process's CPU time."""
  paced, recorded, hosts = ARMS[arm]
  state, data = mlp(batch)
  with tempfile.TemporaryDirectory() as root:
    loop = Loop(one_device(), state, data, paced, os.path.join(root, "run") if recorded else None,
                hosts)
    steps = max(2, round(_BLOCK_SECONDS / loop.block(5)))
    loop.block(steps)
    loop.cpu_seconds.clear()
    blocks = []
    until = time.monotonic() + seconds
    while time.monotonic() < until:
      blocks.append(loop.block(steps))
    loop.close()
  return {"wall": float(np.median(blocks)), "cpu": float(np.median(loop.cpu_seconds)),
          "faults": loop.faults / loop.steps}


def _start(*options: str) -> Any:
  command = [sys.executable, "-m", _MODULE, f"--seconds={flags.FLAGS.seconds}", *options]
  done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
  return json.loads(done.stdout.splitlines()[-1])


def _measure(size: str, rounds: int, arms: list[str]) -> dict[str, Any]:
  batch = _start(f"--sizes_ms={size}", "--arm=bare", "--batch=0")["batch"]
  order = random.Random(0)
  found: dict[str, list[dict[str, float]]] = {arm: [] for arm in arms}
  say = measured.progress(f"{size} ms", rounds)
  for done in range(rounds):
    for arm in order.sample(arms, len(arms)):
      found[arm].append(_start(f"--arm={arm}", f"--batch={batch}"))
    say(done + 1)
  figures = {arm: {key: np.array([one[key] for one in starts]) for key in starts[0]}
             for arm, starts in found.items()}
  bare = figures["bare"]
  entry: dict[str, Any] = {"batch": batch, "bare_ms": estimate(bare["wall"] * 1e3).to_json(),
                           "arms": {}}
  for arm in arms:
    if arm == "bare":
      continue
    one = figures[arm]
    entry["arms"][arm] = {"percent": estimate((one["wall"] / bare["wall"] - 1) * 100).to_json(),
                          "wall_us": estimate((one["wall"] - bare["wall"]) * 1e6).to_json(),
                          "cpu_us": estimate((one["cpu"] - bare["cpu"]) * 1e6).to_json(),
                          "faults": round(float(np.median(one["faults"])), 2)}
    print(f"{size} ms  {arm:<30} {entry['arms'][arm]}", flush=True)
  entry["starts"] = {arm: [round(value * 1e3, 4) for value in one["wall"]]
                     for arm, one in figures.items()}
  return entry


def lines(figures: dict[str, Any]) -> list[str]:
  """The figures as a page."""
  lines = measured.introduction("What being measured costs, one loop a process", figures)
  rounds = len(next(iter(next(iter(figures["sizes"].values()))["starts"].values())))
  lines += ["Each start is a process of its own that runs one loop; a round starts each kind once. "
            "Differences and ratios are within a round. "
            f"{measured.about_intervals(METHOD, rounds)} `bare again` is the A/A control.", ""]
  if figures.get("intervals") != METHOD:
    lines += ["Wall times were worked out again from the starts, which were kept; CPU times were "
              "not, so theirs are medians with percentile-bootstrap intervals, which are too "
              "narrow for so few rounds ([intervals](intervals.md)).", ""]
  for entry in figures["sizes"].values():
    median, low, high = entry["bare_ms"]
    lines += measured.table(
        [f"loop, bare step {median:.3g} [{low:.3g}, {high:.3g}] ms", "%", "wall, µs a step",
         "CPU, µs a step", "page faults a step"],
        [[arm, *(_cell(one[key]) for key in ("percent", "wall_us", "cpu_us")), one["faults"]]
         for arm, one in entry["arms"].items()])
  return lines


def _cell(interval: list[float]) -> str:
  return f"{interval[0]:.3g} [{interval[1]:.3g}, {interval[2]:.3g}]"


def main(_: list[str]) -> None:
  measured.keep_memory(_MODULE)
  given = flags.FLAGS
  if given.arm:
    if given.batch:
      print(json.dumps(_one_loop(given.arm, given.batch, given.seconds)))
    else:
      print(json.dumps({"batch": batch_for(one_device(), float(given.sizes_ms[0]) * 1e-3)}))
    return
  if unknown := set(given.arms) - set(ARMS):
    raise app.UsageError(f"--arms: {', '.join(sorted(unknown))} is none of {', '.join(ARMS)}.")
  arms = list(dict.fromkeys(["bare", *given.arms]))
  figures = {**measured.circumstances(_MODULE),
             "sizes": {size: _measure(size, given.rounds, arms) for size in given.sizes_ms}}
  measured.write(figures, lines(figures), pathlib.Path(given.out))


if __name__ == "__main__":
  define_flags()
  app.run(main)
