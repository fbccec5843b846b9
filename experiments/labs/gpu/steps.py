"""What instrumenting costs a train step: arms that take turns in one process; and its bits."""

from __future__ import annotations

import functools
import importlib.util
import os
import tempfile
from collections.abc import Callable

import jax
import numpy as np

from experiments.labs.gpu import hosttime, transformer
from experiments.labs.gpu.bench import Bench
from experiments.labs.gpu.loops import Loop, Program, calibrated, instrumented, marked
from experiments.lib.paired import Estimate, estimate, interleave

LIMITS = {"20ms": 0.2, "2ms": 1.0}
"""Percent of a bare step that instrumenting may cost, by size."""

BASE = "bare"


def extra_percent(figures: dict[str, np.ndarray], arm: str) -> Estimate:
  """What an arm costs above bare in the same round, percent: mean, and its 95 % interval."""
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
    bench.figure(f"{arm}, above {BASE}", estimate((figures[arm] - figures[BASE]) * 1e6), "us")
    extra = extra_percent(figures, arm)
    if arm in ("bare again", "callback"):
      bench.figure(f"{arm}, above {BASE}", extra, "%")
    else:
      bench.at_most(f"{arm}, above {BASE}", extra, LIMITS[name], "%")
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
  arms: dict[str, Callable[[], Loop]] = {
      "bare": lambda: Loop(bare), "bare again": lambda: Loop(bare),
      "stamped": lambda: Loop(stamped),
      "callback": lambda: Loop(Program(bench, size, "stamped", "callback"))}
  if bench.size != "tiny":
    arms |= {arm: lambda arm=arm: Loop(Program(bench, size, arm))  # type: ignore[misc]
             for arm in ("paced", *marked(bench))}
  if folder is not None:
    arms["recorded"] = lambda: Loop(stamped, os.path.join(folder, "run"))
  loops: dict[str, Loop] = {}
  failed: dict[str, str] = {}
  for arm, make in arms.items():
    try:
      loops[arm] = make()
      bench.say(f"{arm} is compiled")
    except Exception as error:
      if arm == BASE:
        raise
      failed[arm] = f"{type(error).__name__}: {str(error)[:300]}"
  return loops, failed


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
  timed = (*instrumented(bench), *marked(bench))
  for arm, program in (arms | {arm: Program(bench, size, arm) for arm in timed}).items():
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
  for arm in timed:
    count = differing(states[BASE], states[arm])
    bench.holds(f"{BASE} against {arm}: the same bits after {steps} steps", count == 0,
                f"{count} of {words} differ")
  if not steady:
    bench.note(
        "Bare steps differ among themselves here: what differs above need not be jaxpace's doing.")
