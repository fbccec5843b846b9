"""How the variance of a run grows: Var(sum over K steps) / (K Var(one step)) against K, and a test
that it stays 1.

Steps that know nothing of each other give 1 at every K, whatever their distribution: jitter over
barriers then adds up and does not compound. A rise means memory from step to step: drift, speeds
that wander, states that last, or coupling. Which of these it is the curve does not say. (The
variance ratio: Lo and MacKinlay, "Stock market prices do not follow random walks", 1988.)

The test permutes the steps, so it is exact for steps in any order (i.i.d.) at any length and any
tail. The band is a bootstrap of blocks of windows (Künsch 1989; Politis and Romano 1992), on the
logarithm of the ratio.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
from scipy import special

LEAST = 200
"""Steps below which nothing is said."""
ALPHA = 0.01
"""The i.i.d. null is given up below this: the share of i.i.d. runs that are called coupled."""
PERMUTATIONS = 499
MOST = 1 << 14
"""Longer runs are added up to so many blocks of steps; what lasts less than a block is then not
seen."""
_WIDEST = 50  # windows of the longest K that fit into a run, at least
_RESAMPLED = 400
_CELLS = 1 << 21  # numbers held at once


class Growth(NamedTuple):
  """Variance of sums over K steps. W windows."""

  windows: np.ndarray  # [W] K, steps
  ratio: np.ndarray  # [W] Var(sum) / (K Var(one step)); 1 if steps are independent
  low: np.ndarray  # [W] 95 % band of the ratio
  high: np.ndarray  # [W]
  p: float  # of a rise as large in steps that are independent
  steps: int
  block: int  # steps that were added up first, 1 in most runs

  @property
  def rises(self) -> bool:
    """Whether independent steps are given up."""
    return self.p < ALPHA


def grow(steps: np.ndarray, seed: int = 0, permutations: int = PERMUTATIONS) -> Growth | None:
  """Finds how the variance grows, with its test.

  Args:
    steps: [K] s, neighbours in time; what is not finite is left out.
    seed: of permutations and resampling.
    permutations: of the test.

  Returns:
    None where there are fewer than `LEAST` steps, or they don't vary.
  """
  steps = np.asarray(steps, np.float64)
  steps = steps[np.isfinite(steps)]
  number = len(steps)
  if number < LEAST:
    return None
  block = -(-number // MOST)
  series = steps[:number // block * block].reshape(-1, block).mean(axis=1)
  series = series - series.mean()
  if np.abs(series).max() <= 1e-12 * abs(steps.mean()):
    return None
  windows = 2 ** np.arange(1, int(math.log2(len(series) / _WIDEST)) + 1)
  random = np.random.default_rng(seed)
  ratio = variance_ratio(series, windows)
  p = _p_value(series, ratio, windows, random, permutations)
  low, high = _band(series, ratio, windows, random)
  return Growth(windows * block, ratio, low, high, p, number, block)


def variance_ratio(series: np.ndarray, windows: np.ndarray) -> np.ndarray:
  """Variance of overlapping sums over each window, over that of independent ones: [..., n] -> [...,
  W].

  Without the bias that the estimated mean brings.

  >>> variance_ratio(np.tile([1.0, -1.0], 500), np.array([2]))  # every pair adds up to nothing
  array([0.])
  """
  number = series.shape[-1]
  series = series - series.mean(axis=-1, keepdims=True)
  total = np.concatenate([np.zeros((*series.shape[:-1], 1)), np.cumsum(series, axis=-1)], axis=-1)
  one = np.square(series).sum(axis=-1) / (number - 1)
  columns = []
  for width in windows.tolist():
    sums = total[..., width:] - total[..., :-width]
    own = np.square(sums).sum(axis=-1) / ((number - width + 1) * (1 - width / number))
    columns.append(own / (width * one))
  return np.stack(columns, axis=-1)


def autoregressive(keep: float, windows: np.ndarray) -> np.ndarray:
  """[W] the ratio of a stationary AR(1), x[k + 1] = keep x[k] + noise, in closed form.

  >>> autoregressive(0.5, np.array([1, 2])).tolist()
  [1.0, 1.5]
  """
  width = np.asarray(windows, np.float64)
  return (1 + keep) / (1 - keep) - 2 * keep * (1 - keep**width) / (width * (1 - keep) ** 2)


def _p_value(series: np.ndarray, ratio: np.ndarray, windows: np.ndarray,
             random: np.random.Generator, number: int
             ) -> float:
  """Share of permutations whose largest standardised rise is as large as that of the series, itself
  counted."""
  at_once = max(1, _CELLS // len(series))
  rows = [ratio[None]]
  for begin in range(0, number, at_once):
    count = min(at_once, number - begin)
    rows.append(variance_ratio(random.permuted(np.tile(series, (count, 1)), axis=1), windows))
  # the series among its permutations: under the null it is one of them
  every = np.concatenate(rows)
  rise = ((every - every.mean(axis=0)) / np.maximum(every.std(axis=0), 1e-300)).max(axis=1)
  return float(np.mean(rise >= rise[0]))


def _band(series: np.ndarray, ratio: np.ndarray, windows: np.ndarray, random: np.random.Generator
          ) -> tuple[np.ndarray, np.ndarray]:
  """[W] low and high, 95 %."""
  total, square = _summed(series), _summed(series**2)
  half = np.zeros(len(windows))
  for i, width in enumerate(windows.tolist()):
    sums = _summed(np.square(total[width:] - total[:-width]))
    starts = len(sums) - 1
    length = max(2 * width, math.ceil(len(series) ** (1 / 3)))
    blocks = max(2, starts // length)
    begin = random.integers(0, starts - length + 1, (_RESAMPLED, blocks))
    own = (sums[begin + length] - sums[begin]).sum(axis=1)
    one = (square[begin + length] - square[begin]).sum(axis=1)
    spread = np.log(np.maximum(own, 1e-300) / np.maximum(one, 1e-300)).std()
    half[i] = special.stdtrit(blocks - 1, 0.975) * spread
  return ratio * np.exp(-half), ratio * np.exp(half)


def _summed(values: np.ndarray) -> np.ndarray:
  return np.concatenate([[0.0], np.cumsum(values)])
