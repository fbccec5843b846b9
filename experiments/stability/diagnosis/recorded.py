"""What one recorded run supports of structural stability: variance growth, drift, re-runs. No knee:
it has one size."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from experiments.stability.diagnosis import drift as drifts
from experiments.stability.diagnosis import growth as growths
from experiments.stability.diagnosis.drift import Drift
from experiments.stability.diagnosis.growth import Growth
from jaxpace.diagnosis.diagnosis import Diagnosis
from jaxpace.diagnosis.findings import CONTENTION, LOCALITY, PERSISTENT, Finding
from jaxpace.diagnosis.selected_steps import step_times
from jaxpace.diagnosis.wording import joined
from jaxpace.trace.problems import plural

COMPONENT = (PERSISTENT, LOCALITY, CONTENTION)
"""Findings that name a part which is not healthy; the others are of how healthy parts act on each
other."""


class Stability(NamedTuple):
  """A run's stability, as far as its record goes."""

  steps: int  # that count
  cv: float | None  # standard deviation of the step time over its mean
  growth: Growth | None
  settled: Growth | None  # with a straight drift taken out
  drift: Drift | None
  restarts: int
  # of all recorded rank-steps, the share that was recorded again later: a lower bound
  reruns: float | None
  decision: str
  silent: tuple[str, ...]  # what can't be said, and why


def recorded(diagnosis: Diagnosis) -> Stability:
  """Judges the steps that count: those of the last attempt at each step, without warm-up and
  holes."""
  run, mask = diagnosis.run, diagnosis.selected.mask
  times = step_times(run)[mask]
  times = times[np.isfinite(times)]
  growth, found = growths.grow(times), drifts.drift(times)
  settled = growths.grow(drifts.without(times)) if growth else None
  newest = run.attempt[:, run.inside]
  attempts = np.unique(newest[newest >= 0])
  kept = int((newest >= 0).sum())
  # the reader counts rows of the longer table
  again = run.duplicates / max(1, len(run.collectives))
  reruns = again / (kept + again) if kept else None
  silent = [
      "No knee: a run has one number of ranks, and a knee takes a sweep of them (see "
      "docs/stability.md).",
      "No energy to output: the record doesn't say what the steps achieved."]
  if growth is None:
    silent.insert(0, _too_short("How variance grows", len(times), growths.LEAST))
  if found is None:
    silent.insert(0, _too_short("Drift", len(times), drifts.LEAST))
  step = diagnosis.step_time
  decision = decide(diagnosis.findings, growth, settled, found, reruns or 0.0)
  return Stability(len(times), step.cv if step else None, growth, settled, found,
                   max(0, len(attempts) - 1), reruns, decision, tuple(silent))


def decide(findings: tuple[Finding, ...], growth: Growth | None, settled: Growth | None,
           found: Drift | None, reruns: float) -> str:
  """Says whether to look at the infrastructure or at how its parts are coupled, or that the run
  shows neither."""
  memory = ""
  if growth and settled and settled.rises:
    memory = (f"steps remember each other (the variance of {growth.windows[-1]:,} steps is "
              f"{settled.ratio[-1]:.1f} times that of independent ones, drift taken out)")
  drifting = (f"the step drifts by {100 * found.change:+.1f} % over the run" if found
              and found.drifts else "")
  again = f"{100 * reruns:.1f} % of what was recorded was run again" if reruns else ""
  others = [text for text in (memory, drifting, again) if text]
  components = [f for f in findings if f.mode in COMPONENT]
  if components:
    said = joined([f"{f.mode.replace('_', ' ')} ({100 * f.share:.0f} % of the step)"
                   for f in components])
    return (f"Infrastructure first: the report names {said}."
            + (f" Besides, {joined(others)}." if others else ""))
  if growth is None or settled is None:
    return "Not decided: the run is too short, or its steps don't vary."
  structural = [f"{f.mode.replace('_', ' ')} takes {100 * f.share:.0f} % of the step"
                for f in findings]
  if structural or memory:
    return ("Structural coupling rather than infrastructure: no rank, host or link stands out, and "
            f"{joined([*structural, *others])}. A cause outside that strikes all ranks at once "
            "looks the same.")
  if others:
    return (
        f"No coupling between steps is shown beyond this: {joined(others)}. No rank, host or link "
        "stands out.")
  return ("Neither shown: no rank, host or link stands out, and no step is seen to depend on those "
          "before it: what steps lose adds up, and doesn't compound.")


def to_json(stability: Stability) -> dict[str, Any]:
  """As the key "stability" of the report; null where nothing can be said."""
  return {
      "steps": stability.steps, "cv": stability.cv, "growth": _growth(stability.growth),
      "growth_without_drift": _growth(stability.settled),
      "drift": {**stability.drift._asdict(), "drifts": stability.drift.drifts,
                "alpha": drifts.ALPHA}
      if stability.drift else None,
      "restarts": stability.restarts, "rerun_fraction": stability.reruns, "knee": None,
      "decision": stability.decision, "silent": list(stability.silent)}


def _growth(growth: Growth | None) -> dict[str, Any] | None:
  if growth is None:
    return None
  return {"windows": growth.windows.tolist(), "ratio": growth.ratio.tolist(),
          "low": growth.low.tolist(), "high": growth.high.tolist(), "p": growth.p,
          "alpha": growths.ALPHA, "rises": growth.rises, "steps_per_block": growth.block}


def _too_short(what: str, steps: int, least: int) -> str:
  if steps >= least:
    return f"{what}: the steps don't vary."
  return (f"{what}: {plural(steps, 'step')} {'counts' if steps == 1 else 'count'}, {least} "
          "are needed.")
