"""Pacing where it can gain nothing and must not cost: ranks that don't affect each other.

    python -m experiments.measure.null_pacing

A barrier model, t[k+1] = max over ranks of (t[k] + c + d) + C, in which no busy time c depends on
another rank's delay d. The delays come from the library's own `Pacer.update`, one state a rank;
each cell runs bare and paced on the same busy times. Also measured here: what one `update` takes at
1,024 ranks, inside a compiled loop.
"""

from __future__ import annotations

import functools
import json
import logging
import os
import pathlib
import platform
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl import app, flags

from jaxpace.coordination import pace_early_ranks
from jaxpace.core.types import Observation, Pacer

BUSY, TRANSFER, COST = 20e-3, 2e-3, 1e-3
TARGET = {"ratio": 1 + COST, "update_us": 10.0}

PACERS: dict[str, Pacer] = {
    "default": pace_early_ranks(cost=COST),
    "eager": pace_early_ranks(threshold=0.0, noise=0.0, share_of_slack=1.0, quantile=0.5,
                              cost=COST),
}
ABOUT = {
    "default": "`pace_early_ranks()` as it comes",
    "eager":
    "thresholds at zero, the whole median earliness as delay: only the bucket holds it back",
}


def normal(rng: np.random.Generator, steps: int, ranks: int) -> np.ndarray:
  """5 % of independent normal jitter: [steps, ranks] s, as all below."""
  return BUSY * (1 + 0.05 * rng.normal(size=(steps, ranks)))


def exponential(rng: np.random.Generator, steps: int, ranks: int) -> np.ndarray:
  """Independent exponential jitter of mean 10 %."""
  return BUSY * (1 + 0.1 * rng.exponential(size=(steps, ranks)))


def pauses(rng: np.random.Generator, steps: int, ranks: int) -> np.ndarray:
  """2 % of normal jitter, and in one step of 200 on each rank a pause as long as two steps."""
  return (BUSY * (1 + 0.02 * rng.normal(size=(steps, ranks))
                  + 2.0 * (rng.random((steps, ranks)) < 0.005)))


def wandering(rng: np.random.Generator, steps: int, ranks: int) -> np.ndarray:
  """Each rank's speed wanders by itself: deviation 10 %, correlated over 200 steps; 2 % of normal
  jitter on top."""
  keep = np.exp(-1 / 200)
  level = np.empty((steps, ranks))
  level[0] = rng.normal(size=ranks)
  for k, shock in enumerate(rng.normal(size=(steps - 1, ranks))):
    level[k + 1] = keep * level[k] + np.sqrt(1 - keep * keep) * shock
  return BUSY * (1 + 0.1 * level + 0.02 * rng.normal(size=(steps, ranks)))


def straggler(rng: np.random.Generator, steps: int, ranks: int) -> np.ndarray:
  """2 % of normal jitter, and one rank later by 30 % throughout."""
  busy = BUSY * (1 + 0.02 * rng.normal(size=(steps, ranks)))
  busy[:, ranks // 2] += 0.3 * BUSY
  return busy


SHAPES: dict[str, Callable[[np.random.Generator, int, int], np.ndarray]] = {
    "normal": normal, "exponential": exponential, "pauses": pauses, "wandering": wandering,
    "straggler": straggler}


@functools.lru_cache(maxsize=8)
def simulation(pacer: Pacer, ranks: int) -> Callable[[jax.Array], dict[str, jax.Array]]:
  """Compiles a run: busy times [steps, ranks] float32 s -> by step the last arrival, mean delay,
  ranks delayed."""
  index = jnp.arange(ranks, dtype=jnp.int32)
  axes: Any = {"step": None, "rank": 0, "arrivals": None, "delays": None, "waits": 0,
               "step_time": None, "job_step_time": None, "job_transfers": None}
  update = jax.vmap(pacer.update, in_axes=(Observation(**axes, job_transfers_now=None), 0))
  start = jax.tree.map(lambda leaf: jnp.stack([jnp.asarray(leaf)] * ranks), pacer.init(ranks))

  def turn(carry: Any, now: tuple[jax.Array, jax.Array]) -> tuple[Any, dict[str, jax.Array]]:
    state, delays = carry
    step, busy = now
    entered = busy + delays
    last = jnp.max(entered)
    seen = Observation(step=step, rank=index, arrivals=busy, delays=delays,
                       waits=(last - entered + np.float32(TRANSFER))[:, None],
                       step_time=last + np.float32(TRANSFER), job_step_time=last
                       + np.float32(TRANSFER), job_transfers=jnp.full((1,), TRANSFER, jnp.float32))
    decision, state = update(seen, state)
    out = {"last": last, "delay": jnp.mean(delays),
           "delayed": jnp.mean((delays > 0).astype(jnp.float32))}
    return (state, decision.delay), out

  def run(busy: jax.Array) -> dict[str, jax.Array]:
    steps = jnp.arange(busy.shape[0], dtype=jnp.int32)
    return jax.lax.scan(turn, (start, jnp.zeros((ranks,), jnp.float32)), (steps, busy))[1]

  return jax.jit(run)


def cell(pacer: Pacer, shape: str, ranks: int, steps: int, seed: int) -> dict[str, float]:
  """One run, bare and paced on the same busy times."""
  names = list(SHAPES)
  rng = np.random.default_rng([seed, names.index(shape), ranks])
  busy = SHAPES[shape](rng, steps, ranks).clip(0.1 * BUSY).astype(np.float32)
  out = {name: np.asarray(value, np.float64)
         for name, value in simulation(pacer, ranks)(jnp.asarray(busy)).items()}
  bare = busy.max(axis=1).astype(np.float64)
  elapsed = float((bare + TRANSFER).sum())
  held = float((out["last"] - bare).sum())
  return {"ratio": float((out["last"] + TRANSFER).sum() / elapsed),
          "held_back_share": held / elapsed, "mean_delay_ms": 1e3 * float(out["delay"].mean()),
          "delayed_share": float(out["delayed"].mean())}


def time_update(ranks: int, repeats: int, loop: int = 2000) -> dict[str, float]:
  """Times one rank's `update` on one core, inside one compiled loop, as in a step: no dispatch in
  it.

  Returns:
    Median, least and greatest us an update, less the same loop without a pacer.
  """
  pacer = PACERS["default"]
  busy = jnp.asarray(normal(np.random.default_rng(0), 1, ranks)[0], jnp.float32)

  def loops(paced: bool) -> Callable[[jax.Array], Any]:
    def turn(k: jax.Array, carry: Any) -> Any:
      state, arrivals, delay = carry
      if paced:
        seen = Observation(step=k, rank=jnp.int32(1), arrivals=arrivals,
                           delays=jnp.zeros_like(arrivals) + delay,
                           waits=jnp.full((16,), 1e-3, jnp.float32), step_time=jnp.float32(BUSY),
                           job_step_time=jnp.float32(BUSY),
                           job_transfers=jnp.full((16,), 1e-3, jnp.float32))
        decision, state = pacer.update(seen, state)
        delay = decision.delay
      # Never the same twice, or the compiler would take the work out of the loop.
      return state, arrivals * np.float32(0.999) + np.float32(1e-3 * BUSY), delay

    start = jax.tree.map(jnp.asarray, pacer.init(ranks))
    return jax.jit(lambda arrivals: jax.lax.fori_loop(0, loop, turn,
                                                      (start, arrivals, jnp.float32(0))))

  def once(run: Callable[[jax.Array], Any]) -> float:
    begin = time.perf_counter()
    jax.block_until_ready(run(busy))
    return 1e6 * (time.perf_counter() - begin) / loop

  with_pacer, without = loops(True), loops(False)
  for run in (with_pacer, without):  # compiles
    once(run)
  figures = [once(with_pacer) - once(without) for _ in range(repeats)]
  return {"median_us": statistics.median(figures), "least_us": min(figures),
          "greatest_us": max(figures), "repeats": repeats, "updates_each": loop}


def pin_to_one_core() -> None:
  """Holds every thread of this process to one core, where the system can (Linux)."""
  tasks = pathlib.Path("/proc/self/task")
  if hasattr(os, "sched_setaffinity") and tasks.is_dir():
    core = sorted(os.sched_getaffinity(0))[:1]
    for task in tasks.iterdir():
      os.sched_setaffinity(int(task.name), core)


def table(result: dict[str, Any]) -> str:
  """The figures as a page."""
  cells = result["cells"]
  lines = [
      "# Pacing where it can gain nothing, simulated", "",
      "Made by `" + result["command"] + "`; raw figures in the JSON file beside this one.", "",
      f"A simulation: ranks that don't affect each other, {1e3 * BUSY:g} ms busy and "
      f"{1e3 * TRANSFER:g} ms of",
      f"transfer a step, {result['steps']:,} steps, {result['seeds']} seeds, bare and paced on the "
      "same busy times.",
      "There is nothing to gain here; the question is what pacing costs. The bound is +0.1 %, by "
      "construction",
      "(`jaxpace.coordination.early_ranks`).", ""]
  for name in PACERS:
    lines += [f"**{name}**: {ABOUT[name]}.", "",
              "| busy times | ranks | step time, worst seed | mean of seeds | mean delay, ms | "
              "ranks delayed |",
              "|---|---:|---:|---:|---:|---:|"]
    for shape in SHAPES:
      for ranks in result["ranks"]:
        own = [c for c in cells if (c["pacer"], c["shape"], c["ranks"]) == (name, shape, ranks)]
        mean = {key: statistics.fmean(c[key] for c in own)
                for key in ("ratio", "mean_delay_ms", "delayed_share")}
        worst = max(c["ratio"] for c in own)
        lines.append(f"| {shape} | {ranks} | {100 * (worst - 1):+.4f} % | "
                     f"{100 * (mean['ratio'] - 1):+.4f} % | {mean['mean_delay_ms']:.3f} | "
                     f"{100 * mean['delayed_share']:.1f} % |")
    lines.append("")
  update = result["update"]
  lines += [
      f"Worst of all {len(cells)} runs: {100 * (result['worst_ratio'] - 1):+.4f} %; within +0.1 %: "
      f"{'yes' if result['within_target'] else 'NO'}.", "",
      f"One `update` at {update['ranks']:,} ranks, in a compiled loop, on one core of a shared "
      f"machine: median {update['median_us']:.1f} us of {update['repeats']} timings (least "
      f"{update['least_us']:.1f}, greatest",
      f"{update['greatest_us']:.1f}); target {TARGET['update_us']:g} us: "
      f"{'met' if result['update_within_target'] else 'MISSED'}.", ""]
  return "\n".join(lines)


def define_flags() -> None:
  """Defines this program's flags; not when it is imported, since other programs have flags of the
  same names."""
  flags.DEFINE_list("ranks", ["4", "16", "64", "256", "1024"], "Numbers of ranks.")
  flags.DEFINE_integer("steps", 2000, "Steps of each run.", lower_bound=100)
  flags.DEFINE_integer("seeds", 3, "Seeds of each cell.", lower_bound=1)
  flags.DEFINE_integer("repeats", 40, "Timings of update; the median is reported.", lower_bound=3)
  flags.DEFINE_string("output", "docs/measurements/null_pacing",
                      "Where the figures go, less .json and .md.")


def main(argv: list[str]) -> None:
  if len(argv) > 1:
    raise app.UsageError(f"Unknown arguments: {' '.join(argv[1:])}")
  try:
    sizes = [int(r) for r in flags.FLAGS.ranks]
  except ValueError:
    sizes = []
  if not sizes or min(sizes) < 2:
    raise app.UsageError(
        f"--ranks={','.join(flags.FLAGS.ranks)} must be whole numbers from 2, such as 4,64.")
  logging.getLogger("jax").setLevel(logging.WARNING)
  cells = []
  for ranks in sizes:
    for name, pacer in PACERS.items():
      for shape in SHAPES:
        own = [cell(pacer, shape, ranks, flags.FLAGS.steps, seed)
               for seed in range(flags.FLAGS.seeds)]
        cells += [{"pacer": name, "shape": shape, "ranks": ranks, "seed": seed, **c}
                  for seed, c in enumerate(own)]
        worst = max(c["ratio"] for c in own)
        print(f"  {ranks:5d} ranks, {name:8s} {shape:12s} {100 * (worst - 1):+.4f} %", flush=True)
  print("  timing update ...", flush=True)
  pin_to_one_core()
  update = {"ranks": 1024, **time_update(1024, flags.FLAGS.repeats)}
  worst = max(c["ratio"] for c in cells)
  result = {
      "command": "python -m experiments.measure.null_pacing " + " ".join(
          [f"--ranks={','.join(map(str, sizes))}", f"--steps={flags.FLAGS.steps}",
           f"--seeds={flags.FLAGS.seeds}", f"--repeats={flags.FLAGS.repeats}"]),
      "machine": platform.machine(), "python": platform.python_version(), "jax": jax.__version__,
      "ranks": sizes, "steps": flags.FLAGS.steps, "seeds": flags.FLAGS.seeds, "target": TARGET,
      "worst_ratio": worst, "within_target": worst <= TARGET["ratio"], "update": update,
      "update_within_target": update["median_us"] <= TARGET["update_us"],
      "cells": [{k: (float(f"{v:.7g}") if isinstance(v, float) else v) for k, v in c.items()}
                for c in cells]}
  path = pathlib.Path(flags.FLAGS.output)
  path.parent.mkdir(parents=True, exist_ok=True)
  path.with_suffix(".json").write_text(json.dumps(result, indent=1) + "\n")
  path.with_suffix(".md").write_text(table(result))
  print(f"Worst {100 * (worst - 1):+.4f} %; update {update['median_us']:.1f} us at 1,024 ranks. "
        f"Written: {path}.json, {path}.md")


if __name__ == "__main__":
  define_flags()
  app.run(main)
