"""The knee of throughput over a sweep of sizes: the universal scalability law, fitted, with
intervals.

    X(N) = rate N / (1 + sigma (N - 1) + kappa N (N - 1))

sigma is what all wait for, kappa what every pair costs each other; throughput peaks at N* = sqrt((1
- sigma) / kappa). (Gunther, "A general theory of computational scalability based on rational
functions", 2008.) N / X is linear in 1 / rate, sigma / rate and kappa / rate: least squares of
relative errors, none of the three below 0. Fits of runs drawn again give the intervals; they say
how well the runs determine the law, not whether it is the right one: `misfit` does.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
from scipy import optimize

LEAST_SIZES, LEAST_RUNS = 4, 3
_RESAMPLED = 400


class Scaling(NamedTuple):
  """The fitted law; intervals are 95 %."""

  rate: float  # throughput of one
  sigma: float
  kappa: float
  sigma_interval: tuple[float, float]
  kappa_interval: tuple[float, float]
  peak: float  # N*; infinite where kappa is 0
  peak_interval: tuple[float, float]
  misfit: float  # largest share by which a size's mean departs from the law
  # N* where it is shown: kappa above 0 in all of the interval, N* among the sizes
  knee: float | None
  why: str  # a sentence


def throughput(number: np.ndarray, rate: float, sigma: float, kappa: float) -> np.ndarray:
  """The law.

  >>> float(throughput(np.array(100.0), 1.0, 0.0, 0.0))
  100.0
  """
  number = np.asarray(number, np.float64)
  return rate * number / (1 + sigma * (number - 1) + kappa * number * (number - 1))


def peak(sigma: float, kappa: float) -> float:
  """N*, where throughput is highest; 1 where more never pays, infinite where it always does."""
  if sigma >= 1:
    return 1.0
  return math.sqrt((1 - sigma) / kappa) if kappa > 0 else math.inf


def fit(sizes: np.ndarray, measured: np.ndarray, seed: int = 0) -> Scaling:
  """Fits the law to several runs at each of several sizes.

  Args:
    sizes: [M] N, rising.
    measured: [M, S] throughput of each of S runs at each size, in any unit.
    seed: of the resampling.

  Raises:
    ValueError: too few sizes or runs, or a throughput that is not positive.
  """
  sizes, measured = np.asarray(sizes, np.float64), np.asarray(measured, np.float64)
  if (measured.ndim != 2 or len(sizes) != len(measured) or len(sizes) < LEAST_SIZES
      or measured.shape[1] < LEAST_RUNS):
    raise ValueError(f"A knee needs runs at {LEAST_SIZES} sizes at least, {LEAST_RUNS} at each: "
                     f"sizes [M] and throughputs [M, S], not {sizes.shape} and {measured.shape}.")
  if not (np.isfinite(measured).all() and (measured > 0).all() and (np.diff(sizes) > 0).all()
          and sizes[0] >= 1):
    raise ValueError("Sizes must rise from 1 or more, and throughputs be finite and above 0.")
  mean = measured.mean(axis=1)
  rate, sigma, kappa = _law(sizes, mean)
  random = np.random.default_rng(seed)
  runs = measured.shape[1]
  drawn = np.array([_law(sizes,
                         np.take_along_axis(measured, random.integers(0, runs, measured.shape),
                                            1).mean(axis=1))
                    for _ in range(_RESAMPLED)])
  peaks = np.array([peak(s, k) for _, s, k in drawn])
  found = Scaling(
      rate, sigma, kappa, _interval(drawn[:, 1]), _interval(drawn[:, 2]), peak(sigma, kappa),
      _interval(peaks), float(np.abs(throughput(sizes, rate, sigma, kappa) / mean - 1).max()),
      None, "")
  return _judged(found, sizes)


def _law(sizes: np.ndarray, mean: np.ndarray) -> tuple[float, float, float]:
  each = sizes / mean
  columns = np.stack([np.ones_like(sizes), sizes - 1, sizes * (sizes - 1)], axis=1)
  scale = np.abs(columns).max(axis=0)  # the columns differ by the square of the largest size
  found, _ = optimize.nnls(columns / scale / each[:, None], np.ones_like(each))
  one, wait, pair = found / scale
  if not one > 0:
    raise ValueError(
        "The law fits these throughputs only with a rate without limit: they don't grow with N "
        "at all.")
  return float(1 / one), float(wait / one), float(pair / one)


def _interval(values: np.ndarray) -> tuple[float, float]:
  ordered = np.sort(values)
  return (float(ordered[math.floor(0.025 * (len(ordered) - 1))]),
          float(ordered[math.ceil(0.975 * (len(ordered) - 1))]))


def _judged(found: Scaling, sizes: np.ndarray) -> Scaling:
  """With the knee, or the reason why there is none."""
  low, high = found.peak_interval
  span = f"{found.peak:,.0f} [{low:,.0f}, {high:,.0f}]"
  if found.kappa_interval[0] <= 0 or not math.isfinite(high):
    return found._replace(
        why="No knee: that throughput falls again at any size is not shown (kappa may be 0).")
  if found.peak > sizes[-1]:
    return found._replace(why=f"No knee among the sizes: the law puts it at {span}, beyond the "
                              f"largest, {sizes[-1]:,.0f}, where nothing was run.")
  return found._replace(knee=found.peak, why=f"Throughput peaks at {span}: more is less.")
