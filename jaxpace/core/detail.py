"""Which steps of an observed run are written in detail, and which aggregated alone.

All ranks draw the same steps, one in each stretch of neighbouring ones, at a place that a hash
tells: checkpoints and evaluation come at regular steps, and a regular draw would see all of them or
none.
"""

from __future__ import annotations

import numpy as np

_MIX = ((np.uint64(30), np.uint64(0xBF58476D1CE4E5B9)),
        (np.uint64(27), np.uint64(0x94D049BB133111EB)))
_GOLDEN, _LAST = np.uint64(0x9E3779B97F4A7C15), np.uint64(31)

MANY_RANKS = 128
"""Ranks up to which a job writes `ROWS` rows of collectives per step and rank; above,
`FEW_ROWS`."""
ROWS, FEW_ROWS = 20, 4


def mixed(words: np.ndarray) -> np.ndarray:
  """Mixes the bits of uint64 words so that each depends on all: the finaliser of splitmix64."""
  with np.errstate(over="ignore"):
    for shift, factor in _MIX:
      words = (words ^ (words >> shift)) * factor
  return words ^ (words >> _LAST)


def every(occurrences: int, ranks: int) -> int:
  """Steps of which one is written in detail, so that a step has a bounded number of rows on
  average.

  Args:
    occurrences: collectives that a rank goes through in a step, each turn of a loop by itself.
    ranks: of the job.

  >>> every(16, 8), every(200, 8), every(200, 1024)
  (1, 10, 50)
  """
  if occurrences <= ROWS:
    return 1
  return -(-occurrences // (ROWS if ranks <= MANY_RANKS else FEW_ROWS))


def is_detailed(step: int | np.ndarray, stretch: int) -> np.ndarray:
  """Whether a step is drawn to be written in detail; of whole numbers of any shape, bool of the
  same.

  Args:
    step: number of the step, 0 or more.
    stretch: steps of which one is drawn, as `every` says.

  >>> sum(is_detailed(np.arange(1000), 10).tolist())
  100
  """
  numbers = np.asarray(step, np.uint64)
  size = np.uint64(max(1, stretch))
  which = numbers // size
  with np.errstate(over="ignore"):
    place = mixed(which * _GOLDEN + _GOLDEN) % size
  return np.asarray(numbers % size == place)
