"""The largest of N: from a distribution as it was observed, and beyond it by a generalised Pareto
tail."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
from scipy import special

from jaxpace.diagnose.limits import CONFIDENCE
from jaxpace.diagnose.selected_steps import ratio

_BODY, _TOP = 1500, 3000
_SHAPES = (-0.5, 0.4)
"""Shapes of the Pareto tail are kept within these: beyond, a mean or its error hardly exists."""
_LEVELS = np.concatenate([np.linspace(1.0, 0.02, 60), np.geomspace(0.02, 1e-7, 120)[1:]])


class Pooled(NamedTuple):
  """Values of all ranks and steps, in bins that rise: single ones at the top, means of many below.

  J bins, B blocks of steps, D draws; every draw has its own number of each bin.
  """

  values: np.ndarray  # [J] or [D, J]
  counts: np.ndarray  # [B, J] or [D, J]

  def drawn(self, weights: np.ndarray) -> Pooled:
    """The distribution in each draw of blocks, [D, B] how often each is drawn."""
    return Pooled(self.values, weights @ self.counts)


def pool(values: np.ndarray, block: np.ndarray) -> Pooled:
  """Pools values [R, K] of steps in blocks [K]."""
  order = np.argsort(values, axis=None, kind="stable")
  ranked = values.reshape(-1)[order]
  size = len(ranked)
  top = min(_TOP, size)
  edges = np.unique(
      np.concatenate([np.linspace(0, size - top, min(_BODY, size - top) + 1).astype(np.int64),
                      np.arange(size - top, size)]))
  number = np.searchsorted(edges, np.arange(size), side="right") - 1
  means = np.add.reduceat(ranked, edges) / np.diff([*edges, size])
  owner = np.broadcast_to(block, values.shape).reshape(-1)[order]
  counts = np.bincount(owner * len(edges) + number, minlength=(int(block[-1]) + 1) * len(edges))
  return Pooled(means, counts.reshape(-1, len(edges)).astype(np.float64))


def largest(pooled: Pooled, number: float) -> tuple[np.ndarray, np.ndarray]:
  """Mean and variance, [D], of the largest of `number` independent draws: sum of x·(F^N -
  F_before^N)."""
  below = np.cumsum(pooled.counts, axis=1)
  power = (below / below[:, -1:])**number
  mass = np.diff(power, axis=1, prepend=0.0)
  mean = (mass * pooled.values).sum(axis=1)
  square = (mass * pooled.values**2).sum(axis=1)
  return mean, np.maximum(square - mean**2, 0.0)


def with_tail(pooled: Pooled, exceedances: int) -> Pooled:
  """Replaces the uppermost values by a generalised Pareto tail that is fitted to them, in each
  draw.

  By probability-weighted moments of the excesses y over the threshold: with a0 = mean of y and a1 =
  mean of y·(1 - F(y)), shape = 2 - a0 / (a0 - 2·a1), scale = 2·a0·a1 / (a0 - 2·a1) (Hosking and
  Wallis 1987, shape = -k).

  Args:
    pooled: counts [D, J] over values [J].
    exceedances: how many of the uppermost values, in expectation, make the tail.
  """
  values, counts = pooled.values, pooled.counts
  mean_counts = counts.mean(axis=0)
  above = np.cumsum(mean_counts[::-1])[::-1]
  first = int(np.clip(np.searchsorted(-above, -exceedances, side="right"), 1, len(values) - 2))
  threshold = values[first - 1]
  tail, excess = counts[:, first:], values[first:] - threshold
  number = np.maximum(tail.sum(axis=1), 1e-9)
  rank = np.cumsum(tail, axis=1) - tail / 2  # of the middle of each bin, from below
  a0 = (tail * excess).sum(axis=1) / number
  a1 = (tail * excess * (1 - rank / number[:, None])).sum(axis=1) / number
  spread = a0 - 2 * a1
  shape = np.clip(2 - ratio(a0, spread, np.inf), *_SHAPES)
  scale = a0 * (1 - shape)  # the mean of the excesses stays as it is where the shape was cut
  bent = np.where(np.abs(shape) < 1e-6, 1e-6, shape)
  middle = np.sqrt(_LEVELS[:-1] * _LEVELS[1:])
  quantiles = threshold + scale[:, None] / bent[:, None] * (middle[None]**(-bent[:, None]) - 1)
  mass = number[:, None] * -np.diff(_LEVELS)[None]
  body = np.broadcast_to(values[:first], (len(counts), first))
  return Pooled(np.concatenate([body, quantiles], axis=1),
                np.concatenate([counts[:, :first], mass], axis=1))


def largest_apart(pooled: Pooled, offsets: np.ndarray,
                  scale: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
  """Mean and variance, [D], of the largest of o[r] + scale·x[r], every rank with an offset of its
  own.

  The distribution function is the product over ranks of F((y - o[r]) / scale), on a grid finest
  where it rises.

  Args:
    pooled: counts [D, J].
    offsets: [D, N] seconds.
    scale: [D].
  """
  means, variances = np.empty(len(offsets)), np.empty(len(offsets))
  for d in range(len(offsets)):
    values = scale[d] * (pooled.values if pooled.values.ndim == 1 else pooled.values[d])
    below = np.cumsum(pooled.counts[d])
    log = np.log(np.maximum(below / below[-1], 1e-300))
    size, base = np.unique(offsets[d], return_counts=True)
    size, base = _together(size, base)
    high = size[-1]
    # Quantiles of one rank, shifted by the highest offset and by the median one, hold all that the
    # largest can be.
    body = values[np.linspace(0, len(values) - 1, min(len(values), 400)).astype(int)]
    grid = np.unique(np.concatenate([body + high, body + float(np.median(offsets[d])),
                                     values[-60:] + high]))
    total = np.zeros(len(grid))
    for offset, count in zip(size, base, strict=True):
      at = np.searchsorted(values, grid - offset + 1e-15, side="right") - 1
      total += count * np.where(at >= 0, log[np.maximum(at, 0)], -700.0)
    mass = np.diff(np.exp(np.maximum(total, -745.0)), prepend=0.0)
    mass /= mass.sum()
    means[d] = float((mass * grid).sum())
    variances[d] = max(float((mass * grid**2).sum()) - means[d]**2, 0.0)
  return means, variances


def _together(offsets: np.ndarray, counts: np.ndarray,
              most: int = 48) -> tuple[np.ndarray, np.ndarray]:
  """Takes neighbouring offsets together, the highest ones last: they decide."""
  if len(offsets) <= most:
    return offsets, counts
  cut = len(offsets) - most // 2
  parts = np.array_split(np.arange(cut), most // 2)
  low = np.array([np.average(offsets[p], weights=counts[p]) for p in parts])
  return (np.concatenate([low, offsets[cut:]]),
          np.concatenate([np.array([counts[p].sum() for p in parts]), counts[cut:]]))


# What all ranks have in common in a step, what each rank keeps, and what it has of its own in that
# step alone.

class Noise(NamedTuple):
  """Arrivals A[r, k] = mean + shared[k] + offset[r] + own[r, k] of one collective. U units, B
  blocks; seconds."""

  pooled: Pooled  # own, over all units and steps; [B, J] counts
  offsets: np.ndarray  # [U] lasting differences; zeros where chance would give them, too
  # their standard deviation in the population of ranks; 0 where chance would give them
  offsets_spread: float
  # [B] sum over the block's steps of max - mean, with the offsets taken out
  block_excess: np.ndarray
  block_steps: np.ndarray  # [B] steps
  own_deviation: float
  shared_deviation: float


def separate(arrival: np.ndarray, block: np.ndarray) -> Noise:
  """Separates arrivals [U, K] of steps in blocks [K].

  Ranks synchronise every step, so only what a rank has of its own makes others wait. The covariance
  of two ranks is the variance of what they share; what a step's mean is off by is given to the
  shared part in that proportion.
  """
  units = len(arrival)
  count = int(block[-1]) + 1
  steps = np.bincount(block, minlength=count).astype(np.float64)
  of_step = arrival.mean(axis=0)
  offsets, spread = _lasting(arrival - of_step, block, steps)
  level = arrival - offsets[:, None]
  own_variance = float(level.var(axis=0, ddof=1).mean())
  mean_variance = float(of_step.var(ddof=1))
  shared_variance = max(mean_variance - own_variance / units, 0.0)
  share = shared_variance / mean_variance if mean_variance > 0 else 0.0
  centre = float(of_step.mean())
  own = level - centre - share * (of_step - centre)
  excess = level.max(axis=0) - of_step
  return Noise(
      pooled=pool(own, block), offsets=offsets, offsets_spread=spread,
      block_excess=np.bincount(block, excess, count), block_steps=steps,
      own_deviation=math.sqrt(own_variance), shared_deviation=math.sqrt(shared_variance))


def calibration(noise: Noise, drawn: Pooled, weights: np.ndarray, units: int) -> np.ndarray:
  """[D] what the pooled noise is to be multiplied by, so that the largest of the recorded ranks is
  right.

  A step's mean holds a part of every rank's own noise, so taking it out leaves too little, by a
  factor between 1 and n / (n - 1). The mean of max - mean within the steps, which nothing shared
  can touch, shows which.
  """
  mean = (drawn.counts * drawn.values).sum(axis=1) / drawn.counts.sum(axis=1)
  expected = largest(drawn, units)[0] - mean
  found = (weights @ noise.block_excess) / (weights @ noise.block_steps)
  return np.clip(ratio(found, expected, 1.0), 0.9, units / (units - 1))


def predict_offsets(noise: Noise, units: int, draws: int,
                    random: np.random.Generator) -> np.ndarray:
  """[D, N] lasting differences of a job of N ranks: the recorded ones stay, new ones are drawn as
  they.

  Draws come from the predictive distribution of a normal population of unknown mean and variance:
  given a variance (n-1)s²/χ², new ranks are normal; over all draws each is Student's t with n - 1
  degrees of freedom, times s·sqrt(1 + 1/n). Of a smaller job the ranks are chosen from the recorded
  ones.
  """
  known = len(noise.offsets)
  if units <= known:
    return np.stack([random.permutation(noise.offsets)[:units] for _ in range(draws)])
  variance = (known - 1) * noise.offsets_spread**2 / random.chisquare(known - 1, draws)
  # Of 3 ranks the variance could be anything: no draw is let above 5 times the one observed.
  deviation = np.minimum(np.sqrt(variance), 5 * noise.offsets_spread)[:, None]
  centre = deviation / math.sqrt(known) * random.standard_normal((draws, 1))
  new = centre + deviation * random.standard_normal((draws, units - known))
  return np.concatenate([np.broadcast_to(noise.offsets, (draws, known)), new], axis=1)


def _lasting(relative: np.ndarray, block: np.ndarray,
             steps: np.ndarray) -> tuple[np.ndarray, float]:
  """[U] lasting differences and the spread of their population; by analysis of variance over block
  means."""
  units, count = len(relative), len(steps)
  means = np.stack([np.bincount(block, row, count) / steps for row in relative])  # [U, B]
  offsets = relative.mean(axis=1)
  between = float(offsets.var(ddof=1))
  within = (
      float(((means - means.mean(axis=1, keepdims=True))**2).sum() / ((units - 1) * (count - 1)))
      / count)
  if between <= 0:
    return np.zeros(units), 0.0
  chance = (special.fdtrc(units - 1, (units - 1) * (count - 1), between / within) if within > 0
            else 0.0)
  if chance > (1 - CONFIDENCE):
    return np.zeros(units), 0.0
  return offsets, math.sqrt(max(between - within, 0.0))
