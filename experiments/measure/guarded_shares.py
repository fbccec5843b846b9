"""Work shared by speed under its guard, played: what finding out costs, and what is decided.

    python -m experiments.measure.guarded_shares

The balancer's and the guard's own `update`, as live, over drawn times of four ranks. Writes
docs/measurements/guarded_shares.json and .md.
"""

from __future__ import annotations

import functools
import itertools
import pathlib
from typing import Any

import numpy as np
from absl import app, flags

import jaxpace
from experiments.lib import measured
from jaxpace.coordination.apportion import even
from jaxpace.core.types import Balancer
from jaxpace.simulation.shared_work import Played, play

RANKS, TOTAL, REST = 4, 32, 1.0
"""REST: work besides, in micro-batches."""
CASES = {"one rank 1.2 times slower": 1.2, "one rank 1.5 times slower": 1.5,
         "one rank 3 times slower": 3.0, "healthy": 1.0, "wrong counts": 1.0}
NOISES = {"5 %": (0.05, 0.0), "15 %": (0.15, 0.0), "15 %, hangs together": (0.15, 0.8)}
"""Deviation of a rank's time from step to step, and its autocorrelation."""
WRONG = np.array([9, 8, 8, 7], np.int32)


def drawn(steps: int, slow: float, deviation: float, memory: float, seed: int) -> np.ndarray:
  """[K, R] times of a micro-batch, about 1."""
  draws = np.random.default_rng(seed).normal(0, deviation, (steps, RANKS))
  for step in range(1, steps):
    draws[step] = memory * draws[step - 1] + np.sqrt(1 - memory**2) * draws[step]
  return np.exp(draws) * np.array([1, 1, 1, slow])


def by_hand(slow: float) -> np.ndarray:
  """[R] counts that end a step earliest, were there no noise; of several that do, the ones that
  leave the other ranks most time."""
  each = [np.append(even(TOTAL - few, RANKS - 1), few) for few in range(1, TOTAL // RANKS + 1)]
  speeds = np.array([1, 1, 1, slow])
  return min(each, key=lambda counts: sorted((counts + REST) * speeds, reverse=True))


@functools.cache
def balancer(wrong: bool, block: int) -> Balancer:
  """What is judged, in blocks of so many steps; 0 for not at all."""
  inner = (jaxpace.Balancer(lambda ranks: (), lambda seen, state: (WRONG, state), TOTAL) if wrong
           else jaxpace.share_by_speed(TOTAL, 2 * TOTAL // RANKS))
  return jaxpace.guard(inner, block=block) if block else inner


def judged(played: Played, work: np.ndarray, slow: float) -> dict[str, float]:
  """Of one run: how often counts were right at the end, the change against even counts, and steps
  lost against the best counts from the first step on, of the same draws."""
  uneven = (played.counts != even(TOTAL, RANKS)).any(axis=1)
  best = ((by_hand(slow) + REST) * work).max(axis=1)
  return {"right": float((uneven[-len(uneven) // 4:] == (slow > 1)).mean()),
          "change": float(played.seconds.sum() / played.even.sum() - 1),
          "regret": float((played.seconds - best).sum() / played.even.mean())}


def main(argv: Any) -> None:
  """Plays all cases."""
  its = flags.FLAGS
  figures = measured.circumstances("experiments.measure.guarded_shares") | {
      "rounds": its.rounds, "steps": its.steps, "blocks": its.blocks, "cases": []}
  for (case, slow), (noise, (deviation, memory)) in itertools.product(
      CASES.items(), NOISES.items()):
    for block in map(int, its.blocks):
      found = []
      for seed in range(its.rounds):
        work = drawn(its.steps, slow, deviation, memory, seed)
        played = play(balancer(case == "wrong counts", block), work, rest=REST * work)
        found.append(judged(played, work, slow))
      entry = {name: [one[name] for one in found] for name in found[0]}
      figures["cases"].append({"case": case, "noise": noise, "block": block, **entry})
      print(case, noise, block, {name: round(float(np.mean(each)), 3)
                                 for name, each in entry.items()}, flush=True)
  measured.write(figures, lines(figures), pathlib.Path(its.out))


def lines(figures: dict[str, Any]) -> list[str]:
  """The figures as a page."""
  page = measured.introduction("Work shared by speed under its guard, played", figures)
  page += ["`jaxpace.guard(jaxpace.share_by_speed(...))`, block 0 without the guard. "
           f"{RANKS} ranks, {TOTAL} micro-batches, other work worth one of them; "
           f"{figures['rounds']} runs of {figures['steps']:,} steps; counts are in force 13 to 16 "
           "steps after what they follow from, as live. Noise: deviation of a rank's time from "
           "step to step; what hangs together has autocorrelation 0.8. Right: part of the last "
           "quarter in which counts were uneven where a rank is slower, else even. Step: against "
           "even counts on the same draws. Regret: steps' worth of time lost against the best "
           "counts by hand from the first step on, of the same draws; mean and most. Wrong counts: "
           "9, 8, 8, 7 on healthy ranks.", ""]
  return page + measured.table(
      ["ranks", "noise", "block", "right, %", "step, %", "regret, steps", "most"],
      [[one["case"], one["noise"], one["block"], *(f"{round(value, 1) + 0.0:.1f}" for value in (
          100 * np.mean(one["right"]), 100 * np.mean(one["change"]), np.mean(one["regret"]),
          max(one["regret"])))] for one in figures["cases"]])


if __name__ == "__main__":
  measured.define_flags("guarded_shares", 6, "Runs of each case.")
  flags.DEFINE_integer("steps", 6000, "Steps of a run.", lower_bound=100)
  flags.DEFINE_list("blocks", ["0", "32", "64"], "Steps of a block; 0 for no guard.")
  app.run(main)
