"""From the runs of two jobs on one trunk to the figures that are published. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from experiments.labs.fabric import timeline
from experiments.labs.fabric.timeline import Timeline
from experiments.lib.paired import jackknifed

_BLOCK = 50  # steps, for the raw figures
Figures = dict[str, Any]


def of_run(lines: Sequence[Timeline], settle: int) -> Figures:
  """Figures of one run.

  Args:
    lines: of the jobs in it, one or more.
    settle: steps at the start that don't count for what is called settled.

  Returns:
    Mean period in ms over all jobs and steps in which all of them ran; mean and CV of the settled
    steps (mean over jobs); mean delay a step; and for each job, means and standard deviations of
    the periods in blocks of 50 steps.
  """
  common = timeline.together(list(lines))
  periods = [1e3 * timeline.periods(line) for line in common]
  if any(len(values) <= settle + 1 for values in periods):
    raise ValueError(f"A run of {min(map(len, periods))} steps has nothing left after {settle} "
                     "steps to settle: ask for more --steps or a smaller --settle.")
  settled = [values[settle:] for values in periods]
  return {
      "mean_ms": _mean(values.mean() for values in periods),
      "settled_ms": _mean(values.mean() for values in settled),
      "settled_cv": _mean(values.std() / values.mean() for values in settled),
      "settled_median_ms": _mean(np.median(values) for values in settled),
      "delay_ms": _mean(1e3 * line.delays.mean() for line in common),
      "settled_delay_ms": _mean(1e3 * line.delays[settle:].mean() for line in common),
      "blocks": [{"mean_ms": _per_block(values, np.mean), "sd_ms": _per_block(values, np.std)}
                 for values in periods]}


def of_leave(stays: Timeline, left_at: float) -> Figures:
  """What the job that stays does after the other one's last step.

  Args:
    stays: the whole run of the job that stays.
    left_at: s, when the other ended.

  Returns:
    `disengaged_after`: steps from then to the last one held back, 0 if there is none; `steps`: how
      many followed;
    `held_back` of them, by `held_back_ms` in all; the mean period after the last that was, ms, None
    if none was left.
  """
  after = timeline.cut(stays, left_at)
  held = np.flatnonzero(after.delays > 0)
  quiet = int(held[-1]) + 1 if len(held) else 0
  rest = timeline.periods(Timeline(*(values[quiet:] for values in after)))
  return {"disengaged_after": quiet, "steps": len(after.steps), "held_back": len(held),
          "held_back_ms": round(1e3 * float(after.delays.sum()), 3),
          "mean_ms_after": round(1e3 * float(rest.mean()), 4) if len(rest) else None}


def summary(repetitions: Sequence[Figures]) -> Figures:
  """What all repetitions say together, each with its 95 % interval over repetitions.

  Args:
    repetitions: each a dict of `of_run` figures by `none`, `interleave`, `alone_none`,
      `alone_interleave`.

  Returns:
    Means in ms, the share of the gap recovered (of all steps and settled), CVs, and what pacing
    alone costs.
  """
  kinds = ("none", "interleave", "alone_none", "alone_interleave")
  column = {(kind, name): np.array([r[kind][name] for r in repetitions])
            for kind in kinds for name in repetitions[0][kind] if name != "blocks"}

  def mean(kind: str, name: str) -> list[float]:
    return _interval(lambda use: column[kind, name][use].mean(), len(repetitions))

  def recovered(name: str) -> list[float]:
    def share(use: np.ndarray) -> float:
      alone = column["alone_none", name][use].mean()
      gap = column["none", name][use].mean() - alone
      return (float(1 - (column["interleave", name][use].mean() - alone) / gap) if gap > 0
              else float("nan"))
    return _interval(share, len(repetitions))

  def over_alone(use: np.ndarray) -> float:
    return float(column["none", "mean_ms"][use].mean() / column["alone_none", "mean_ms"][use].mean()
                 - 1)

  def cost_alone(use: np.ndarray) -> float:
    return float(column["alone_interleave", "mean_ms"][use].mean()
                 / column["alone_none", "mean_ms"][use].mean() - 1)

  return {
      "repetitions": len(repetitions),
      **{f"{kind}_{name}": mean(kind, name) for kind in kinds
         for name in ("mean_ms", "settled_ms", "settled_cv", "delay_ms")},
      "gap": _interval(over_alone, len(repetitions)),
      "recovered": recovered("mean_ms"), "recovered_settled": recovered("settled_ms"),
      "cost_alone": _interval(cost_alone, len(repetitions))}


def _interval(figure: Callable[[np.ndarray], float], count: int) -> list[float | None]:
  """[figure of all repetitions, and the ends of Student's interval of it]; no ends where there is
  one repetition."""
  found = jackknifed(figure, count)
  return [round(value, 5) if np.isfinite(value) else None
          for value in (found.value, found.low, found.high)]


def _mean(values: Any) -> float:
  return round(float(np.mean(list(values))), 5)


def _per_block(values: np.ndarray, what: Callable[[np.ndarray], Any]) -> list[float]:
  return [round(float(what(values[k:k + _BLOCK])), 3) for k in range(0, len(values), _BLOCK)]
