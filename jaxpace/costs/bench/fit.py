"""Fits latency α and time a byte β to measured collectives, robustly, with intervals. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from jaxpace.costs.fabric_file import SCHEMA, Cost, Estimate, coefficients

if TYPE_CHECKING:
  from jaxpace.costs.bench.measure import Group

_DRAWS = 300
_HUBER = 1.345
_INTERVAL = (0.05, 0.95)


class Timing(NamedTuple):
  """One kind of collective at one size."""

  bytes: int
  samples: tuple[float, ...]  # seconds

  @property
  def seconds(self) -> float:
    """Median of the samples, s."""
    return float(np.median(self.samples))


class Fit(NamedTuple):
  """A fitted cost, and how far it is off where it is worst."""

  cost: Cost
  misfit: float  # largest |fitted / measured - 1| over the sizes


def fit(kind: str, algorithm: str, ranks: int, measured: Sequence[Timing], seed: int = 0) -> Fit:
  """Fits t = a·α + b·m·β to the medians of every size.

  Relative errors count, so that a small collective says as much of α as a large one of β; Huber
  weights (scale from the median absolute error) keep one odd size from bending both. Neither is
  below 0. The 90 % intervals come from drawing the samples of every size, and the sizes, anew: how
  far the law itself is off is in them.

  Args:
    kind: one of `jaxpace.costs.fabric_file.KINDS`.
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
  [(alpha, beta)] = _solve(rows[None], seconds[None])
  misfit = float(np.abs(rows @ [alpha, beta] / seconds - 1).max())
  random = np.random.default_rng(seed)
  chosen = random.integers(0, len(measured), (_DRAWS, len(measured)))
  medians = np.stack([np.median(random.choice(m.samples, (_DRAWS, len(m.samples))), axis=1)
                      for m in measured], axis=1)
  again = np.maximum(np.take_along_axis(medians, chosen, axis=1), 1e-9)
  drawn = _solve(rows[chosen], again)
  low, high = np.quantile(drawn, _INTERVAL, axis=0)
  estimates = [Estimate(x, min(float(low[i]), x), max(float(high[i]), x))
               for i, x in enumerate((alpha, beta))]
  return Fit(Cost(estimates[0], estimates[1], algorithm,
                  tuple((m.bytes, m.seconds) for m in measured)), misfit)


def _solve(rows: np.ndarray, seconds: np.ndarray) -> np.ndarray:
  """[D, 2] α and β, 0 or more, by iterated Huber weights on relative errors, of rows [D, S, 2] and
  seconds [D, S]."""
  relative = rows / seconds[..., None]
  weights = np.ones_like(seconds)
  solution = np.zeros((len(rows), 2))
  for _ in range(20):
    before, solution = solution, _positive(relative, weights)
    error = np.abs((relative * solution[:, None]).sum(axis=2) - 1)
    scale = np.maximum(np.median(error, axis=1, keepdims=True) / 0.6745, 1e-6)
    weights = np.minimum(1.0, _HUBER * scale / np.maximum(error, 1e-12))
    if np.allclose(before, solution, rtol=1e-6, atol=0):
      break
  return solution


def _positive(relative: np.ndarray, weights: np.ndarray) -> np.ndarray:
  """[D, 2] weighted least squares of relative @ x = 1 with x >= 0: both, or the better one
  alone."""
  a, b = relative[..., 0], relative[..., 1]
  aa, ab, bb = ((weights * x * y).sum(axis=1) for x, y in ((a, a), (a, b), (b, b)))
  sa, sb = ((weights * x).sum(axis=1) for x in (a, b))
  determinant = aa * bb - ab**2
  regular = determinant > 1e-10 * aa * bb
  bottom = np.where(regular, determinant, 1.0)
  both = np.stack([(sa * bb - sb * ab) / bottom, (sb * aa - sa * ab) / bottom], axis=1)
  zero = np.zeros(len(aa))
  alone = [np.stack([_ratio(sa, aa), zero], axis=1), np.stack([zero, _ratio(sb, bb)], axis=1)]
  # Of one unknown, the least squares are the total less s² / square.
  better = np.where((_ratio(sa**2, aa) >= _ratio(sb**2, bb))[:, None], *alone)
  return np.where((regular & (both >= 0).all(axis=1))[:, None], both, better)


def _ratio(top: np.ndarray, bottom: np.ndarray) -> np.ndarray:
  return np.divide(top, bottom, out=np.zeros_like(top), where=bottom > 0)


def to_json(levels: Sequence[tuple[Group, Mapping[str, tuple[Fit, Sequence[Timing]]]]],
            facts: Mapping[str, Any], notes: Sequence[str]) -> dict[str, Any]:
  """Returns plain lists, dicts and scalars; seconds and bytes.

  Args:
    levels: what was fitted and measured, by level and kind.
    facts: of the job: versions, devices, processes, hosts.
    notes: sentences.
  """
  return {"schema": SCHEMA, "kind": "jaxpace bench", **facts, "levels": [
      {"level": group.level, "ranks": group.ranks, "measured": len(group.members[0]),
       "groups": len(group.members),
       "collectives": {kind: _cost(found, measured) for kind, (found, measured) in by_kind.items()}}
      for group, by_kind in levels], "notes": list(notes)}


def _cost(found: Fit, measured: Sequence[Timing]) -> dict[str, Any]:
  return {"algorithm": found.cost.algorithm, "alpha": found.cost.alpha.to_json(),
          "beta": found.cost.beta.to_json(), "misfit": found.misfit, "points": [
              {"bytes": m.bytes, "seconds": m.seconds, "low": float(np.quantile(m.samples, 0.05)),
               "high": float(np.quantile(m.samples, 0.95)), "samples": len(m.samples)}
              for m in measured]}
