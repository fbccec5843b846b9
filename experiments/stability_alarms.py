"""How often the knee's threshold claims one where there is none, and finds one where there is: made-up sweeps."""

from __future__ import annotations

from typing import Any

import numpy as np

from jaxpace.diagnosis.stability import knee
from jaxpace.planning.plan import expected_maximum

NOISE = (0.002, 0.02, 0.2)
"""Deviation of a run's throughput: of long runs without failures, with some, and where most work is run again."""


def worlds(sizes: np.ndarray) -> dict[str, np.ndarray]:
  """Mean throughput at each size, [M], by what it follows."""
  groups = sizes / sizes[0] * 8
  barriers = np.array([expected_maximum(round(n)) for n in groups])
  return {
      "no knee: all wait a little for each (sigma 0.0001)": knee.throughput(sizes, 1.0, 1e-4, 0.0),
      "no knee: all wait much for each (sigma 0.001)": knee.throughput(sizes, 1.0, 1e-3, 0.0),
      "no knee: barriers, 3 % of E[max of N normals], which no scalability law holds": sizes / (1 + 0.03 * barriers),
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
      fits = [knee.fit(at, mean[:, None] * np.exp(noise * random.standard_normal((len(at), runs))), trial)
              for trial in range(trials)]
      rows.append({"world": name, "noise": noise, "trials": trials,
                   "knees": sum(found.knee is not None for found in fits),
                   "kappa": sum(found.kappa_interval[0] > 0 for found in fits)})
  return rows
