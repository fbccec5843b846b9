"""From a recorded run to its diagnosis: shares, findings, verdict, what-if."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np

from jaxpace.diagnosis import findings as findings_module
from jaxpace.diagnosis.counted import count_steps
from jaxpace.diagnosis.diagnosis import Diagnosis, StepTime
from jaxpace.diagnosis.findings import Finding
from jaxpace.diagnosis.floor import running_minimum
from jaxpace.diagnosis.lateness import find_late
from jaxpace.diagnosis.notes import notes_on
from jaxpace.diagnosis.pacing import measured
from jaxpace.diagnosis.phases import phase_medians
from jaxpace.diagnosis.totals import add_up
from jaxpace.diagnosis.verdict import verdict_on
from jaxpace.diagnosis.what_if import Alternative, alternative, saved_without
from jaxpace.trace.run import Run


def diagnose(run: Run, progress: Callable[[int, int], None] | None = None) -> Diagnosis:
  """Diagnoses a recorded run.

  Args:
    run: the run, as `jaxpace.trace.reader.read_run` returns it.
    progress: called with the steps done and their number.
  """
  counted = count_steps(run)
  totals = add_up(run, counted, progress)
  floor = running_minimum(totals.transfer)
  steps = totals.per_step["step"][counted.mask]
  step_time = _step_time(steps) if steps.size else None
  mean = step_time.mean if step_time else float("nan")
  lateness = find_late(totals, counted, mean)
  phases = phase_medians(run, counted.mask)
  found: tuple[Finding, ...] = ()
  no_skew = no_contention = without_late = None
  without_rank: dict[int, Alternative] = {}
  shares, spread, waiting = None, 0.0, {}
  if step_time:
    parts = {name: float(values[counted.mask].mean()) for name, values in totals.per_step.items()}
    spread = parts["spread"]
    waiting = {name: parts[f"waiting_{name}"] for name in ("compute", "runtime", "pacing")}
    contention = float(floor.contention[:, counted.mask].sum(axis=0).mean())
    shares = _shares(parts, float(floor.quiet[:, counted.mask].sum(axis=0).mean()), contention)
    found = findings_module.find(run, counted, totals, lateness, phases, mean)
    no_skew = alternative(mean, float(lateness.persistent.sum() + lateness.random.sum()))
    no_contention = alternative(mean, contention)
    if any(f.mode == findings_module.PERSISTENT for f in found):
      late = lateness.late.tolist()
      without_rank = {r: alternative(mean, float(totals.without[r]) / counted.size) for r in late}
      if len(late) > 1:
        without_late = alternative(mean, saved_without(run, counted, late))
  diagnosis = Diagnosis(
      run=run, counted=counted, recorded=_recorded(run), step_time=step_time, shares=shares, waiting=waiting,
      spread=spread, floor=floor, totals=totals, lateness=lateness, phases=phases, findings=found, verdict="",
      measured=measured(run),
      no_skew=no_skew, no_contention=no_contention, without_rank=without_rank, without_late=without_late, notes=())
  return dataclasses.replace(diagnosis, verdict=verdict_on(diagnosis), notes=notes_on(diagnosis))


def _step_time(steps: np.ndarray) -> StepTime:
  mean = float(steps.mean())
  return StepTime(mean, float(np.median(steps)), float(np.quantile(steps, 0.99)),
                  float(steps.std()) / mean if mean > 0 else 0.0)


def _shares(parts: dict[str, float], quiet: float, contention: float) -> dict[str, float]:
  """Shares of the mean step: waiting is charged to its cause, waiting for a rank that computes longer is skew."""
  seconds = {
      "compute": parts["compute"],
      "skew": parts["waiting_compute"],
      "transfer": quiet + parts["spread"],
      "contention": contention,
      "runtime": parts["runtime"] + parts["waiting_runtime"],
      "pacing": parts["pacing"] + parts["waiting_pacing"],
  }
  return {name: value / parts["step"] if parts["step"] > 0 else 0.0 for name, value in seconds.items()}


def _recorded(run: Run) -> int:
  return int(((run.attempt >= 0).any(axis=0) & run.inside).sum())
