"""What pacing did to the step time, measured on the job: by the blocks in which a guard let it act
and held it back."""

from __future__ import annotations

import dataclasses
import math
from typing import Any, NamedTuple

import numpy as np

from jaxpace.core.words import plural
from jaxpace.diagnose.limits import INTERVAL
from jaxpace.diagnose.selected_steps import step_times
from jaxpace.runs.run import Run


class GuardEstimate(NamedTuple):
  """What a guard itself said in the last step in which it wrote anything, of the pairs of blocks
  since it last returned to pairs."""

  on: bool | None  # whether it lets act; None where that isn't known, or no guard runs
  effect: float | None  # (on - off) / off of the mean step; None until known
  interval: tuple[float, float] | None
  pairs: int

  def to_json(self) -> dict[str, Any]:
    """Plain values."""
    return {"on": self.on, "effect": self.effect, "pairs": self.pairs,
            "effect_interval": list(self.interval) if self.interval else None}


@dataclasses.dataclass(frozen=True, eq=False)
class PacingEffect:
  """The effect of pacing, (on - off) / off of the mean step time: below zero is faster with pacing.

  P pairs of blocks, those that have steps of both kinds.
  """

  means: np.ndarray  # [P, 2] mean step time with pacing and without, s
  variance: float  # s^2, that their differences would have were steps independent
  first_step: np.ndarray  # [P] step numbers
  last_step: np.ndarray  # [P] step numbers
  guard: GuardEstimate
  alike: bool  # whether all ranks judged alike; otherwise the blocks are those of one rank

  @property
  def pairs(self) -> int:
    """Of all that was recorded."""
    return len(self.means)

  @property
  def effect(self) -> float | None:
    """Over all recorded pairs; None where there are none."""
    return self.after(self.pairs)[0]

  @property
  def interval(self) -> tuple[float, float] | None:
    """95 %, of all pairs; None where these are too few."""
    return self.after(self.pairs)[1]

  def after(self, pairs: int) -> tuple[float | None, tuple[float, float] | None]:
    """The effect that the first pairs show, and its interval, which holds however often one
    looks."""
    if not pairs:
      return None, None
    # imports JAX, for which a report without a guard needn't wait
    from jaxpace.coordination import coins

    means = self.means[:pairs]
    difference, off = means[:, 0] - means[:, 1], float(means[:, 1].mean())
    effect = float(difference.mean()) / off
    # The variance is the same whichever of a pair's blocks had pacing, so the interval stays valid.
    rho = coins.prior(max(self.variance, 1e-30))
    squares = ((difference - difference.mean())**2).sum()
    half = float(coins.half_width(pairs, squares, rho, -math.log(1 - INTERVAL), np)) / off
    return effect, (effect - half, effect + half) if math.isfinite(half) else None

  def to_json(self) -> dict[str, Any]:
    """Plain values for the report's `pacing`."""
    interval = self.interval
    return {"effect": self.effect, "effect_interval": list(interval) if interval else None,
            "blocks": 2 * self.pairs, "guard": {**self.guard.to_json(), "ranks_alike": self.alike}}

  def sentence(self) -> str:
    """What a person reads."""
    state = {True: "At the end it lets pacing act.", False: "At the end it holds pacing back.",
             None: ""}[self.guard.on]
    effect, interval = self.after(self.pairs)
    if effect is None:
      return ("The guard has not compared any blocks: nothing was delayed or held back, or not "
              f"for long enough. {state}").rstrip()
    sure = (f"{_in_words(interval)}, {plural(self.pairs, 'pair')} of blocks" if interval
            else f"too few pairs of blocks ({self.pairs}) for an interval")
    alike = "" if self.alike else " Each rank judged for itself; this is by one rank's blocks."
    return (f"Effect on the mean step: {100 * effect:+.1f} % with pacing ({sure}). "
            f"{state}{alike}").rstrip()


def measured(run: Run) -> PacingEffect | None:
  """Measures the effect from the recorded steps; None where no guard ran.

  The means of the recorded steps by arm in each of the guard's pairs give one difference a pair,
  and these the interval of `jaxpace.coordination.coins`. So it is over all pairs of the run
  (or the window), while the guard's own estimate starts anew whenever it returns to pairs, and
  leaves the last steps out that its news were not there for.
  """
  if "guard_pair" not in run.guard:
    return None
  times, pair, on = step_times(run), run.guard["guard_pair"], run.guard["guard_on"]
  # Pair 0 counts nowhere: a fresh state's first row is all zeros.
  at = np.flatnonzero(np.isfinite(times) & (pair > 0) & np.isfinite(on) & run.inside)
  # a restarted guard counts pairs from 0 again
  attempt = run.attempt.max(axis=0)[at].astype(np.int64)
  _, number = np.unique(np.stack([attempt, pair[at].astype(np.int64)]), axis=1, return_inverse=True)
  number = number.reshape(-1)
  size = int(number.max(initial=-1)) + 1
  block = 2 * number + (on[at] <= 0.5)
  sums, squares, steps = (np.bincount(block, values, 2 * size).reshape(size, 2)
                          for values in (times[at], times[at]**2, np.ones(len(at))))
  first, last = np.full(size, np.iinfo(np.int64).max), np.full(size, -1)
  np.minimum.at(first, number, run.steps[at])
  np.maximum.at(last, number, run.steps[at])
  both = (steps > 0).all(axis=1)
  sums, squares, steps = sums[both], squares[both], steps[both]
  within = np.maximum(squares / steps - (sums / steps)**2, 0) / np.maximum(steps - 1, 1)
  return PacingEffect(
      sums / steps, float(np.median(within.sum(axis=1))) if both.any() else 0.0, first[both],
      last[both], last_estimate(run), run.plan.get("share") is not False)


def last_estimate(run: Run, written: str = "guard_on", on: str = "guard_on", prefix: str = ""
                  ) -> GuardEstimate:
  """Reads what a guard said last.

  Args:
    written: column that says in which steps it wrote.
    on: column that says whether it lets act.
    prefix: of its other columns.
  """
  wrote = run.guard.get(written)
  at = np.empty(0, int) if wrote is None else np.flatnonzero(np.isfinite(wrote) & run.inside)

  def last(name: str) -> float | None:
    values = run.guard.get(name)
    if values is None or not at.size or not np.isfinite(values[at[-1]]):
      return None
    return float(values[at[-1]])

  state, low, high = last(on), last(f"{prefix}effect_low"), last(f"{prefix}effect_high")
  return GuardEstimate(
      None if state is None else state > 0.5, last(f"{prefix}effect"),
      None if low is None or high is None else (low, high), int(last(f"{prefix}pairs") or 0))


def _in_words(interval: tuple[float, float]) -> str:
  return f"95 % interval {100 * interval[0]:+.1f} to {100 * interval[1]:+.1f} %"


# What sharing work by speed did in a recorded run: by what its counts were.

@dataclasses.dataclass(frozen=True)
class WorkMoved:
  """Micro-batches shared by speed."""

  uneven_share: float  # of the recorded steps, whose counts were uneven
  uneven_at_end: bool
  guarded: bool
  guard: GuardEstimate

  def to_json(self) -> dict[str, Any]:
    """Plain values for the report's `pacing`."""
    return {"uneven_share": self.uneven_share, "uneven_at_end": self.uneven_at_end,
            "guarded": self.guarded, **self.guard.to_json()}

  def sentence(self) -> str:
    """What a person reads."""
    now = "uneven" if self.uneven_at_end else "even"
    said = (f"Work was shared by speed in {100 * self.uneven_share:.0f} % of the steps; at the end "
            f"counts are {now}.")
    if not self.guarded:
      return said + " No guard judged it: jaxpace.guard(balancer)."
    effect, interval = self.guard.effect, self.guard.interval
    if effect is None:
      return said + " Its guard has not compared any blocks."
    sure = _in_words(interval) if interval else "too few for an interval"
    return (f"{said} Effect on the mean step: {100 * effect:+.1f} % "
            f"({sure}, {plural(self.guard.pairs, 'pair')} of blocks).")


def work_moved(run: Run) -> WorkMoved | None:
  """Reads it from the recorded columns; None where no work was shared."""
  # Of all steps: those that are detailed may be of one kind, for uneven ones fetch their batch.
  uneven, steps = ((run.guard.get("work_uneven"), run.steps) if run.aggregated is None else
                   (run.aggregated.uneven, run.aggregated.steps))
  if uneven is None:
    return None
  known = np.flatnonzero(np.isfinite(uneven) & run.asked(steps))
  if not known.size:
    return None
  return WorkMoved(float(np.mean(uneven[known] > 0.5)), bool(uneven[known[-1]] > 0.5),
                   "work_on" in run.guard, last_estimate(run, "work_uneven", "work_on", "work_"))
