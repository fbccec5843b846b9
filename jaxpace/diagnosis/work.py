"""What sharing work by speed did in a recorded run: by what `jaxpace.share_work` recorded."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from jaxpace.trace.problems import plural
from jaxpace.trace.run import Run


@dataclasses.dataclass(frozen=True)
class WorkMoved:
  """Micro-batches shared by speed."""

  uneven_share: float  # of the recorded steps, whose counts were uneven
  uneven_at_end: bool
  guarded: bool
  on: bool | None  # whether its guard lets it act in the last recorded step
  # its guard's last estimate: (on - off) / off of the mean step; None where there is none
  effect: float | None
  interval: tuple[float, float] | None
  pairs: int

  def to_json(self) -> dict[str, Any]:
    """Plain values for the report's `pacing`."""
    return {"uneven_share": self.uneven_share, "uneven_at_end": self.uneven_at_end,
            "guarded": self.guarded, "on": self.on, "effect": self.effect,
            "effect_interval": list(self.interval) if self.interval else None, "pairs": self.pairs}

  def sentence(self) -> str:
    """What a person reads."""
    now = "uneven" if self.uneven_at_end else "even"
    said = (f"Work was shared by speed in {100 * self.uneven_share:.0f} % of the steps; at the end "
            f"counts are {now}.")
    if not self.guarded:
      return said + " No guard judged it: share_work(..., guarded=True)."
    if self.effect is None:
      return said + " Its guard has not compared any blocks."
    sure = (f"95 % interval {100 * self.interval[0]:+.1f} to {100 * self.interval[1]:+.1f} %"
            if self.interval
            else "too few for an interval")
    return (f"{said} Effect on the mean step: {100 * self.effect:+.1f} % "
            f"({sure}, {plural(self.pairs, 'pair')} of blocks).")


def work_moved(run: Run) -> WorkMoved | None:
  """Reads it from the recorded columns; None where no work was shared."""
  uneven = run.guard.get("work_uneven")
  if uneven is None:
    return None
  known = np.flatnonzero(np.isfinite(uneven) & run.inside)
  if not known.size:
    return None

  def last(name: str) -> float | None:
    values = run.guard.get(name)
    value = float("nan") if values is None else float(values[known[-1]])
    return value if np.isfinite(value) else None

  on, low, high = last("work_on"), last("work_effect_low"), last("work_effect_high")
  return WorkMoved(
      uneven_share=float(np.mean(uneven[known] > 0.5)), uneven_at_end=bool(uneven[known[-1]] > 0.5),
      guarded="work_on" in run.guard, on=None if on is None else on > 0.5,
      effect=last("work_effect"), interval=(low, high) if low is not None
      and high is not None else None, pairs=int(last("work_pairs") or 0))


__all__ = ["WorkMoved", "work_moved"]
