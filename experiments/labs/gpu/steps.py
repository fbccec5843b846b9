"""What instrumenting costs a train step: arms that take turns in one process, and one loop a
process; and its bits."""

from __future__ import annotations

import functools
import importlib.util
import json
import os
import pathlib
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from experiments.labs.gpu import hosttime, transformer
from experiments.labs.gpu.bench import Bench
from experiments.labs.gpu.loops import Loop, Program, calibrated, instrumented
from experiments.lib.paired import Estimate, estimate, interleave

LIMITS = {"20ms": 0.2, "2ms": 1.0}
"""Percent of a bare step that instrumenting may cost, by size."""

BASE = "bare"


def extra_percent(figures: dict[str, np.ndarray], arm: str) -> Estimate:
  """What an arm costs above the bare one of the same round, percent: mean, and its 95 %
  interval."""
  return estimate((figures[arm] / figures[BASE] - 1) * 100)


def run(bench: Bench, name: str) -> None:
  """Sections steps_20ms and steps_2ms."""
  read = hosttime.reader(bench)
  hosttime.note_offset(bench, read, bench.times(200, 100, 20))
  size = calibrated(bench, name)
  bench.figure("model and batch", str(size._asdict()))
  recorder = importlib.util.find_spec("pyarrow") is not None
  if not recorder:
    bench.note("pyarrow is not installed: the arm with a running Recorder is left out.")
  with tempfile.TemporaryDirectory() as folder:
    loops, failed = _loops(bench, size, folder if recorder else None)
    bare_s = min(loops[BASE].block(10) for _ in range(3))
    steps = max(2, round((0.1 if bench.size != "tiny" else 0.01) / bare_s))
    callback_s = loops["callback"].block(4) if "callback" in loops else 0.0
    round_s = steps * (bare_s * (len(loops) - 1) + callback_s)
    rounds = int(np.clip(0.8 * bench.left_s() / round_s, 4, bench.times(120, 40, 4)))
    bench.say(f"{rounds} rounds of {steps} steps of each of {', '.join(loops)}")
    try:
      figures = interleave({arm: functools.partial(loop.block, steps)
                            for arm, loop in loops.items()}, rounds)
    finally:
      for loop in loops.values():
        loop.close()
  bench.raw["seconds_a_step"] = {arm: [float(f"{value:.7g}") for value in values]
                                 for arm, values in figures.items()}
  bench.figure("bare step", estimate(figures[BASE] * 1e3), "ms")
  for arm in figures:
    if arm == BASE:
      continue
    bench.figure(f"{arm}, above bare", estimate((figures[arm] - figures[BASE]) * 1e6), "us")
    extra = extra_percent(figures, arm)
    if arm in ("bare again", "callback"):
      bench.figure(f"{arm}, above bare", extra, "%")
    else:
      bench.at_most(f"{arm}, above bare", extra, LIMITS[name], "%")
      bench.figure(f"{arm}: the interval's upper end is within the limit",
                   extra.high <= LIMITS[name])
  for arm, why in failed.items():
    bench.holds(f"{arm} runs", False, why)
  hosttime.note_offset(bench, read, bench.times(200, 100, 20))


def _loops(bench: Bench, size: transformer.Size,
           folder: str | None) -> tuple[dict[str, Loop], dict[str, str]]:
  """Every arm's loop, the bare one first; and why others could not be made."""
  bare = Program(bench, size, "bare")
  stamped = Program(bench, size, "stamped")
  arms: dict[str, Callable[[int], Loop]] = {
      "bare": lambda _: Loop(bare), "bare again": lambda _: Loop(bare),
      "stamped": lambda _: Loop(stamped),
      "callback": lambda _: Loop(Program(bench, size, "stamped", "callback"))}
  if bench.size != "tiny":
    arms["paced"] = lambda _: Loop(Program(bench, size, "paced"))
  if folder is not None:
    arms["recorded"] = lambda turns: Loop(stamped, os.path.join(folder, "run"), turns)
  loops: dict[str, Loop] = {}
  failed: dict[str, str] = {}
  for arm, make in arms.items():
    try:
      loops[arm] = make(len(arms))
      bench.say(f"{arm} is compiled")
    except Exception as error:
      if arm == BASE:
        raise
      failed[arm] = f"{type(error).__name__}: {str(error)[:300]}"
  return loops, failed


# One loop a process.


def one_loop(bench: Bench, name: str, arm: str, batch: int, seconds: float) -> dict[str, Any]:
  """Runs one arm alone: mean and median seconds of a step over its blocks."""
  size = transformer.SIZES[name if bench.size != "tiny" else "tiny"]._replace(batch=batch)
  loop = Loop(Program(bench, size, arm))
  took = loop.block(5)
  steps = max(2, round(0.1 / took))
  loop.block(steps)
  blocks: list[float] = []
  end = time.monotonic() + seconds
  while not blocks or time.monotonic() < end:
    blocks.append(loop.block(steps))
  return {"arm": arm, "median_s": float(np.median(blocks)), "mean_s": float(np.mean(blocks)),
          "blocks": len(blocks)}


def run_alone(bench: Bench, name: str) -> None:
  """Sections alone_20ms and alone_2ms: bare, stamped and paced, a process each, the order drawn
  anew each round."""
  batch = calibrated(bench, name).batch
  arms = ["bare", "stamped", "paced"]
  order = random.Random(0)
  figures: dict[str, list[float]] = {arm: [] for arm in arms}
  rounds, longest = bench.times(6, 3, 1), 0.0
  for done in range(rounds):
    start = time.monotonic()
    if done and bench.left_s() < 1.2 * longest:
      bench.note(f"There was time for {done} of {rounds} rounds.")
      break
    for arm in order.sample(arms, len(arms)):
      figures[arm].append(_child(bench, name, arm, batch, bench.times(4, 3, 0)))
    longest = max(longest, time.monotonic() - start)
    bench.say(f"round {done + 1} of {rounds}: "
              + ", ".join(f"{a} {v[-1] * 1e3:.4f} ms" for a, v in figures.items()))
  kept = {arm: np.asarray(values) for arm, values in figures.items()}
  bench.raw["seconds_a_step"] = figures
  bench.figure("bare step, a process of its own", estimate(kept[BASE] * 1e3), "ms")
  bench.figure("one bare process against another: largest over smallest",
               float((kept[BASE].max() / kept[BASE].min() - 1) * 100), "%")
  for arm in arms[1:]:
    bench.at_most(f"{arm}, a process of its own, above bare", extra_percent(kept, arm),
                  LIMITS[name], "%")


def _child(bench: Bench, name: str, arm: str, batch: int, seconds: float) -> float:
  with tempfile.TemporaryDirectory() as folder:
    out = pathlib.Path(folder) / "loop.json"
    command = [sys.executable, "-m", "experiments.labs.gpu_check",
               f"--one-loop={name},{arm},{batch},{seconds}", f"--child={out}",
               f"--platform={bench.platform}", f"--clock={bench.clock}", f"--size={bench.size}"]
    done = subprocess.run(command, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                          timeout=180)
    if done.returncode or not out.exists():
      raise RuntimeError(
          f"The process of {arm} ended with {done.returncode}: {done.stdout[-2000:]}")
    return float(json.loads(out.read_text())["median_s"])


# Bits.


def differing(one: list[np.ndarray], other: list[np.ndarray]) -> int:
  """How many words of two states differ."""
  return sum(int(np.count_nonzero(a != b)) for a, b in zip(one, other, strict=True))


def run_bits(bench: Bench) -> None:
  """Sections bitwise and bitwise_fixed: 50 steps of the smaller model, donated, bare against
  instrumented."""
  size = transformer.SIZES["2ms" if bench.size != "tiny" else "tiny"]
  steps = bench.times(50, 50, 5)
  states = {}
  bare = Program(bench, size, "bare")
  arms = {"bare": bare, "bare again": bare, "bare, compiled anew": Program(bench, size, "bare")}
  for arm, program in (arms | {arm: Program(bench, size,
                                            arm) for arm in instrumented(bench)}).items():
    loop = Loop(program)
    loop.block(steps - 2)
    states[arm] = loop.bits()
    bench.say(f"{arm}: {steps} steps done")
  words = sum(leaf.size for leaf in states["bare"])
  start = [np.asarray(leaf).view(np.uint32) if np.ndim(leaf) else np.asarray(leaf)
           for leaf in jax.tree.leaves(transformer.fresh(size))]
  bench.holds("the steps trained: most words are not what they were",
              differing(start, states["bare"]) > words // 2,
              f"{differing(start, states['bare'])} of {words}")
  steady = True
  for arm in ("bare again", "bare, compiled anew"):
    count = differing(states["bare"], states[arm])
    steady &= count == 0
    bench.figure(f"bare against {arm}: words that differ", count)
  for arm in instrumented(bench):
    count = differing(states["bare"], states[arm])
    bench.holds(f"bare against {arm}: the same bits after {steps} steps", count == 0,
                f"{count} of {words} differ")
  if not steady:
    bench.note(
        "Bare steps differ among themselves here: what differs above need not be jaxpace's doing.")
