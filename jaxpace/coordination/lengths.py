"""Sequences of different length evened out over the ranks: a permutation of the global batch, made
on the host."""

from __future__ import annotations

import heapq
import itertools
import warnings
from typing import Any, NamedTuple

import numpy as np

from jaxpace.core import fields

_NOTHING = 0.005
"""A gain below this is none."""
_SWAPS = 64
"""Exchanges tried, times the number of ranks."""


class Costs(NamedTuple):
  """What a sequence costs: seconds = each + token * tokens + square * tokens^2. Attention is the
  square."""

  each: float
  token: float
  square: float

  def __call__(self, tokens: Any) -> np.ndarray:
    """Seconds of sequences of these lengths: [...] -> [...] float64."""
    tokens = np.asarray(tokens, np.float64)
    return self.each + self.token * tokens + self.square * tokens * tokens


def fit_costs(tokens: Any, seconds: Any) -> Costs:
  """Fits what a sequence costs to measured steps of one rank or more.

  Least squares over the steps, none of the three below zero: of the fits with some of them left out
  the best whose coefficients are not negative, which with three is exact.

  >>> steps = [[100, 200], [300, 50], [400, 400], [10, 500]]
  >>> took = [sum(1e-3 + 1e-5 * n + 1e-8 * n * n for n in step) for step in steps]
  >>> costs = fit_costs(steps, took)
  >>> print(" ".join(f"{value:.1e}" for value in costs))
  1.0e-03 1.0e-05 1.0e-08

  Args:
    tokens: for each step the lengths of the sequences that the rank had in it.
    seconds: for each step how long the rank was busy: its arrival.

  Raises:
    ValueError: nothing to fit, or numbers that are no lengths and durations.
  """
  seconds = _numbers("seconds", seconds).reshape(-1)
  sizes = [_numbers("tokens", step).reshape(-1) for step in tokens]
  if len(sizes) != len(seconds) or len(seconds) < 1:
    raise ValueError(
        f"There are lengths of {len(sizes)} steps and times of {len(seconds)}: give one time "
        "a step.")
  # Lengths in thousands: else the squares drown the rest in rounding.
  sums = np.array([[step.size, step.sum() / 1e3, (step / 1e3 * step / 1e3).sum()]
                   for step in sizes])
  if not (np.isfinite(sums).all() and np.isfinite(seconds).all() and (sums >= 0).all()
          and (seconds >= 0).all()):
    raise ValueError("Lengths and times must be finite, and none below zero.")
  scale = np.maximum(np.linalg.norm(sums, axis=0), 1e-300)
  best, least = np.zeros(3), float(seconds @ seconds)
  for used in itertools.product((False, True), repeat=3):
    columns = np.flatnonzero(used)
    if not columns.size:
      continue
    found = (np.linalg.lstsq(sums[:, columns] / scale[columns], seconds, rcond=None)[0]
             / scale[columns])
    if (found < 0).any():
      continue
    rest = float(((sums[:, columns] @ found - seconds) ** 2).sum())
    if rest < least * (1 - 1e-9):
      least, best = rest, np.zeros(3)
      best[columns] = found
  return Costs(float(best[0]), float(best[1] / 1e3), float(best[2] / 1e6))


def _numbers(name: str, values: Any) -> np.ndarray:
  """An argument as float64; ValueError, if it holds something else than numbers, or rows of
  different length."""
  try:
    found = np.asarray(values)
    if found.dtype.kind in "biuf":
      return found.astype(np.float64)
  except (TypeError, ValueError):
    pass
  raise ValueError(f"{name} must be a list of numbers, one for each; this is {values!r:.60}.")


def balance(costs: Any, ranks: int, speeds: Any = None, equal: bool = True) -> np.ndarray:
  """Says which rank gets which sequence, so that all are done at about the same time.

  Longest first to the rank that is done earliest (LPT; Graham 1969), then exchanges of one sequence
  for another, or moves where counts may differ, between the rank that is done last and the others,
  as long as they help. Nothing is trained on twice or left out: it is a permutation.

  Where all rows are packed or padded to one length they cost the same whatever they hold, and there
  is nothing to gain; that, or that as drawn it is as good, is said by a warning.

  >>> costs = [9, 1, 8, 2, 7, 3]                      # two ranks had 9 + 1 + 8 and 2 + 7 + 3
  >>> order = balance(costs, 2)
  >>> np.asarray(costs)[order].reshape(2, 3).sum(axis=1).tolist()
  [14, 16]

  Args:
    costs: [N] what each sequence of the global batch costs, in any unit: lengths, or
      `fit_costs(...)(lengths)`.
    ranks: R. Rank r gets the r-th part of the permutation, N / R sequences.
    speeds: [R] relative speeds of the ranks; all alike by default.
    equal: whether all ranks get as many sequences. Else the parts have other sizes, and a list of R
      arrays is returned.

  Returns:
    [N] int64, numbers into the batch, rank by rank; the same for the same arguments on every
    process.

  Raises:
    ValueError: an argument is out of range, or N does not divide among the ranks.
  """
  work = _numbers("costs", costs)
  count = fields.whole("ranks", ranks, 1)
  pace = np.ones(count) if speeds is None else _numbers("speeds", speeds)
  if work.ndim != 1 or not work.size or not np.isfinite(work).all() or (work < 0).any():
    raise ValueError(
        "costs must be a list of finite numbers, none below zero: one for each sequence.")
  if pace.shape != (count,) or not np.isfinite(pace).all() or (pace <= 0).any():
    raise ValueError(f"speeds must be {count} numbers above zero, one for each rank.")
  if equal and work.size % count:
    raise ValueError(
        f"{work.size} sequences don't divide among {count} ranks: give a multiple, or equal=False.")
  if (most := work.max()) > 0:
    # In parts of the longest: sums of whatever unit stay finite.
    work = work / most
  room = work.size // count if equal else work.size
  parts = _longest_first(work, pace, room)
  _exchange(work, pace, parts, equal)
  loads = np.array([work[part].sum() for part in parts]) / pace
  if equal:
    drawn = work.reshape(count, -1).sum(axis=1) / pace
    if loads.max() >= drawn.max() * (1 - _NOTHING):
      parts = [list(range(rank * room, (rank + 1) * room)) for rank in range(count)]
      if count > 1:
        why = "all cost the same" if np.ptp(work) == 0 else "as drawn it is as good"
        warnings.warn(f"jaxpace.balance gains nothing here: {why}. Rows that are packed or padded "
                      "to one length take the same time whatever they hold.", stacklevel=2)
    return np.concatenate([np.asarray(part, np.int64) for part in parts])
  return [np.asarray(part, np.int64) for part in parts]  # type: ignore[return-value]


def _longest_first(work: np.ndarray, pace: np.ndarray, room: int) -> list[list[int]]:
  """Each sequence, the longest first, to the rank that would be done with it first and has room."""
  parts: list[list[int]] = [[] for _ in pace]
  order = np.argsort(-work, kind="stable")
  if (pace == pace[0]).all():
    heap = [(0.0, rank) for rank in range(len(pace))]
    for i in order:
      load, rank = heapq.heappop(heap)
      parts[rank].append(int(i))
      if len(parts[rank]) < room:
        heapq.heappush(heap, (load + float(work[i]), rank))
    return parts
  loads = np.zeros(len(pace))
  for i in order:
    ends = np.where([len(part) < room for part in parts], (loads + work[i]) / pace, np.inf)
    rank = int(np.argmin(ends))
    loads[rank] += work[i]
    parts[rank].append(int(i))
  return parts


def _exchange(work: np.ndarray, pace: np.ndarray, parts: list[list[int]], equal: bool) -> None:
  """Exchanges sequences of the rank that is done last for shorter ones of others, in place."""
  loads = np.array([work[part].sum() for part in parts])
  for _ in range(_SWAPS * len(parts)):
    last = int(np.argmax(loads / pace))
    now, best = loads[last] / pace[last], None
    own = np.asarray(parts[last])
    for other in np.argsort(loads / pace):
      if other == last or not own.size:
        continue
      # Its own ones, and nothing in exchange where counts may differ.
      theirs = np.concatenate([work[parts[other]], [] if equal else [0.0]])
      moved = work[own][:, None] - theirs[None]
      ends = np.maximum((loads[last] - moved) / pace[last], (loads[other] + moved) / pace[other])
      a, b = (int(i) for i in np.unravel_index(int(np.argmin(ends)), ends.shape))
      if ends[a, b] < now * (1 - 1e-9) and (best is None or ends[a, b] < best[0]):
        best = (ends[a, b], int(other), a, b, moved[a, b])
        if len(parts) > 16:
          # Among many the first that helps is as good.
          break
    if best is None:
      return
    _, other, a, b, moved_work = best
    mine = parts[last].pop(a)
    if b < len(parts[other]):
      parts[last].append(parts[other].pop(b))
    parts[other].append(mine)
    loads[last] -= moved_work
    loads[other] += moved_work
