"""Recursive estimators over a window of steps: constant memory, no sort, a handful of operations a
value.

Each is an `Estimator`, three pure functions on arrays. They work element by
element, so one of shape [ranks] follows all ranks at once. A value that is no duration (NaN,
infinite, negative, longer than a day) is skipped, element by element: the state stays as it was.
Before the first valid value, `value` is NaN.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxpace.coordination import knobs
from jaxpace.core.durations import valid
from jaxpace.core.types import pick

_ZERO, _ONE, _NAN = np.float32(0), np.float32(1), np.float32(np.nan)

QUANTILE_GAIN = 8.0
"""Steps of the quantile recursion are this over the window, in mean absolute errors: its scatter on
stationary normal data is then that of the exact quantile of so many values."""


class Estimator(NamedTuple):
  """A recursive estimator: `state = update(x, state)` a step, `value(state)` when wanted."""

  init: Callable[..., Any]  # (shape=()) -> state
  update: Callable[[jax.Array, Any], Any]  # (x [shape] float32 s, state) -> state
  value: Callable[[Any], jax.Array]  # state -> [shape] float32 s; NaN before the first valid value


class Mean(NamedTuple):
  """State of `mean`, all [shape] float32."""

  mean: jax.Array  # s, weighted mean so far
  weight: jax.Array  # 0 to 1, sum of the weights so far; 1 once many windows have passed


class Moments(NamedTuple):
  """State of `deviation`, all [shape] float32."""

  mean: jax.Array  # s
  variance: jax.Array  # s^2, about the mean
  weight: jax.Array  # 0 to 1


class Quantile(NamedTuple):
  """State of `quantile`, all [shape]."""

  quantile: jax.Array  # float32 s, estimate
  scale: jax.Array  # float32 s, mean absolute distance of the values from it
  seen: jax.Array  # int32, valid values so far, at most the window


def _rate(window: int) -> np.float32:
  """The exponential window whose mean scatters as much as that of a plain window of `window`
  independent values."""
  return np.float32(2.0 / (knobs.steps("window", window, 2) + 1.0))


def mean(window: int) -> Estimator:
  """Follows the mean over an exponential window, free of start-up bias.

  With rate a = 2 / (window + 1) the value of age j weighs a (1 - a)^j; the weights seen so far are
  scaled to sum to 1, so the first value counts in detail and a constant is reproduced exactly from
  the start.

  >>> average = mean(8)
  >>> state = average.init()
  >>> for x in (2e-3, float("nan"), 2e-3):
  ...   state = average.update(jnp.float32(x), state)
  >>> print(f"{average.value(state):.4f}")
  0.0020

  Args:
    window: steps, at least 2.
  """
  rate = _rate(window)

  def init(shape: tuple[int, ...] = ()) -> Mean:
    return Mean(jnp.zeros(shape, jnp.float32), jnp.zeros(shape, jnp.float32))

  def update(x: jax.Array, state: Mean) -> Mean:
    ok = valid(x)
    weight = state.weight + rate * (_ONE - state.weight)
    moved = state.mean + (rate / weight) * (x - state.mean)
    return pick(ok, Mean(moved, weight), state)

  return Estimator(init, update, lambda state: jnp.where(state.weight > _ZERO, state.mean, _NAN))


def deviation(window: int) -> Estimator:
  """Follows the standard deviation over the same exponential window as `mean`.

  The weighted form of Welford's recursion: with share b = a / weight and e = x - mean, the variance
  becomes (1 - b) (variance + b e^2), never negative and free of cancellation. The mean is in the
  state too.

  Args:
    window: steps, at least 2.
  """
  rate = _rate(window)

  def init(shape: tuple[int, ...] = ()) -> Moments:
    return Moments(*(jnp.zeros(shape, jnp.float32) for _ in range(3)))

  def update(x: jax.Array, state: Moments) -> Moments:
    ok = valid(x)
    weight = state.weight + rate * (_ONE - state.weight)
    share = rate / weight
    error = jnp.where(ok, x - state.mean, _ZERO)
    variance = jnp.maximum(_ONE - share, _ZERO) * (state.variance + share * error * error)
    moved = Moments(state.mean + share * error, variance, weight)
    return pick(ok, moved, state)

  return Estimator(init, update,
                   lambda state: jnp.where(state.weight > _ZERO, jnp.sqrt(state.variance), _NAN))


def quantile(window: int, share: float) -> Estimator:
  """Follows a quantile by stochastic approximation, its steps scaled to the data.

  Robbins and Monro's recursion: a value above the estimate q moves it up by g s p, one below down
  by g s (1 - p), and it rests where a share p lies below. The scale s is the running mean of |x -
  q|, so the recursion works in any unit and widens its steps when the data move; the gain g is
  `QUANTILE_GAIN` / window, larger in the first window. A low quantile falls fast and rises slowly:
  after a jump it falls most of the way within one window and rises within about four.

  Args:
    window: steps, at least 4.
    share: p, strictly between 0 and 1; 0.5 is the median.
  """
  window = knobs.steps("window", window, 4)
  below = knobs.number("share", share, 0, 1, "0.1 is the lowest tenth", open_ended=True)
  rate = _rate(window)

  def init(shape: tuple[int, ...] = ()) -> Quantile:
    return Quantile(jnp.zeros(shape, jnp.float32), jnp.zeros(shape, jnp.float32),
                    jnp.zeros(shape, jnp.int32))

  def update(x: jax.Array, state: Quantile) -> Quantile:
    ok = valid(x)
    count = jnp.minimum(state.seen + np.int32(1), np.int32(window))
    n = count.astype(jnp.float32)
    start = jnp.where(state.seen == np.int32(0), x, state.quantile)
    scale = state.scale + jnp.maximum(rate, _ONE / n) * (jnp.abs(x - start) - state.scale)
    step = jnp.minimum(np.float32(QUANTILE_GAIN) / n, _ONE) * scale
    up = jnp.where(x > start, below, jnp.where(x < start, below - _ONE, _ZERO))
    moved = Quantile(jnp.maximum(start + step * up, _ZERO), scale, count)
    return pick(ok, moved, state)

  return Estimator(init, update,
                   lambda state: jnp.where(state.seen > np.int32(0), state.quantile, _NAN))


def floor(window: int) -> Estimator:
  """Follows the lowest recent value: falls to a new minimum at once, leaks up towards what is seen.
  Its state is the value, [shape] float32 s; NaN before the first one.

  floor <- min(x, floor + (x - floor) / window). After the data have risen for good, it has made
  good 63 % of the rise within one window.

  Args:
    window: steps, at least 2.
  """
  leak = np.float32(1.0 / knobs.steps("window", window, 2))

  def init(shape: tuple[int, ...] = ()) -> jax.Array:
    return jnp.full(shape, _NAN)

  def update(x: jax.Array, state: jax.Array) -> jax.Array:
    start = jnp.where(jnp.isnan(state), x, state)
    moved = jnp.minimum(x, start + leak * (x - start))
    return jnp.where(valid(x), moved, state)

  return Estimator(init, update, lambda state: state)
