"""What a collective's transfer takes on a quiet fabric, estimated from the run itself."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

RUNNING_MINIMUM = "running minimum"
_SHORTEST, _LONGEST = 5, 33


class Floor(NamedTuple):
  """Floor of each collective, and the transfers split by it: transfer = quiet + contention in every step."""

  floor: np.ndarray  # [C] seconds, NaN where no transfer is known
  quiet: np.ndarray  # [C, K] min(transfer, floor), NaN where the transfer is not known
  contention: np.ndarray  # [C, K] max(transfer - floor, 0)
  source: str
  width: int  # steps of the running median; 0 where the floor is known from elsewhere

  @property
  def known(self) -> bool:
    """Whether the floor was measured on a quiet fabric; otherwise contention is a lower bound."""
    return self.width == 0


def running_minimum(transfer: np.ndarray) -> Floor:
  """Takes as floor the lowest running median of the transfer over the run.

  A bare minimum hangs on one freak reading: two exits stamped out of turn give a transfer of 0, and every
  other step would then count as contended. The median of 5 to 33 neighbouring steps, a twentieth of the run's,
  asks that the fabric be quiet for some steps before it is believed. A fabric that is never quiet in the run
  keeps its contention inside the floor: contention is a lower bound.

  Args:
    transfer: [C, K] seconds, NaN where not known.
  """
  known = int(np.isfinite(transfer).sum(axis=1).max(initial=0))
  width = int(np.clip(known // 20, _SHORTEST, _LONGEST)) | 1
  floor = np.array([_lowest_median(row[np.isfinite(row)], width) for row in transfer])
  quiet = np.minimum(transfer, floor[:, None])
  return Floor(floor, quiet, transfer - quiet, RUNNING_MINIMUM, width)


def _lowest_median(values: np.ndarray, width: int) -> float:
  if not values.size:
    return float("nan")
  if values.size < width:
    return float(np.median(values))
  windows = np.lib.stride_tricks.sliding_window_view(values, width)
  return min(float(np.partition(windows[i:i + 4096], width // 2, axis=1)[:, width // 2].min())
             for i in range(0, len(windows), 4096))
