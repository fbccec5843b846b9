"""Pacing where it can gain nothing and must not cost: ranks that don't affect each other.

    python -m experiments.measure.null_pacing

A barrier model, t[k+1] = max over ranks of (t[k] + c + d) + C, in which no busy time c depends on
another rank's delay d. The delays come from the library's own `Pacer.update`, one state a rank;
each cell runs bare and paced on the same busy times.
"""

from __future__ import annotations

import functools
import itertools
import logging
import pathlib
import statistics
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl import app, flags

from experiments.lib import measured
from jaxpace.coordination.early_ranks import pace_early_ranks
from jaxpace.core.types import Observation, Pacer

BUSY, TRANSFER, COST = 20e-3, 2e-3, 1e-3

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


def lines(figures: dict[str, Any]) -> list[str]:
  """The figures as a page."""
  page = measured.introduction("Pacing where it can gain nothing, simulated", figures)
  page += [f"Ranks that don't affect each other, {1e3 * BUSY:g} ms busy and "
           f"{1e3 * TRANSFER:g} ms of transfer, {figures['steps']:,} steps, {figures['seeds']} "
           "seeds, bare and paced on the same busy times. There is nothing to gain here; the "
           "question is what pacing costs. The bound is +0.1 %, by construction "
           "(`jaxpace.coordination.early_ranks`).", ""]
  for name in PACERS:
    rows = []
    for shape, ranks in itertools.product(SHAPES, figures["ranks"]):
      own = [c for c in figures["cells"]
             if (c["pacer"], c["shape"], c["ranks"]) == (name, shape, ranks)]
      mean = {key: statistics.fmean(c[key] for c in own)
              for key in ("ratio", "mean_delay_ms", "delayed_share")}
      rows.append([shape, ranks, _percent(max(c["ratio"] for c in own)), _percent(mean["ratio"]),
                   f"{mean['mean_delay_ms']:.3f}", f"{100 * mean['delayed_share']:.1f} %"])
    page += [f"**{name}**: {ABOUT[name]}.", "",
             *measured.table(["busy times", "ranks", "step time, worst seed", "mean of seeds",
                              "mean delay, ms", "ranks delayed"], rows)]
  return [*page, f"Worst of all {len(figures['cells'])} runs: {_percent(figures['worst_ratio'])}; "
          f"within +0.1 %: {'yes' if figures['within_target'] else 'NO'}."]


def _percent(ratio: float) -> str:
  return f"{100 * (ratio - 1):+.4f} %"


def define_flags() -> None:
  """Defines this program's flags; not when it is imported, since other programs have flags of the
  same names."""
  flags.DEFINE_list("ranks", ["4", "16", "64", "256", "1024"], "Numbers of ranks.")
  flags.DEFINE_integer("steps", 2000, "Steps of each run.", lower_bound=100)
  flags.DEFINE_integer("seeds", 3, "Seeds of each cell.", lower_bound=1)
  flags.DEFINE_string("out", "docs/measurements/null_pacing.json",
                      "File the figures are written to.")


def main(argv: list[str]) -> None:
  if len(argv) > 1:
    raise app.UsageError(f"Unknown arguments: {' '.join(argv[1:])}")
  logging.getLogger("jax").setLevel(logging.WARNING)
  its, cells = flags.FLAGS, []
  for ranks, name, shape in itertools.product(map(int, its.ranks), PACERS, SHAPES):
    own = [cell(PACERS[name], shape, ranks, its.steps, seed) for seed in range(its.seeds)]
    cells += [{"pacer": name, "shape": shape, "ranks": ranks, "seed": seed,
               **{key: float(f"{value:.7g}") for key, value in c.items()}}
              for seed, c in enumerate(own)]
    print(f"  {ranks:5d} ranks, {name:8s} {shape:12s} {_percent(max(c['ratio'] for c in own))}",
          flush=True)
  worst = max(c["ratio"] for c in cells)
  figures = measured.circumstances("experiments.measure.null_pacing") | {
      "ranks": list(map(int, its.ranks)), "steps": its.steps, "seeds": its.seeds,
      "worst_ratio": worst, "within_target": worst <= 1 + COST, "cells": cells}
  measured.write(figures, lines(figures), pathlib.Path(its.out))


if __name__ == "__main__":
  define_flags()
  app.run(main)
