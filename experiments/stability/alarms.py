"""How often the knee's threshold claims one where there is none, and finds one where there is:
made-up sweeps.

    python -m experiments.stability.alarms
"""

from __future__ import annotations

import os
import pathlib
from typing import Any

import numpy as np
from absl import app, flags

from experiments.cost_facts.planning.plan import expected_maximum
from experiments.lib import measured
from experiments.stability.diagnosis import knee
from experiments.stability.tables import between

OUT = pathlib.Path("docs/measurements/stability_alarms.json")
SIZES = (64, 128, 256, 512, 1024, 2048, 4096)
NOISE = (0.002, 0.02, 0.2)
"""Deviation of a run's throughput: of long runs without failures, with some, and where most work is
run again."""


def worlds(sizes: np.ndarray) -> dict[str, np.ndarray]:
  """Mean throughput at each size, [M], by what it follows."""
  groups = sizes / sizes[0] * 8
  barriers = np.array([expected_maximum(round(n)) for n in groups])
  return {
      "no knee: all wait a little for each (sigma 0.0001)": knee.throughput(sizes, 1.0, 1e-4, 0.0),
      "no knee: all wait much for each (sigma 0.001)": knee.throughput(sizes, 1.0, 1e-3, 0.0),
      "no knee: barriers, 3 % of E[max of N normals], which no scalability law holds": sizes
      / (1 + 0.03 * barriers),
      "a knee at half of the largest size": knee.throughput(sizes, 1.0, 1e-4, (2 / sizes[-1]) ** 2)}


def alarms(sizes: list[int], runs: int, trials: int, seed: int = 0) -> list[dict[str, Any]]:
  """Fits many sweeps of each world and counts what is claimed.

  Args:
    sizes: of a sweep.
    runs: at each size.
    trials: sweeps of each world and noise.
    seed: of the noise.
  """
  at, rows = np.asarray(sizes, np.float64), []
  for name, mean in worlds(at).items():
    for noise in NOISE:
      random = np.random.default_rng(seed)
      fits = [knee.fit(at, mean[:, None] * np.exp(noise * random.standard_normal((len(at), runs))),
                       trial)
              for trial in range(trials)]
      rows.append({"world": name, "noise": noise, "trials": trials,
                   "knees": sum(found.knee is not None for found in fits),
                   "kappa": sum(found.kappa_interval[0] > 0 for found in fits)})
  return rows


def page(figures: dict[str, Any]) -> list[str]:
  """The figures as Markdown."""
  rows = [[row["world"], row["noise"], f"{row['knees']} of {row['trials']}",
           *between(row["knees"], row["trials"]), f"{row['kappa']} of {row['trials']}"]
          for row in figures["rows"]]
  sizes = ", ".join(map(str, figures["sizes"]))
  return [*measured.introduction("How often a knee is claimed", figures),
          "The threshold of [stability](../stability.md): a knee is claimed where kappa's 95 % "
          "interval lies above 0",
          "and throughput peaks among the sizes that were run. Sweeps were made up, "
          f"{figures['runs']} runs at each of {sizes}", "accelerators; noise is the deviation of a "
                                                        "run's throughput. Low and high are the "
                                                        "exact 95 % interval of the share.", "",
          *measured.table(["sweep", "noise", "knee claimed", "low", "high", "kappa above 0"], rows)]


def main(argv: list[str]) -> None:
  if len(argv) > 1:
    raise app.UsageError(f"Unknown arguments: {' '.join(argv[1:])}")
  around = measured.circumstances("experiments.stability.alarms")
  figures = {**around, "sizes": SIZES, "runs": flags.FLAGS.runs,
             "rows": alarms(list(SIZES), flags.FLAGS.runs, flags.FLAGS.trials)}
  measured.write(figures, page(figures), OUT)


if __name__ == "__main__":
  os.environ.setdefault("JAX_PLATFORMS", "cpu")
  flags.DEFINE_integer("runs", 16, "At each size.", lower_bound=3)
  flags.DEFINE_integer("trials", 400, "Sweeps of each kind.", lower_bound=1)
  app.run(main)
