"""What a guard's blocks of steps with pacing and without showed, pair by pair."""

from __future__ import annotations

from typing import Any

import numpy as np

from jaxpace.diagnosis.pacing import compare, effect_of
from jaxpace.diagnosis.selected_steps import step_times
from jaxpace.trace.run import Run

MOST_PAIRS = 256
MOST_BLOCKS = 512
_EFFECTS = 128


def blocks(run: Run) -> dict[str, Any] | None:
  """Returns the `pairs`, the `effect` as it became known, and the `blocks`; None where no guard
  ran.

  `pairs` holds means of the step time with pacing (`on`) and without (`off`); neighbouring pairs
  are taken together where there are more than 256. `effect` is after so many pairs, the last one
  being the report's. `blocks` are the stretches in which the guard let pacing act or held it back,
  compared or not; null where there are more than 512.
  """
  compared = compare(run)
  if compared is None:
    return None
  number = len(compared.means)
  group = np.arange(number) * min(number, MOST_PAIRS) // max(number, 1)
  begin = np.flatnonzero(np.diff(group, prepend=-1))
  size = np.diff(np.append(begin, number))
  means = (np.add.reduceat(compared.means, begin, axis=0) / size[:, None] if number
           else np.empty((0, 2)))
  effects: dict[str, list[Any]] = {"pairs": [], "last_step": [], "effect": [], "low": [],
                                   "high": []}
  for n in sorted({int(x) for x in np.geomspace(1, number, _EFFECTS)}) if number else ():
    effect, interval = effect_of(compared.means[:n], compared.variance)
    low, high = interval if interval else (None, None)
    row = {"pairs": n, "last_step": int(compared.last_step[:n].max()), "effect": effect, "low": low,
           "high": high}
    for name, value in row.items():
      effects[name].append(value)
  return {
      "pairs": {"first_step": np.minimum.reduceat(compared.first_step, begin).tolist() if number
                else [],
                "last_step": np.maximum.reduceat(compared.last_step, begin).tolist() if number
                else [],
                "number": size.tolist() if number else [], "on": means[:, 0].tolist(),
                "off": means[:, 1].tolist()},
      "effect": effects, "blocks": _stretches(run)}


def _stretches(run: Run) -> list[dict[str, Any]] | None:
  """Stretches of steps in which the guard's state stayed."""
  on, times = run.guard["guard_on"], step_times(run)
  at = np.flatnonzero(np.isfinite(on) & run.inside)
  if not at.size:
    return []
  state = on[at] > 0.5
  begin = np.flatnonzero(np.diff(state, prepend=~state[:1]))
  if len(begin) > MOST_BLOCKS:
    return None
  end = np.append(begin[1:], len(at))
  return [{"first_step": int(run.steps[at[b]]), "last_step": int(run.steps[at[e - 1]]),
           "on": bool(state[b]), "step_time": _mean(times[at[b:e]])}
          for b, e in zip(begin, end, strict=True)]


def _mean(values: np.ndarray) -> float | None:
  known = values[np.isfinite(values)]
  return float(known.mean()) if known.size else None
