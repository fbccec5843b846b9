"""Seconds between two stamps, for what reads stamps outside a step: without JAX, which takes longer
to import than a report on a small run takes."""

from __future__ import annotations

import numpy as np

# as in jaxpace.observation.clocks.words
_PER_HIGH, _PER_LOW = np.float32(2.0**32 * 1e-9), np.float32(1e-9)


def measured(nanoseconds: np.ndarray) -> np.ndarray:
  """Makes of differences of stamps what `jaxpace.observation.clocks.words.seconds_between` makes of
  them in a step: [...] float32 s, of [...] int64 ns, in numpy alone.

  To the last bit below 2**32 ns; beyond, the compiler may round once where this does twice.
  """
  size = np.abs(nanoseconds)
  seconds = ((size >> 32).astype(np.float32) * _PER_HIGH
             + (size & 0xFFFFFFFF).astype(np.float32) * _PER_LOW)
  return np.where(nanoseconds < 0, -seconds, seconds)
