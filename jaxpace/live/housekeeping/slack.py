"""By how much this process is early, read off the pace state late and without waiting."""

from __future__ import annotations

import collections
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxpace.core import own_context

_KEEP = 16
_ENOUGH = 8
_QUANTILE = 0.1  # early by as much in nine steps of ten


class SlackReader:
  """Follows the earliness of all ranks, from the arrivals that the ranks share
  (`jaxpace.instrument(share=True)`).

  Now and then it queues a copy of two small vectors behind the step, and reads the copy at a later
  call, when it is there: nothing waits, and all is done by the thread that trains.

  Args:
    interval: calls of `see` from one copy to the next.
    ranks: indices along the data axis of this process's ranks; None to take them from the pace
      state.
  """

  def __init__(self, interval: int, ranks: Sequence[int] | None = None):
    self._interval = interval
    self._own = None if ranks is None else np.asarray(list(ranks), np.int64)
    self._numbers: list[Any] | None = None
    self._copy: Any = None
    self._calls = 0
    # each [R] s, earliness
    self._readings: collections.deque[np.ndarray] = collections.deque(maxlen=_KEEP)

  def see(self, pace: Any) -> None:
    """Takes what has come of the last copy, and now and then queues the next.

    Args:
      pace: pace state as the step returned it; it may be donated afterwards.
    """
    self._calls += 1
    if self._own is None:
      self._find_own(pace)
    if self._copy is not None:
      if not self._copy.is_ready():
        return
      self._take(own_context.fetch(self._copy))
      self._copy = None
    if self._calls % self._interval == 0:
      arrivals, delays = (field.addressable_shards[0].data
                          for field in (pace.arrivals, pace.delays))
      with own_context.on(arrivals):
        self._copy = _joined()(arrivals, delays)

  def own(self) -> float | None:
    """Returns the seconds this process's ranks are all early by in nine steps of ten; None while
    that isn't known."""
    if self._own is None or len(self._readings) < _ENOUGH or not len(self._own):
      return None
    return float(np.quantile(np.stack(self._readings)[:, self._own].min(axis=1), _QUANTILE))

  def largest(self) -> float | None:
    """Returns the same for the earliest rank of the job; None while that isn't known."""
    if len(self._readings) < _ENOUGH:
      return None
    return float(np.quantile(np.stack(self._readings), _QUANTILE, axis=0).max())

  def _take(self, joined: np.ndarray) -> None:
    """[2, R] s: arrivals, delays. NaN in any rank's: not shared, or its first step."""
    entered = joined[0] + joined[1]
    if np.isfinite(entered).all() and len(entered) > 1:
      self._readings.append(entered.max() - entered)

  def _find_own(self, pace: Any) -> None:
    ranks = pace.arrivals.shape[-1]
    if ranks not in (pace.rank.shape[0], jax.device_count()):
      # Other mesh axes: a device's number is not its index along the data axis.
      self._own = np.empty((0,), np.int64)
      return
    if self._numbers is None:
      self._numbers = [_duplicate(shard.data) for shard in pace.rank.addressable_shards]
    if all(number.is_ready() for number in self._numbers):
      self._own = np.concatenate([own_context.fetch(number).reshape(-1)
                                  for number in self._numbers]).astype(np.int64)


@functools.cache
def _joined() -> Any:
  return jax.jit(lambda arrivals, delays: jnp.stack([arrivals.reshape(-1), delays.reshape(-1)]))


@functools.cache
def _copied() -> Any:
  return jax.jit(jnp.copy)


def _duplicate(array: jax.Array) -> Any:
  with own_context.on(array):
    return _copied()(array)
