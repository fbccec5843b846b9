"""How often a 95 % interval over few rounds holds the truth: percentile bootstrap, BCa, and
Student's, by simulation.

    python -m experiments.measure.intervals                  # some minutes; writes
    docs/measurements/intervals.{json,md}
    python -m experiments.measure.intervals --draws=200      # to try it
"""

from __future__ import annotations

import pathlib
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from absl import app, flags
from scipy import stats

from experiments.lib import measured, paired

OUT = pathlib.Path("docs/measurements/intervals.json")
ROUNDS = (3, 5, 8, 12, 40)
_RESAMPLES = 500

Sample = Callable[[np.random.Generator, tuple[int, ...]], np.ndarray]

SHAPES: dict[str, tuple[Sample, float]] = {
    "normal": (lambda rng, size: rng.standard_normal(size), 0.0),
    "heavy tails (Student's t, 3 degrees of freedom)":
    (lambda rng, size: rng.standard_t(3, size), 0.0),
    "pauses in one round of eight (ten deviations)": (
        lambda rng, size: rng.standard_normal(size) + 10 * (rng.random(size) < 0.125), 1.25),
}
"""How rounds are distributed, and the mean of that."""


def percentile(values: np.ndarray, statistic: Callable[..., np.ndarray],
               rng: np.random.Generator) -> np.ndarray:
  """[trials, 2] ends of percentile-bootstrap intervals of [trials, rounds] values."""
  trials, rounds = values.shape
  picked = rng.integers(0, rounds, (trials, _RESAMPLES, rounds))
  drawn = statistic(np.take_along_axis(values[:, None, :], picked, axis=2), axis=2)
  return np.percentile(drawn, [2.5, 97.5], axis=1).T


def student(values: np.ndarray) -> np.ndarray:
  """[trials, 2] ends of the intervals that `experiments.lib.paired` gives."""
  found = [paired.estimate(row) for row in values]
  return np.array([(one.low, one.high) for one in found])


def bca(values: np.ndarray, rng: np.random.Generator) -> np.ndarray:
  """[trials, 2] ends of bias-corrected accelerated bootstrap intervals of means."""
  with warnings.catch_warnings():
    warnings.simplefilter("ignore", stats.DegenerateDataWarning)
    found = stats.bootstrap((values,), np.mean, axis=1, n_resamples=_RESAMPLES, method="BCa",
                            rng=rng, vectorized=True).confidence_interval
  return np.stack([found.low, found.high], axis=1)


def coverage(draws: int, seed: int = 0, sizes: Sequence[int] = ROUNDS) -> list[dict[str, Any]]:
  """Share of intervals that hold the truth, by distribution and rounds.

  The truth of a mean is the mean, that of a median the median, which of many values is known well
  enough.

  Args:
    draws: experiments of each kind.
    seed: of the draws.
    sizes: numbers of rounds.
  """
  rows = []
  for name, (sample, mean) in SHAPES.items():
    middle = float(np.median(sample(np.random.default_rng(seed + 1), (1_000_000,))))
    for rounds in sizes:
      rng = np.random.default_rng(seed)
      values = sample(rng, (draws, rounds))
      found = {"percentile, median": (percentile(values, np.median, rng), middle),
               "percentile, mean": (percentile(values, np.mean, rng), mean),
               "BCa, mean": (bca(values, rng), mean), "Student": (student(values), mean)}
      rows.append({"rounds_are": name, "rounds": rounds, "coverage": {
          kind: float(np.mean((ends[:, 0] <= truth) & (truth <= ends[:, 1])))
          for kind, (ends, truth) in found.items()},
          "width_of_student": float(np.mean(np.diff(found["Student"][0], axis=1)))})
  return rows


def ratios(draws: int, seed: int = 0) -> list[dict[str, Any]]:
  """The same of ratios of means and of jackknifed figures: 30 steps a round, a twentieth of them
  ten times as long."""
  rows = []
  for rounds in ROUNDS:
    rng = np.random.default_rng(seed)
    inside = {"ratio of means": 0, "jackknifed share": 0}
    for _ in range(draws):
      drift = 1 + 0.1 * rng.standard_normal(rounds)
      base, other = (drift[:, None] * (1 + 9 * (rng.random((rounds, 30)) < 0.05)) for _ in range(2))
      alone = drift
      here = paired.ratio_of_means(0.9 * other.mean(axis=1), base.mean(axis=1))
      inside["ratio of means"] += here.low <= 0.9 <= here.high
      # What of a loss against running alone was recovered, as of two jobs: half.
      none, with_it = (1.4 * alone + 0.02 * rng.standard_normal(rounds),
                       1.2 * alone + 0.02 * rng.standard_normal(rounds))

      def recovered(use: np.ndarray, alone: np.ndarray = alone, none: np.ndarray = none,
                    with_it: np.ndarray = with_it) -> float:
        return float(1 - (with_it[use].mean() - alone[use].mean())
                     / (none[use].mean() - alone[use].mean()))

      there = paired.jackknifed(recovered, rounds)
      inside["jackknifed share"] += there.low <= 0.5 <= there.high
    rows.append({"rounds": rounds,
                 "coverage": {kind: hits / draws for kind, hits in inside.items()}})
  return rows


def lines(figures: dict[str, Any]) -> list[str]:
  """The figures as a page."""
  page = measured.introduction("How often an interval holds the truth", figures)
  kinds = list(figures["means"][0]["coverage"])
  page += [f"{figures['draws']:,} simulated measurements of each kind. An interval that says 95 % "
           "should hold the truth in 95 % of them. The older figures here were medians with "
           "percentile-bootstrap intervals, the column `percentile, median`; those whose rounds "
           "were kept were made anew, the others say so on their pages. All new ones are "
           "`Student`: a mean, and Student's t over rounds (`experiments/lib/paired.py`).", ""]
  page += measured.table(["rounds are", "rounds", *(f"{kind}, %" for kind in kinds)],
                         [[row["rounds_are"], row["rounds"],
                           *(f"{100 * row['coverage'][kind]:.1f}" for kind in kinds)]
                          for row in figures["means"]])
  page += ["Student's interval is the only one near 95 % from 3 rounds on. Where a few rounds hold "
           "most of the mean (a pause in one of eight), no interval over so few can know of what "
           "it has not seen: more rounds, or longer ones.", ""]
  page += ["Figures that are no plain mean: a ratio of two means over steps with rare pauses, to "
           "first order; and a share of what was lost, by the jackknife.", ""]
  page += measured.table(["rounds", "ratio of means, %", "jackknifed share, %"],
                         [[row["rounds"],
                           *(f"{100 * value:.1f}" for value in row["coverage"].values())]
                          for row in figures["ratios"]])
  return page


def main(_: list[str]) -> None:
  its = flags.FLAGS
  figures = measured.circumstances("experiments.measure.intervals") | {
      "draws": its.draws, "means": coverage(its.draws), "ratios": ratios(its.draws)}
  measured.write(figures, lines(figures), pathlib.Path(its.out))


if __name__ == "__main__":
  flags.DEFINE_integer("draws", 4000, "Simulated measurements of each kind.", lower_bound=10)
  flags.DEFINE_string("out", str(OUT), "Where to write.")
  app.run(main)
