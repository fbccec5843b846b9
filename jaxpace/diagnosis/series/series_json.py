"""All of the section `series`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from jaxpace.costs.fabric_file import MeasuredFabric
from jaxpace.diagnosis.diagnosis import Diagnosis
from jaxpace.diagnosis.series.blocks import blocks
from jaxpace.diagnosis.series.distribution import distribution
from jaxpace.diagnosis.series.outlook import outlook
from jaxpace.diagnosis.series.over_time import over_time
from jaxpace.diagnosis.series.places import places
from jaxpace.diagnosis.series.skew_map import skew_map
from jaxpace.diagnosis.series.where import where
from jaxpace.files.plain import to_plain

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
    `over_time`, `skew`, `distribution` and `where` (null where no step counts), `pacing`, `places`,
    `forecast`.
  """
  some = diagnosis.step_time is not None
  return to_plain({
      "over_time": over_time(diagnosis) if some else None,
      "skew": skew_map(diagnosis, progress) if some else None,
      "distribution": distribution(diagnosis) if some else None,
      "where": where(diagnosis) if some else None,
      "pacing": blocks(diagnosis.run),
      "places": places(diagnosis),
      "forecast": outlook(diagnosis.run, fabric)}, _DIGITS)
