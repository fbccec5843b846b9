"""Fits latency α and time a byte β to measured collectives, robustly, with intervals. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from jaxpace.diagnosis.fabric import Cost, Estimate, coefficients

_DRAWS = 300
_HUBER = 1.345
_INTERVAL = (0.05, 0.95)


class Measured(NamedTuple):
  """One kind of collective at one size."""

  bytes: int
  samples: tuple[float, ...]  # seconds

  @property
  def seconds(self) -> float:
    return float(np.median(self.samples))


class Fit(NamedTuple):
  """A fitted cost, and how far it is off where it is worst."""

  cost: Cost
  misfit: float  # largest |fitted / measured - 1| over the sizes


def fit(kind: str, algorithm: str, ranks: int, measured: Sequence[Measured], seed: int = 0) -> Fit:
  """Fits t = a·α + b·m·β to the medians of every size.

  Relative errors count, so that a small collective says as much of α as a large one of β; Huber weights (scale from the
  median absolute error) keep one odd size from bending both. Neither is below 0. The 90 % intervals come from drawing
  the samples of every size, and the sizes, anew: how far the law itself is off is in them.

  Args:
    kind: one of `jaxpace.diagnosis.fabric.KINDS`.
    algorithm: whose coefficients hold.
    ranks: ranks that took part.
    measured: one entry a size; at least one.
    seed: of the draws.

  Raises:
    ValueError: nothing was measured.
  """
  if not measured:
    raise ValueError("fit needs at least one measured size.")
  a, b = coefficients(kind, algorithm, ranks)
  rows = np.array([[a, b * m.bytes] for m in measured])
  seconds = np.array([max(m.seconds, 1e-9) for m in measured])
  alpha, beta = _solve(rows, seconds)
  misfit = float(np.abs(rows @ [alpha, beta] / seconds - 1).max())
  random = np.random.default_rng(seed)
  drawn = np.empty((_DRAWS, 2))
  for i in range(_DRAWS):
    chosen = random.integers(0, len(measured), len(measured))
    again = [float(np.median(random.choice(measured[j].samples, len(measured[j].samples)))) for j in chosen]
    drawn[i] = _solve(rows[chosen], np.maximum(again, 1e-9))
  low, high = np.quantile(drawn, _INTERVAL, axis=0)
  estimates = [Estimate(x, min(float(low[i]), x), max(float(high[i]), x)) for i, x in enumerate((alpha, beta))]
  return Fit(Cost(estimates[0], estimates[1], algorithm, tuple((m.bytes, m.seconds) for m in measured)), misfit)


def _solve(rows: np.ndarray, seconds: np.ndarray) -> tuple[float, float]:
  """α and β, 0 or more, by iterated Huber weights on relative errors."""
  relative = rows / seconds[:, None]
  weights = np.ones(len(seconds))
  solution = np.zeros(2)
  for _ in range(20):
    before, solution = solution, _positive(relative, weights)
    error = np.abs(relative @ solution - 1)
    scale = max(float(np.median(error)) / 0.6745, 1e-6)
    weights = np.minimum(1.0, _HUBER * scale / np.maximum(error, 1e-12))
    if np.allclose(before, solution, rtol=1e-6, atol=0):
      break
  return float(solution[0]), float(solution[1])


def _positive(relative: np.ndarray, weights: np.ndarray) -> np.ndarray:
  """Weighted least squares of relative @ x = 1 with x >= 0."""
  root = np.sqrt(weights)
  if len(np.unique(relative[:, 1] / np.maximum(relative[:, 0], 1e-300))) > 1:
    both, *_ = np.linalg.lstsq(relative * root[:, None], root, rcond=None)
    if both.min() >= 0:
      return np.asarray(both)
  found = []
  for i in (0, 1):
    square = float((weights * relative[:, i]**2).sum())
    x = np.zeros(2)
    x[i] = float((weights * relative[:, i]).sum()) / square if square > 0 else 0.0
    found.append((float((weights * (relative @ x - 1)**2).sum()), x))
  return min(found, key=lambda entry: entry[0])[1]
