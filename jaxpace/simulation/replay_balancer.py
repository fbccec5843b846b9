"""What a balancer would have gained in a recorded run: its own code, over the ranks' recorded
speeds."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from jaxpace.core.types import Balancer, Pacer
from jaxpace.runs.run import Run, RunError
from jaxpace.simulation.observed import observe, timestamped_alone
from jaxpace.simulation.shared_work import play

CANNOT_KNOW = (
    "What part of a rank's busy time is micro-batches: all of it is taken to be, so what does not "
    "move (the optimizer, the input pipeline) makes the true gain smaller.",
    "What a rank would do otherwise with fewer micro-batches: its time for each is taken as "
    "recorded in that step.",
    "Transfers: they stay as recorded.",
)


class CountedSteps(NamedTuple):
  """K steps that count, of R ranks."""

  steps: int
  recorded: float  # s, mean step with even counts, as recorded
  shared: float  # s, mean step with the balancer's
  changes: int  # of the counts
  last: np.ndarray  # [R] int32, counts at the end

  @property
  def speedup(self) -> float:
    return self.recorded / self.shared

  def to_json(self, *, run: str, balancer: str, notes: list[str]) -> dict[str, Any]:
    """Returns the document of `jaxpace replay --balancer --json`: seconds."""
    return {"schema": 1, "run": run, "balancer": balancer, "ranks": len(self.last),
            "steps": self.steps, "step_time": {"recorded": self.recorded, "with": self.shared},
            "speedup": self.speedup, "changes": self.changes, "counts": self.last.tolist(),
            "cannot_know": list(CANNOT_KNOW), "notes": notes}


def replay_balancer(run: Run, balancer: Balancer | Pacer, ranks: np.ndarray, counted: np.ndarray,
                    micro_batches: int | None = None) -> CountedSteps | None:
  """Plays a run with even counts again, its work shared out by a balancer.

  Args:
    run: the recorded run.
    balancer: what decides; or `share_work` of it, and then `micro_batches` too.
    ranks: the recorded ranks along one data axis, by their index along it.
    counted: [K] bool, the steps that count.
    micro_batches: of the global batch, where `balancer` is a pacer.

  Returns:
    What it would have come to; None where no step counts.

  Raises:
    RunError: the run's work was shared by speed when it was recorded, or no collective was
      timestamped.
  """
  run = timestamped_alone(run)
  if not run.collectives:
    raise RunError(
        f"{run.path} holds no collective with timestamps: without entries and exits no rank's busy "
        "time is known.")
  if "micro_batches" in run.plan.get("decisions", ()):
    raise RunError(f"The work of {run.path} was shared by speed when it was recorded: what it "
                   "would have gained shows in a run with even counts. Its own effect is in the "
                   "report where it was guarded.")
  total = balancer.micro_batches if isinstance(balancer, Balancer) else micro_batches
  if total is None:
    raise ValueError(
        "replay_balancer takes the number of micro_batches of the global batch beside a pacer.")
  seen = observe(run, ranks, 1, slice(0, len(run.steps)))
  share = total / len(ranks)
  arrivals = seen.arrivals.astype(np.float64)
  known = np.isfinite(arrivals).all(axis=1) & np.isfinite(seen.step_time).all(axis=1)
  rest = np.where(known, seen.step_time.mean(axis=1) - arrivals.max(axis=1), 0.0)
  # The ranks of a job whose micro-batches don't come out even differ by one: as if they did.
  played = play(balancer, arrivals / share, transfer=np.maximum(rest, 0.0), micro_batches=total)
  mask = known & counted & np.isfinite(played.seconds)
  if not mask.any():
    return None
  even = arrivals[mask].max(axis=1) + np.maximum(rest[mask], 0.0)
  return CountedSteps(int(mask.sum()), float(even.mean()), float(played.seconds[mask].mean()),
                      played.changes, played.counts[-1])


__all__ = ["CANNOT_KNOW", "CountedSteps", "replay_balancer"]
