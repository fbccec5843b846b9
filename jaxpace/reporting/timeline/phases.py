"""Where within a step its phases lay: totals are recorded, and the collectives they go around.
Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from jaxpace.trace.run import Run

_DEFAULT = ("forward", "compute", "backward", "update")
_NOT_WORK = ("sync", "gap", "delay", "delay_applied", "held")
_SLIVER = 2_000
"""ns: rounding leaves pieces of phases no longer than this where none were."""


def order(run: Run) -> list[str]:
  """Phases recorded, in the order in which the plan's marks first name them; in the usual one where
  there are none."""
  marks = run.plan.get("marks")
  named = ([str(mark.get("segment")) for mark in marks if isinstance(mark, dict)]
           if isinstance(marks, list) else [])
  planned = list(dict.fromkeys(f"phase_{name}" if f"phase_{name}" in run.durations else name
                               for name in named))
  own = [name for name in run.durations if name not in _NOT_WORK and name not in _DEFAULT]
  usual = [*_DEFAULT[:1], *own, *_DEFAULT[1:]]
  wanted = planned if set(planned) & (set(usual) - {"update"}) else usual
  return [name for name in [*wanted, *(n for n in usual if n not in wanted)]
          if name in run.durations and name not in _NOT_WORK]


def pour(free: np.ndarray,
         phases: Sequence[np.ndarray]) -> Iterator[tuple[int, int, np.ndarray, np.ndarray]]:
  """Fills the free intervals of a step with its phases, one after the other.

  Args:
    free: [I, ...] ns, length of each interval between delay, collectives and end.
    phases: [...] ns each, in their order.

  Yields:
    Interval, phase, and [...] begin and end within the interval in ns; nothing lies there where
    they are equal. An interval's phases come in their order.
  """
  edges = np.concatenate([np.zeros_like(free[:1]), np.cumsum(free, axis=0)])
  reach = np.cumsum(np.stack([np.zeros_like(free[0]), *phases]), axis=0)
  # An edge of a phase within rounding of a collective is that collective.
  for p in range(1, len(reach)):
    away = np.abs(edges - reach[p])
    nearest = away.argmin(axis=0)[None]
    close = np.take_along_axis(away, nearest, axis=0)[0] <= _SLIVER
    reach[p] = np.where(close, np.take_along_axis(edges, nearest, axis=0)[0], reach[p])
  for i in range(len(free)):
    for p in range(len(phases)):
      begin = np.clip(reach[p], edges[i], edges[i + 1])
      end = np.clip(reach[p + 1], edges[i], edges[i + 1])
      if (end > begin).any():
        yield i, p, begin - edges[i], end - edges[i]
