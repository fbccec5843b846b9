"""Writes the pages of measurements anew from their figures, without measuring.

    python -m experiments.docs.pages

For pages whose words or intervals have changed since. Where the rounds themselves were kept,
intervals are worked out anew as well.
"""

from __future__ import annotations

import importlib
import json
import pathlib
from collections.abc import Callable
from typing import Any

import numpy as np
from absl import app

from experiments.lib import measured
from experiments.lib.paired import estimate

FOLDER = pathlib.Path("docs/measurements")
PAGES = {
    "emulated": ("experiments.paper.emulated", "tables"),
    "intervals": ("experiments.measure.intervals", "lines"),
    "null_live": ("experiments.measure.null_live", "lines"),
    "overhead": ("experiments.measure.overhead_tables", "lines"),
    "overhead_starts": ("experiments.measure.overhead_starts", "lines"),
    "pauses": ("experiments.measure.pauses", "tables"),
    "polling": ("experiments.measure.polling", "lines"),
    "polling_pinned": ("experiments.measure.polling", "lines"),
    **dict.fromkeys(("two_jobs", "two_jobs_fresh", "two_jobs_leave", "two_jobs_random"),
                    ("experiments.labs.fabric.two_jobs_tables", "markdown")),
    "update_cost": ("experiments.measure.update_cost", "lines"),
}
"""By file, the module and the function that makes its page of its figures."""


def again(name: str, figures: dict[str, Any]) -> dict[str, Any]:
  """The figures with the intervals that can be worked out anew, from rounds that are in the
  file."""
  if name.startswith("two_jobs"):
    from experiments.labs.fabric import two_jobs_figures
    for here in figures["by_congestion"].values():
      here["summary"] = two_jobs_figures.summary(here["repetitions"])
  if name == "overhead_starts":
    for entry in figures["sizes"].values():
      starts = {arm: np.asarray(values) for arm, values in entry["starts"].items()}
      entry["bare_ms"] = estimate(starts["bare"]).to_json()
      for arm, one in entry["arms"].items():
        one["percent"] = estimate((starts[arm] / starts["bare"] - 1) * 100).to_json()
        one["wall_us"] = estimate((starts[arm] - starts["bare"]) * 1e3).to_json()
  return figures


def text(name: str, figures: dict[str, Any]) -> str:
  """A page's text."""
  module, function = PAGES[name]
  make: Callable[[dict[str, Any]], list[str]] = getattr(importlib.import_module(module), function)
  return measured.portable("\n".join(make(figures)).rstrip("\n")) + "\n"


def main(_: list[str]) -> None:
  for name in PAGES:
    path = FOLDER / f"{name}.json"
    figures = again(name, json.loads(path.read_text()))
    path.write_text(measured.portable(json.dumps(figures, indent=1)) + "\n")
    path.with_suffix(".md").write_text(text(name, figures))
    print(f"Written anew: {path.with_suffix('.md')}")


if __name__ == "__main__":
  app.run(main)
