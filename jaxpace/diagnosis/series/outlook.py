"""The step time at larger numbers of ranks, or why the run doesn't tell."""

from __future__ import annotations

from typing import Any

from jaxpace.costs.fabric_file import MeasuredFabric
from jaxpace.diagnosis.forecast.forecast import forecast
from jaxpace.diagnosis.forecast.forecast_json import to_json
from jaxpace.diagnosis.forecast.sample import take_sample
from jaxpace.trace.cut import cut
from jaxpace.trace.run import Run, RunError

DOUBLINGS = 6
MOST_CELLS = 1 << 20
"""Rank-steps and collectives that a forecast is made of; of a longer run the newest steps count."""


def outlook(run: Run, fabric: MeasuredFabric | None = None) -> dict[str, Any]:
  """Returns what `jaxpace report --forecast` gives for 2 to 64 times the ranks, or `silent`: why
  there is none.

  A forecast for some of the numbers of ranks may still be silent. `newest` is whether only the
  newest steps count.
  """
  steps = max(MOST_CELLS // (run.ranks * max(len(run.collectives), 1)), 1)
  newest = int(run.inside.sum()) > steps
  if newest:
    run = cut(run, len(run.steps) - steps)
  try:
    sample = take_sample(run)
    found = forecast(sample, [sample.ranks << n for n in range(1, DOUBLINGS + 1)], fabric=fabric)
  except RunError as error:
    return {"silent": str(error), "newest": newest}
  return {"silent": None, "newest": newest, **to_json(found, run)}
