"""What pacing did to the step time, measured on the job: by the blocks in which a guard let it act
and held it back."""

from __future__ import annotations

import dataclasses
import math
from typing import Any, NamedTuple

import numpy as np

from jaxpace.diagnose.limits import INTERVAL
from jaxpace.diagnose.selected_steps import step_times
from jaxpace.runs.problems import plural
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


@dataclasses.dataclass(frozen=True)
class PacingEffect:
  """The effect of pacing, (on - off) / off of the mean step time: below zero is faster with
  pacing."""

  effect: float | None  # over all recorded pairs of blocks; None where there are none
  # 95 %, holds however often it is looked at; None where there are too few pairs
  interval: tuple[float, float] | None
  pairs: int
  guard: GuardEstimate
  alike: bool  # whether all ranks judged alike; otherwise the blocks are those of one rank

  def to_json(self) -> dict[str, Any]:
    """Plain values for the report's `pacing`."""
    return {"effect": self.effect,
            "effect_interval": list(self.interval) if self.interval else None,
            "blocks": 2 * self.pairs,
            "guard": {**self.guard.to_json(), "ranks_alike": self.alike}}

  def sentence(self) -> str:
    """What a person reads."""
    state = {True: "At the end it lets pacing act.", False: "At the end it holds pacing back.",
             None: ""}[self.guard.on]
    if self.effect is None:
      return ("The guard has not compared any blocks: nothing was delayed or held back, or not "
              f"for long enough. {state}").rstrip()
    sure = (f"{_in_words(self.interval)}, {plural(self.pairs, 'pair')} of blocks" if self.interval
            else f"too few pairs of blocks ({self.pairs}) for an interval")
    alike = "" if self.alike else " Each rank judged for itself; this is by one rank's blocks."
    return (f"Effect on the mean step: {100 * self.effect:+.1f} % with pacing ({sure}). "
            f"{state}{alike}").rstrip()


def measured(run: Run) -> PacingEffect | None:
  """Measures the effect from the recorded steps; None where no guard ran.

  The means of the recorded steps by arm in each of the guard's pairs give one difference a pair,
  and these the interval of `jaxpace.coordination.sequential`. So it is over all pairs of the run
  (or the window), while the guard's own estimate starts anew whenever it returns to pairs, and
  leaves the last steps out that its news were not there for.
  """
  compared = compare(run)
  if compared is None:
    return None
  effect, interval = (effect_of(compared.means, compared.variance) if len(compared.means)
                      else (None, None))
  return PacingEffect(
      effect=effect, interval=interval, pairs=len(compared.means), guard=last_estimate(run),
      alike=run.plan.get("share") is not False)


def last_estimate(run: Run, written: str = "guard_on", on: str = "guard_on", prefix: str = ""
                  ) -> GuardEstimate:
  """Reads what a guard said last.

  Args:
    run: the recorded run.
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


class Compared(NamedTuple):
  """The pairs of blocks that have steps of both kinds. P pairs."""

  means: np.ndarray  # [P, 2] mean step time with pacing and without, s
  variance: float  # s^2, that their differences would have were steps independent
  first_step: np.ndarray  # [P] step numbers
  last_step: np.ndarray  # [P] step numbers


def compare(run: Run) -> Compared | None:
  """Compares the steps of every pair of blocks; None where no guard ran."""
  columns = run.guard
  if not columns or "guard_pair" not in columns:
    return None
  times, pair, on = step_times(run), columns["guard_pair"], columns["guard_on"]
  # Pair 0 counts nowhere: a fresh state's first row is all zeros.
  at = np.flatnonzero(np.isfinite(times) & (pair > 0) & np.isfinite(on) & run.inside)
  nothing = np.empty(0, np.int64)
  if not at.size:
    return Compared(np.empty((0, 2)), 0.0, nothing, nothing)
  # a restarted guard counts pairs from 0 again
  attempt = run.attempt.max(axis=0)[at].astype(np.int64)
  _, number = np.unique(np.stack([attempt, pair[at].astype(np.int64)]), axis=1, return_inverse=True)
  number = number.reshape(-1)
  size = int(number.max()) + 1
  arm = np.where(on[at] > 0.5, 0, 1)
  sums = np.stack([np.bincount(number, times[at] * (arm == a), size) for a in (0, 1)], axis=1)
  squares = np.stack([np.bincount(number, times[at]**2 * (arm == a), size) for a in (0, 1)], axis=1)
  steps = np.stack([np.bincount(number, arm == a, size) for a in (0, 1)], axis=1)
  first, last = np.full(size, np.iinfo(np.int64).max), np.full(size, -1)
  np.minimum.at(first, number, run.steps[at])
  np.maximum.at(last, number, run.steps[at])
  both = (steps > 0).all(axis=1)
  if not both.any():
    return Compared(np.empty((0, 2)), 0.0, nothing, nothing)
  sums, squares, steps = sums[both], squares[both], steps[both]
  within = np.maximum(squares / steps - (sums / steps)**2, 0) / np.maximum(steps - 1, 1)
  return Compared(sums / steps, float(np.median(within.sum(axis=1))), first[both], last[both])


def effect_of(means: np.ndarray, variance: float) -> tuple[float, tuple[float, float] | None]:
  """The effect that some pairs show, and its 95 % interval, which holds however often one looks.

  Args:
    means: [P, 2] mean step time with pacing and without, s; one pair at least.
    variance: s^2, of a difference, were steps independent.

  Returns:
    (on - off) / off, and its interval, None where there are too few pairs for one.
  """
  difference, off = means[:, 0] - means[:, 1], float(means[:, 1].mean())
  effect = float(difference.mean()) / off
  half = _half_width(difference, variance)
  return effect, (effect - half / off, effect + half / off) if math.isfinite(half) else None


def _half_width(difference: np.ndarray, variance: float) -> float:
  # imports JAX, for which a report without a guard needn't wait
  from jaxpace.coordination import plain, sequential

  # The variance is the same whichever of a pair's blocks had pacing, so the interval stays valid.
  squares = float(((difference - difference.mean())**2).sum())
  rho = sequential.prior(max(variance, 1e-30))
  return float(sequential.half_width(len(difference), squares, rho, -math.log(1 - INTERVAL), plain))


# What sharing work by speed did in a recorded run: by what `jaxpace.share_work` recorded.

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
      return said + " No guard judged it: share_work(..., guarded=True)."
    effect, interval = self.guard.effect, self.guard.interval
    if effect is None:
      return said + " Its guard has not compared any blocks."
    sure = _in_words(interval) if interval else "too few for an interval"
    return (f"{said} Effect on the mean step: {100 * effect:+.1f} % "
            f"({sure}, {plural(self.guard.pairs, 'pair')} of blocks).")


def work_moved(run: Run) -> WorkMoved | None:
  """Reads it from the recorded columns; None where no work was shared."""
  uneven = run.guard.get("work_uneven")
  if uneven is None:
    return None
  known = np.flatnonzero(np.isfinite(uneven) & run.inside)
  if not known.size:
    return None
  return WorkMoved(float(np.mean(uneven[known] > 0.5)), bool(uneven[known[-1]] > 0.5),
                   "work_on" in run.guard, last_estimate(run, "work_uneven", "work_on", "work_"))
