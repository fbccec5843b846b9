"""What pacing without the others' arrivals costs where it can't gain, also when the fabric is
slower than declared.

    python -m experiments.measure.null_unshared

The barrier model and the busy times of `experiments.measure.null_pacing`, with transfers that vary,
and the rule of `pace_early_ranks(..., unshared=ceiling)` on every rank, by the library's own
`Pacer.update`. Bare and paced runs share busy times and transfers. Writes
docs/measurements/null_unshared.json and .md.
"""

from __future__ import annotations

import functools
import pathlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl import app, flags

from experiments.lib import measured
from experiments.measure.null_pacing import BUSY, COST, SHAPES, TRANSFER
from jaxpace.coordination import pace_early_ranks
from jaxpace.core.types import Observation, Pacer

CEILING = 1.35 * TRANSFER
PACERS: dict[str, Pacer] = {
    "default": pace_early_ranks(cost=COST, unshared=CEILING),
    "eager": pace_early_ranks(threshold=0.0, noise=0.0, share_of_slack=1.0, quantile=0.5, cost=COST,
                              unshared=CEILING),
    "eager, cost 5 %": pace_early_ranks(threshold=0.0, noise=0.0, share_of_slack=1.0, quantile=0.5,
                                        cost=0.05, unshared=CEILING),
}
"""The last is what a user might set under a guard, so that delays grow at all: bounded by 5 %, not
by 0.1 %."""


def within(rng: np.random.Generator, steps: int) -> np.ndarray:
  """Jitter of 10 %, cut at the ceiling: [steps] s, as all below."""
  return np.minimum(TRANSFER * (1 + 0.1 * rng.normal(size=steps)), CEILING)


def episodes(rng: np.random.Generator, steps: int) -> np.ndarray:
  """The same, three times as long in one spell of 100 steps in five: a crowded fabric."""
  crowded = np.repeat(rng.random(-(-steps // 100)) < 0.2, 100)[:steps]
  return within(rng, steps) * np.where(crowded, 3.0, 1.0)


def underrated(rng: np.random.Generator, steps: int) -> np.ndarray:
  """Twice as long throughout: the ceiling was declared too low."""
  return 2.0 * within(rng, steps)


TRANSFERS: dict[str, Callable[[np.random.Generator, int], np.ndarray]] = {
    "within the ceiling": within, "crowded in spells": episodes, "ceiling too low": underrated}


@functools.lru_cache(maxsize=8)
def simulation(pacer: Pacer, ranks: int) -> Callable[..., tuple[jax.Array, jax.Array]]:
  """Compiles a run: busy [steps, ranks], transfers [steps] s -> last arrivals, mean delays [steps]
  s."""
  axes: Any = dict.fromkeys(Observation._fields) | {"rank": 0, "waits": 0}
  update = jax.vmap(pacer.update, in_axes=(Observation(**axes), 0))
  start = jax.tree.map(lambda leaf: jnp.stack([jnp.asarray(leaf)] * ranks), pacer.init(ranks))
  index, unknown = jnp.arange(ranks, dtype=jnp.int32), jnp.float32(np.nan)

  def turn(carry: Any,
           now: tuple[jax.Array, jax.Array, jax.Array]) -> tuple[Any, tuple[jax.Array, jax.Array]]:
    state, delays = carry
    step, busy, transfer = now
    entered = busy + delays
    last = jnp.max(entered)
    # The rule looks at its own entry of arrivals and delays only:
    # `tests/coordination/test_unshared.py` hides the rest.
    seen = Observation(step=step, rank=index, arrivals=busy, delays=delays,
                       waits=(last - entered + transfer)[:, None], step_time=last + transfer,
                       job_step_time=unknown, job_transfers=unknown[None])
    decision, state = update(seen, state)
    return (state, decision.delay), (last, jnp.mean(delays))

  def run(busy: jax.Array, transfers: jax.Array) -> tuple[jax.Array, jax.Array]:
    steps = jnp.arange(busy.shape[0], dtype=jnp.int32)
    return jax.lax.scan(turn, (start, jnp.zeros((ranks,), jnp.float32)),
                        (steps, busy, transfers))[1]

  return jax.jit(run)


def cell(pacer: Pacer, shape: str, transfer: str, ranks: int, steps: int,
         seed: int) -> dict[str, float]:
  """One run, bare and paced. `beyond`: what transfers above the ceiling add to the bound, as a
  share of the run."""
  rng = np.random.default_rng([seed, list(SHAPES).index(shape), list(TRANSFERS).index(transfer),
                               ranks])
  busy = SHAPES[shape](rng, steps, ranks).clip(0.1 * BUSY).astype(np.float32)
  transfers = TRANSFERS[transfer](rng, steps).clip(0).astype(np.float32)
  last, delay = (np.asarray(x, np.float64)
                 for x in simulation(pacer, ranks)(jnp.asarray(busy), jnp.asarray(transfers)))
  bare = busy.max(axis=1).astype(np.float64)
  elapsed = float((bare + transfers).sum())
  return {"cost": float((last - bare).sum()) / elapsed, "mean_delay_ms": 1e3 * float(delay.mean()),
          "beyond": float(np.maximum(transfers - CEILING, 0).sum()) / elapsed}


def lines(figures: dict[str, Any]) -> list[str]:
  """The figures as a page."""
  page = measured.introduction("Pacing without the others' arrivals, where it can't gain", figures)
  inside = "inside" if figures["worst_within"] <= COST else "NOT inside"
  page += [f"A simulation: ranks that don't affect each other, {1e3 * BUSY:g} ms busy, about "
           f"{1e3 * TRANSFER:g} ms of transfer, declared ceiling {1e3 * CEILING:g} ms, "
           f"{figures['steps']:,} steps, {figures['seeds']} seeds; bare and paced on the same busy "
           "times and transfers. The bound (`jaxpace.coordination.unshared`) is `cost` (0.1 % "
           "unless said otherwise) within the ceiling; beyond it, by how much transfers exceed it.",
           "", "Within the ceiling, worst of all runs at a cost of 0.1 %: "
               f"{100 * figures['worst_within']:+.4f} %, {inside} the bound. Beyond it: "
               f"{100 * figures['worst_beyond']:+.2f} %. The rule can't be held to 0.1 % there: it "
               "is off by default, and to be used under the guard.", ""]
  for name in PACERS:
    rows = []
    for transfer in TRANSFERS:
      for shape in SHAPES:
        own = [c for c in figures["cells"]
               if (c["pacer"], c["transfer"], c["shape"]) == (name, transfer, shape)]
        for ranks in sorted({c["ranks"] for c in own}):
          here = [c for c in own if c["ranks"] == ranks]
          rows.append([transfer, shape, ranks, f"{100 * max(c['cost'] for c in here):+.4f} %",
                       f"{100 * max(c['beyond'] for c in here):.2f} %",
                       f"{np.mean([c['mean_delay_ms'] for c in here]):.4f}"])
    page += [f"## {name}", "", *measured.table(
        ["transfers", "busy times", "ranks", "cost, worst seed", "bound adds", "mean delay, ms"],
        rows)]
  return page


def define_flags() -> None:
  """Defines this program's flags; not when it is imported, since other programs have flags of the
  same names."""
  flags.DEFINE_list("ranks", ["4", "64", "1024"], "Numbers of ranks.")
  flags.DEFINE_integer("steps", 4000, "Steps of each run.", lower_bound=100)
  flags.DEFINE_integer("seeds", 3, "Seeds of each cell.", lower_bound=1)
  flags.DEFINE_string("out", "docs/measurements/null_unshared.json",
                      "File the figures are written to.")


def main(_: list[str]) -> None:
  settings = flags.FLAGS
  cells: list[dict[str, Any]] = []
  for ranks in map(int, settings.ranks):
    for name, pacer in PACERS.items():
      for transfer in TRANSFERS:
        for shape in SHAPES:
          cells += [{"pacer": name, "transfer": transfer, "shape": shape, "ranks": ranks,
                     "seed": seed, **cell(pacer, shape, transfer, ranks, settings.steps, seed)}
                    for seed in range(settings.seeds)]
    print(f"  {ranks} ranks done", flush=True)
  bounded = [c for c in cells if c["pacer"] in ("default", "eager")]
  figures = measured.circumstances("experiments.measure.null_unshared") | {
      "steps": settings.steps, "seeds": settings.seeds,
      "worst_within": max(c["cost"] for c in bounded if c["transfer"] == "within the ceiling"),
      "worst_beyond": max(c["cost"] for c in bounded if c["transfer"] != "within the ceiling"),
      "cells": [{k: (float(f"{v:.5g}") if isinstance(v, float) else v) for k, v in c.items()}
                for c in cells]}
  measured.write(figures, lines(figures), pathlib.Path(settings.out))


if __name__ == "__main__":
  define_flags()
  app.run(main)
