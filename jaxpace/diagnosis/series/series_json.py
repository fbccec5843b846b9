"""All of the section `series`."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from jaxpace.costs.fabric_file import MeasuredFabric
from jaxpace.diagnosis.diagnosis import Diagnosis
from jaxpace.diagnosis.series.blocks import blocks
from jaxpace.diagnosis.series.distribution import distribution
from jaxpace.diagnosis.series.outlook import outlook
from jaxpace.diagnosis.series.over_time import over_time
from jaxpace.diagnosis.series.places import places
from jaxpace.diagnosis.series.skew_map import skew_map
from jaxpace.diagnosis.series.where import where

_DIGITS = 7


def series(diagnosis: Diagnosis, progress: Callable[[int, int], None] | None = None,
           fabric: MeasuredFabric | None = None) -> dict[str, Any]:
  """What changes over the run: plain values, durations in seconds, null where a value is not known.

  Its size is bounded, whatever the run's: about 3 MB for 1,024 ranks and 100,000 steps.

  Args:
    diagnosis: the diagnosed run.
    progress: called with the steps done and their number.
    fabric: what collectives cost, for the forecast.

  Returns:
    `over_time`, `skew`, `distribution` and `where` (null where no step counts), `pacing`, `places`, `forecast`.
  """
  some = diagnosis.step_time is not None
  return _plain({
      "over_time": over_time(diagnosis) if some else None,
      "skew": skew_map(diagnosis, progress) if some else None,
      "distribution": distribution(diagnosis) if some else None,
      "where": where(diagnosis) if some else None,
      "pacing": blocks(diagnosis.run),
      "places": places(diagnosis),
      "forecast": outlook(diagnosis.run, fabric)})


def _plain(value: Any) -> Any:
  """Floats to seven digits, which is more than stamps are good for; what is not finite becomes null."""
  if isinstance(value, dict):
    return {str(key): _plain(v) for key, v in value.items()}
  if isinstance(value, (list, tuple)):
    if value and all(type(v) is int for v in value):
      return list(value)
    return [_plain(v) for v in value]
  if isinstance(value, np.generic):
    value = value.item()
  if isinstance(value, float):
    return float(f"{value:.{_DIGITS}g}") if math.isfinite(value) else None
  return value
