"""What all ranks have in common in a step, what each rank keeps, and what it has of its own in that
step alone."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
from scipy import special

from jaxpace.diagnosis.forecast.tails import Pooled, largest, pool

_OFFSETS_SURE = 0.01
"""Lasting differences of ranks count as such if chance alone gives them with at most this
probability."""


class Noise(NamedTuple):
  """Arrivals A[r, k] = mean + shared[k] + offset[r] + own[r, k] of one collective. U units, B
  blocks; seconds."""

  pooled: Pooled  # own, over all units and steps; [B, J] counts
  offsets: np.ndarray  # [U] lasting differences; zeros where chance would give them, too
  # their standard deviation in the population of ranks; 0 where chance would give them
  offsets_spread: float
  block_mean: np.ndarray  # [B] sum over the block's steps of the mean arrival
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
      block_mean=np.bincount(block, of_step, count), block_excess=np.bincount(block, excess, count),
      block_steps=steps, own_deviation=math.sqrt(own_variance),
      shared_deviation=math.sqrt(shared_variance))


def calibration(noise: Noise, drawn: Pooled, weights: np.ndarray, units: int) -> np.ndarray:
  """[D] what the pooled noise is to be multiplied by, so that the largest of the recorded ranks is
  right.

  A step's mean holds a part of every rank's own noise, so taking it out leaves too little, by a
  factor between 1 and n / (n - 1). The mean of max - mean within the steps, which nothing shared
  can touch, tells which.
  """
  mean = (drawn.counts * drawn.values).sum(axis=1) / drawn.counts.sum(axis=1)
  expected = largest(drawn, units)[0] - mean
  found = (weights @ noise.block_excess) / (weights @ noise.block_steps)
  ratio = np.divide(found, expected, out=np.ones_like(found), where=expected > 0)
  return np.clip(ratio, 0.9, units / (units - 1))


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
  if chance > _OFFSETS_SURE:
    return np.zeros(units), 0.0
  return offsets, math.sqrt(max(between - within, 0.0))
