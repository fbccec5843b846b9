"""What a replay comes to, and what it cannot know."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from jaxpace.simulation.replay import Replayed

CANNOT_KNOW = (
    "Whether pacing helps. In this model no rank's delay makes another rank faster, so pacing "
    "cannot gain: the figure is what it would cost.",
    "Whether ranks that wait and poll slow the late ones down (CPU, SMs, power). That is where "
    "pacing early ranks can gain, and only a live run with pacing on and off shows it.",
    "Contention with other jobs: moving this job's phase changes what its collectives take, here "
    "they stay as recorded.",
    "Pauses (garbage collection, checkpoints) moved to other steps: they stay where they were.",
    "What a delay costs on a GPU or a busy machine: delays are taken as applied exactly as asked, "
    "at no cost of their own.",
)
NOT_OF_HOLDS = (
    "Whether holding collectives back helps: they take as long as recorded, whoever else is held "
    "back, and what is heard is what was heard then, whatever is done about it.",
)
"""Of a pacer with a `hold`, besides."""


class HeldSummary(NamedTuple):
  """What a pacer's `hold` asked for, over the steps that count. Seconds."""

  mean: float  # asked for and listened, a step
  longest: float  # the same in one step
  active: float  # share of steps in which it asked for anything, or listened
  cost: float  # sum of H
  listened: int  # times it wanted to listen
  unanswered: int  # of these, times of which there is no reading on record
  on_record: int  # readings on record
  asked: int  # questions: collectives before which it was asked
  # share of questions to which the answer is as recorded; None where the record doesn't tell
  agreement: float | None


class ReplaySummary(NamedTuple):
  """A replay over the steps that count: those whose every rank is known, without the warm-up. R
  ranks; seconds."""

  steps: int
  left_out: int  # steps recorded that don't count
  recorded: float  # mean step as recorded
  bare: float  # mean step without any delay
  replayed: float  # mean step with the replayed delays
  cost: float  # sum of L
  active: float  # share of steps in which some rank is delayed
  longest: float  # longest delay
  delay: np.ndarray  # [R] float64 mean delay of each rank
  active_of_rank: np.ndarray  # [R] float64 share of steps in which it is delayed
  columns: dict[str, float]  # mean over ranks and steps of the pacer's own columns, where known
  agreement: float  # share of delays, over ranks and steps, that equal those recorded as asked
  held: HeldSummary | None  # None where nobody was asked

  @property
  def change(self) -> float:
    """Share by which the replayed pacer lengthens the step."""
    return self.replayed / self.bare - 1 if self.bare > 0 else 0.0


def summarise(replayed: Replayed, counted: np.ndarray) -> ReplaySummary | None:
  """Adds a replay up.

  Args:
    replayed: what `replay` returned.
    counted: [K] bool, the steps that count, as far as they are known.

  Returns:
    The summary; None where no step counts.
  """
  mask = counted & replayed.known
  steps = int(mask.sum())
  if not steps:
    return None
  delays = replayed.delays[mask].astype(np.float64)
  bare, cost = float(replayed.bare[mask].mean()), float(replayed.cost[mask].sum())
  columns = {}
  for name, values in replayed.columns.items():
    known = values[mask][np.isfinite(values[mask])]
    if known.size:
      columns[name] = float(known.mean(dtype=np.float64))
  recorded = int(np.isfinite(replayed.recorded).sum())
  paced = bare + (cost + float(replayed.hold_cost[mask].sum())) / steps
  return ReplaySummary(
      steps, recorded - steps, float(replayed.recorded[mask].mean()), bare,
      paced, cost, float((delays > 0).any(axis=1).mean()), float(delays.max()),
      delays.mean(axis=0), (delays > 0).mean(axis=0), columns, float(replayed.agrees[mask].mean()),
      _held(replayed, mask))


def _held(replayed: Replayed, mask: np.ndarray) -> HeldSummary | None:
  """Adds up what was held in the steps that count."""
  holds = replayed.holds
  seconds = holds.held[mask].astype(np.float64)
  asked = int(np.isfinite(seconds).sum())
  if not asked:
    return None
  by_step = np.nan_to_num(seconds).sum(axis=1)
  listened = holds.listened[mask]
  told = replayed.holds_recorded[mask]
  return HeldSummary(
      float(by_step.mean()), float(by_step.max()),
      float(((by_step > 0) | (listened > 0).any(axis=1)).mean()),
      float(replayed.hold_cost[mask].sum()), int(listened.sum()), int(holds.unanswered[mask].sum()),
      int(replayed.readings[mask].sum()), asked,
      float(replayed.holds_agree[mask][told].mean()) if told.any() else None)


def to_json(summary: ReplaySummary, *, run: str, pacer: str, shared: bool, as_recorded: bool,
            notes: list[str]
            ) -> dict[str, Any]:
  """Returns the document of `jaxpace replay --json`: seconds, and shares of one."""
  return {
      "schema": 1, "run": run, "pacer": pacer, "shared": shared, "as_recorded": as_recorded,
      "ranks": len(summary.delay), "steps": summary.steps, "steps_left_out": summary.left_out,
      "step_time": {"recorded": summary.recorded, "without": summary.bare,
                    "with": summary.replayed},
      "change": summary.change,
      "cost": {"total": summary.cost, "share": summary.cost / (summary.bare * summary.steps)},
      "active_share": summary.active,
      "delay": {"mean": float(summary.delay.mean()), "longest": summary.longest, "by_rank": {
          str(rank): {"mean": float(mean), "active_share": float(share)}
          for rank, (mean, share) in enumerate(zip(summary.delay, summary.active_of_rank,
                                                   strict=True))}},
      "held": None if summary.held is None else _held_json(summary.held, summary, as_recorded),
      "columns": summary.columns, "agreement": summary.agreement if as_recorded else None,
      "cannot_know": cannot_know(summary), "notes": notes}


def _held_json(held: HeldSummary, summary: ReplaySummary, as_recorded: bool) -> dict[str, Any]:
  return {"mean": held.mean, "longest": held.longest, "active_share": held.active,
          "cost": {"total": held.cost, "share": held.cost / (summary.bare * summary.steps)},
          "listened": held.listened, "unanswered": held.unanswered, "on_record": held.on_record,
          "agreement": held.agreement if as_recorded else None}


def cannot_know(summary: ReplaySummary) -> list[str]:
  """What a replay can't know, of this one."""
  return [*CANNOT_KNOW, *(NOT_OF_HOLDS if summary.held is not None else ())]
