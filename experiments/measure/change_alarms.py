"""How often noise alone is cut where no level changes, and how soon a change that is there is
found, in made-up jobs.

    python -m experiments.measure.change_alarms            # about three minutes on one core

A change-point names nobody by itself: who is late between two of them is tested on top of it, see
docs/findings.md.
"""

from __future__ import annotations

import pathlib
import sys
from typing import Any

import numpy as np
from absl import app, flags

from experiments.lib import measured
from jaxpace.diagnosis.changes import change_points
from jaxpace.diagnosis.episodes import Blocks, blamed, find_episodes

NOISES = ("normal", "exponential", "Student's t (3)", "AR(0.5)", "AR(0.9)", "rare pauses")
BLOCKS = (256, 60, 20)
_RANKS, _STEPS_A_BLOCK, _NOISE = 8, 5, 0.02


def noise(kind: str, ranks: int, blocks: int, random: np.random.Generator) -> np.ndarray:
  """[R, B] noise of blocks, of unit deviation about 0.

  Args:
    kind: one of `NOISES`; rare pauses are normal noise and, in one block of 50, a pause of ten
      deviations.
    ranks: of the job.
    blocks: of its steps.
    random: to draw from.
  """
  shape = (ranks, blocks)
  if kind == "exponential":
    return random.exponential(1.0, shape) - 1
  if kind == "Student's t (3)":
    return random.standard_t(3, shape) / np.sqrt(3)
  drawn = random.standard_normal(shape)
  if kind.startswith("AR"):
    part = float(kind[3:-1])
    for block in range(1, blocks):
      drawn[:, block] = part * drawn[:, block - 1] + np.sqrt(1 - part * part) * drawn[:, block]
  if kind == "rare pauses":
    drawn += 10.0 * (random.random(shape) < 0.02)
  return drawn


def judged(arrival: np.ndarray) -> tuple[bool, bool]:
  """Whether a job gets any change-point, and whether any rank of it is named late.

  Args:
    arrival: [R, B] mean arrivals of blocks, shares of the step, less the mean over ranks.
  """
  points = change_points(arrival)
  steps = np.full(arrival.shape, _STEPS_A_BLOCK)
  blocks = Blocks(arrival, steps, np.ones(len(arrival), bool), 1.0, arrival)
  size = arrival.shape[1] * _STEPS_A_BLOCK
  return any(points), bool(blamed(find_episodes(blocks, points, size), size))


def measure(jobs: int) -> dict[str, Any]:
  """Counts, over noises and lengths, jobs with a change-point, with a rank named, and steps late
  ones are found."""
  rows = []
  for kind in NOISES:
    for size in BLOCKS:
      alarms = named = found = 0
      for seed in range(jobs):
        random = np.random.default_rng([NOISES.index(kind), size, seed])
        # Single steps stray by 2 % of the step: a block of five by less, where they are
        # independent.
        arrival = _NOISE / np.sqrt(_STEPS_A_BLOCK) * noise(kind, _RANKS, size, random)
        change, late = judged(arrival - arrival.mean(axis=0))
        alarms, named = alarms + change, named + late
        arrival[3, size // 2:] += 0.05
        found += any(abs(point - size // 2) <= 2
                     for point in change_points(arrival - arrival.mean(axis=0))[3])
      rows.append({"noise": kind, "blocks": size, "jobs": jobs, "with_change_point": alarms,
                   "naming_a_rank": named, "change_found": found})
      print(rows[-1], file=sys.stderr, flush=True)
  return {"rows": rows}


def page(figures: dict[str, Any]) -> list[str]:
  """The figures in Markdown."""
  lines = measured.introduction("Change-points of made-up jobs", figures)
  lines += [f"Jobs of {_RANKS} ranks in which nothing changes, and the same in which one rank is "
            f"later by 5 % of the step from the middle on; a block is {_STEPS_A_BLOCK} steps, "
            f"whose mean strays by {100 * _NOISE / np.sqrt(_STEPS_A_BLOCK):.1f} % of the step.", ""]
  lines += measured.table(("noise of the blocks", "blocks", "jobs", "with any change-point",
                           "a rank named late", "a real change found within two blocks"),
                          [list(row.values()) for row in figures["rows"]])
  return lines


def define_flags() -> None:
  """Defines this program's flags."""
  flags.DEFINE_string("out", "docs/measurements/change_alarms.json",
                      "Where the figures go; a table beside it.")
  flags.DEFINE_integer("jobs", 300, "Jobs of each noise and length.", lower_bound=1)


def main(argv: list[str]) -> None:
  if len(argv) > 1:
    raise app.UsageError(f"What is {argv[1]!r}? All arguments are flags: --jobs, --out.")
  args = flags.FLAGS
  figures = {**measured.circumstances("experiments.measure.change_alarms"), **measure(args.jobs)}
  measured.write(figures, page(figures), pathlib.Path(args.out))


if __name__ == "__main__":
  define_flags()
  app.run(main)
