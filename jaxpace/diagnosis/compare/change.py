"""The change of a mean between two series of steps, with an interval that autocorrelated noise does
not fool."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
from scipy import special

from jaxpace.diagnosis.forecast.sample import correlation_time

# Chosen by hand; no measurement of them is published.
LEVEL = 0.95
_MOST_BLOCKS, _LEAST_BLOCKS, _MEMORIES = 50, 5, 6


class Change(NamedTuple):
  """Means of two runs and their difference, b - a, with its interval. Seconds."""

  a: float
  b: float
  difference: float
  low: float
  high: float

  @property
  def sure(self) -> bool:
    """Whether the interval leaves no change out."""
    return self.low > 0 or self.high < 0

  def relative(self) -> tuple[float, float, float] | None:
    """Difference, low and high as shares of the mean of a; None where that is 0."""
    return (self.difference / self.a, self.low / self.a, self.high / self.a) if self.a > 0 else None

  def to_json(self) -> dict[str, float | bool]:
    """Returns plain values; seconds."""
    return {**self._asdict(), "sure": self.sure}


def change(a: np.ndarray, b: np.ndarray, tests: int = 1) -> Change:
  """Compares the means of two series of neighbouring steps.

  By means of blocks, 6 times as long as the series remembers (5 to 50 blocks), and Welch's t over
  them.

  Args:
    a: [K] seconds, without NaN.
    b: [L] seconds, without NaN.
    tests: how many such comparisons are looked at together (Bonferroni).
  """
  return from_blocks(blocked(a), blocked(b), tests, float(a.mean()), float(b.mean()))


def blocked(values: np.ndarray) -> np.ndarray:
  """[B] means of blocks of neighbouring steps; the last steps are left out where they fill no
  block."""
  size = len(values)
  memory = correlation_time(values[None]) if size > 3 and float(values.std()) > 0 else 1.0
  count = int(np.clip(size // math.ceil(_MEMORIES * memory), _LEAST_BLOCKS, _MOST_BLOCKS))
  count = min(count, size)
  width = size // count
  return values[:count * width].reshape(count, width).mean(axis=1)


def from_blocks(a: np.ndarray, b: np.ndarray, tests: int = 1, mean_a: float | None = None,
                mean_b: float | None = None) -> Change:
  """The same from means of blocks, 2 or more of each."""
  mean_a = float(a.mean()) if mean_a is None else mean_a
  mean_b = float(b.mean()) if mean_b is None else mean_b
  # Times are whole nanoseconds: a spread below that is rounding.
  error_a, error_b = (max(float(x.var(ddof=1)) / len(x), 1e-20) for x in (a, b))
  freedom = (error_a + error_b)**2 / (error_a**2 / (len(a) - 1) + error_b**2 / (len(b) - 1))
  half = (float(special.stdtrit(freedom, 1 - (1 - LEVEL) / (2 * tests)))
          * math.sqrt(error_a + error_b))
  difference = mean_b - mean_a
  return Change(mean_a, mean_b, difference, difference - half, difference + half)
