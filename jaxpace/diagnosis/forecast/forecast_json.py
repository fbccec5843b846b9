"""The forecast as a JSON document."""

from __future__ import annotations

from typing import Any

from jaxpace.costs.fabric_file import Estimate
from jaxpace.diagnosis.codes import codes
from jaxpace.diagnosis.forecast.forecast import LEVEL, Forecast, Point
from jaxpace.trace.run import Run

SCHEMA = 1


def to_json(found: Forecast, run: Run) -> dict[str, Any]:
  """Returns plain lists, dicts and scalars; seconds, and shares of one. Where it is silent, the
  values are null."""
  sample = found.sample
  return {
      "schema": SCHEMA, "run": run.id, "path": str(run.path), "ranks": sample.ranks,
      "hosts": sample.hosts, "steps": sample.steps, "level": LEVEL, "fabric": found.fabric,
      "recorded": {"step_time": found.recorded, "cv": found.recorded_cv,
                   "efficiency": found.efficiency},
      "model": {
          "units": sample.units, "ranks_of_unit": sample.unit, "blocks": sample.blocks,
          "collectives": [
              {"name": collective.name, "kind": collective.kind, "bytes": collective.size,
               "arrival": float(sample.arrival[i].mean()), "own_noise": noise.own_deviation,
               "common_noise": noise.shared_deviation, "lasting_differences": noise.offsets_spread,
               "transfer": float(sample.transfer[i].mean()), "floor": float(sample.floor[i])}
              for i, (collective, noise) in enumerate(
                  zip(sample.collectives, found.noises, strict=True))]},
      "forecasts": [_point(point) for point in found.points],
      "notes": [str(note) for note in found.notes], "note_codes": codes(found.notes)}


def _point(point: Point) -> dict[str, Any]:
  values = {name: value.to_json() if isinstance(value, Estimate) else value
            for name, value in point._asdict().items()}
  why = point.silent
  return {**values, "silent": None if why is None else str(why),
          "silent_code": None if why is None else str(why.code)}
