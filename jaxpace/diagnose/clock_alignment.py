"""Puts the clocks of all hosts on one axis, by the exits of their collectives. Pure.

Ranks leave a collective nearly together, so the axis is chosen on which exits agree: for each clock
the correction that makes its exits agree, in the median over its ranks and in least absolute
deviation over time, with the median of all clocks. A correction is piecewise linear in time, so
that drift is taken out; a few exits that are late, behind a slow host say, do not move it. What no
such method can tell: a clock all of whose ranks leave every collective late by the same time looks
like a clock that is set otherwise.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from jaxpace.diagnose.groups import run_groups
from jaxpace.diagnose.limits import MIN_STEPS
from jaxpace.runs.run import MISSING, Run

SAME_CLOCK = 100_000_000
"""Processes of one host whose exits agree to so many ns as they were timestamped read one clock."""
IMPOSSIBLE = 1 << 61
"""No clock has counted so many ns: timestamps beyond are damaged, and count as `MISSING`."""
_KNOT_SECONDS, _KNOTS = 8.0, 64
"""Seconds, and exits, from knot to knot of a correction at least; and knots at most."""
_ROUNDS, _ITERATIONS = 2, 20
_NARROW = 1e3
"""ns below which deviations count alike."""
_FASTEST = 2e-3
"""Share of the time by which no clock strays, beside `SAME_CLOCK`, while it runs."""


def possible(times: np.ndarray) -> np.ndarray:
  """Which times, int64 ns, a clock may have shown."""
  return (times > -IMPOSSIBLE) & (times < IMPOSSIBLE)


@dataclasses.dataclass(frozen=True)
class Correction:
  """What to add to one clock, piecewise linear, continued beyond both ends."""

  base: int  # ns on this clock
  shift: int  # ns to add
  at: np.ndarray  # [n] float64 ns after `base`, rising, two at least
  more: np.ndarray  # [n] float64 ns to add besides `shift`

  def __call__(self, times: np.ndarray) -> np.ndarray:
    """Times on the common axis, int64 ns, of times on this clock; `MISSING` stays."""
    known = possible(times)
    x = (np.where(known, times, self.base) - self.base).astype(np.float64)
    i = np.clip(np.searchsorted(self.at, x) - 1, 0, len(self.at) - 2)
    slope = (self.more[i + 1] - self.more[i]) / (self.at[i + 1] - self.at[i])
    more = np.rint(self.more[i] + slope * (x - self.at[i])).astype(np.int64)
    return np.where(known, times + np.where(known, self.shift + more, 0), MISSING)


@dataclasses.dataclass(frozen=True)
class Alignment:
  """Corrections by clock and attempt."""

  clock: np.ndarray  # [R] clock of each rank
  attempt: np.ndarray  # [K] attempt of each step, -1 where nothing was recorded
  corrections: dict[tuple[int, int], Correction]  # by clock and attempt
  spread: float  # seconds: median deviation of exits from the common ones, once aligned
  # there are groups of ranks that nothing ties together: each is shown to begin with the others
  apart: bool = False

  def apply(self, times: np.ndarray) -> np.ndarray:
    """Puts [R, K] times, int64 ns on each rank's own clock, on the common axis; `MISSING` where
    that is not known."""
    common = np.full(times.shape, MISSING, np.int64)
    for (clock, attempt), correct in self.corrections.items():
      cells = np.ix_(np.flatnonzero(self.clock == clock), np.flatnonzero(self.attempt == attempt))
      common[cells] = correct(times[cells])
    return common


def align(run: Run) -> Alignment:
  """Finds the corrections.

  Args:
    run: the recorded run, or a window of it. Rows of older attempts do not count.

  Returns:
    The alignment. A clock without any exit has no correction; without collectives nothing ties
    clocks together, and each starts where the others do.
  """
  newest = run.attempt.max(axis=0)
  current = (run.attempt == newest) & (newest >= 0)
  timestamped = [(c.exit_ns, current & (c.attempt == newest)) for c in run.collectives]
  if not timestamped and run.end_ns is not None:
    timestamped = [(run.end_ns, current)]
  exits = [np.where(there & possible(times), times, MISSING) for times, there in timestamped]
  clock = _clocks(run, exits)
  found = run_groups(run)
  # only ranks that meet leave together: the exits of each group are events of their own
  exits = [np.where((grouped.of_rank == group)[:, None], e, MISSING)
           for e, grouped in zip(exits, found.grouped, strict=False)
           for group in range(grouped.size)]
  apart = False
  corrections: dict[tuple[int, int], Correction] = {}
  deviations, last = [np.zeros(0)], None
  for attempt in np.unique(newest[newest >= 0]).tolist():
    steps = np.flatnonzero(newest == attempt)
    # [R, E] in the order of time: all collectives of a step, then those of the next one.
    events = (np.stack([e[:, steps] for e in exits], axis=2).reshape(run.ranks, -1) if exits
              else np.zeros((run.ranks, 0), np.int64))
    own, deviation, end, loose = _attempt(events, clock, last, tied=bool(run.collectives),
                                          grouped=not found.all_meet)
    apart |= loose
    deviations.append(deviation)
    last = end if end is not None else last
    corrections.update({(c, attempt): correction for c, correction in own.items()})
  away = np.concatenate(deviations)
  return Alignment(clock, newest, corrections, float(np.median(away)) * 1e-9 if away.size else 0.0,
                   apart)


def _clocks(run: Run, exits: list[np.ndarray]) -> np.ndarray:
  """[R] clock of each rank: its process, or the first process of its host that evidently reads the
  same clock."""
  process = np.where(run.process_of_rank >= 0, run.process_of_rank,
                     -1 - np.arange(run.ranks)).astype(np.int64)
  clock = process.copy()
  hosts: dict[str, list[int]] = {}
  for number in np.unique(process).tolist():
    host = run.host_of_rank(int(np.flatnonzero(process == number)[0]))
    for other in hosts.get(host, ()) if host else ():
      apart = [_apart(e, process == other, process == number) for e in exits[:1]]
      if apart and abs(apart[0]) < SAME_CLOCK:
        clock[process == number] = other
        break
    else:
      hosts.setdefault(host, []).append(number)
  return clock


def _apart(exits: np.ndarray, one: np.ndarray, other: np.ndarray) -> float:
  """Median ns between the exits of two processes, inf where they have no step in common."""
  a, b = exits[one].max(axis=0), exits[other].max(axis=0)
  both = (a != MISSING) & (b != MISSING)
  return float(np.median(b[both] - a[both])) if both.any() else np.inf


def _attempt(events: np.ndarray, clock: np.ndarray, last: tuple[int, int, int] | None, *,
             tied: bool,
             grouped: bool = False) -> tuple[dict[int, Correction], np.ndarray,
                                             tuple[int, int, int] | None, bool]:
  """Corrections of one attempt, deviations of exits (ns), the reference clock, its last exit,
  common and own.

  And whether there are clocks that nothing ties to the reference.
  """
  clocks = np.unique(clock)
  middle = np.stack([_median(events[clock == c]) for c in clocks])  # [U, E]
  known = middle != MISSING
  if not known.any():
    return {}, np.zeros(0), None, False
  reference = int(known.sum(axis=1).argmax())
  common = middle[reference].copy()
  shift = _shift(int(clocks[reference]), int(common[known[reference]][0]), last)
  fits: dict[int, Correction] = {}
  rounds, loose = _ROUNDS, False
  while rounds:
    before = len(fits)
    for u, number in enumerate(clocks.tolist()):
      both = known[u] & (common != MISSING)
      if both.any() and tied:
        fits[number] = _fit(middle[u][both], common[both])
      elif known[u].any() and (u == reference or not tied):
        own, first = middle[u][known[u]], common[common != MISSING]
        fits[number] = Correction(int(own[0]), int(first[0] - own[0]), np.array([0.0, 1.0]),
                                  np.zeros(2))
    aligned = np.stack([fits[c](middle[u]) if c in fits else np.full_like(common, MISSING)
                        for u, c in enumerate(clocks.tolist())])
    common = _median(aligned)
    rounds -= 1
    if grouped and len(fits) > before:
      rounds = max(rounds, 1)  # what one group ties may tie the next
    untied = [u for u, c in enumerate(clocks.tolist()) if c not in fits and known[u].any()]
    if grouped and not rounds and untied:
      other = max(untied, key=lambda u: int(known[u].sum()))
      begin = int(common[common != MISSING].min() - middle[other][known[other]].min())
      common = np.where((common == MISSING) & known[other], middle[other] + begin, common)
      rounds, loose = 1, True
  ranks = np.stack([fits[c](row) if c in fits else np.full_like(row, MISSING)
                    for c, row in zip(clock.tolist(), events, strict=True)])
  there = (ranks != MISSING) & (common != MISSING)
  deviation = np.abs(ranks - common)[there] if tied else np.zeros(0, np.int64)
  end = common[common != MISSING].max()
  own_end = middle[reference][known[reference]].max()
  moved = {c: dataclasses.replace(fit, shift=fit.shift + shift) for c, fit in fits.items()}
  return moved, deviation, (int(clocks[reference]), int(end) + shift, int(own_end)), loose


def _shift(reference: int, first: int, last: tuple[int, int, int] | None) -> int:
  """ns that put an attempt after the one before: as its clock says if it is the same one, else a
  second later."""
  if last is None:
    return 0
  clock, end, own_end = last
  if clock == reference and 0 <= first - own_end < 86_400 * 10**9:
    return end - own_end
  return end + 10**9 - first


def _median(times: np.ndarray) -> np.ndarray:
  """[E] lower-middle and upper-middle mean over the rows that are known; `MISSING` where none
  is."""
  number = (times != MISSING).sum(axis=0)
  order = np.sort(times, axis=0)  # those missing come first
  missing = len(times) - number
  some = number > 0
  low = np.where(some, missing + (number - 1) // 2, 0)
  high = np.where(some, missing + number // 2, 0)
  at = np.arange(times.shape[1])
  first, second = order[low, at], order[high, at]
  return np.where(some, first + (second - first) // 2, MISSING)


def _fit(own: np.ndarray, common: np.ndarray) -> Correction:
  """Least absolute deviations, by reweighted least squares on hat functions.

  Args:
    own: [n] int64 ns on the clock.
    common: [n] int64 ns on the common axis.
  """
  base, away = int(own[0]), common - own
  x = (own - base).astype(np.float64)
  # a clock that jumped says nothing of drift
  room = SAME_CLOCK + _FASTEST * np.abs(x - np.median(x))
  shift = int(np.median(away - away[0])) + int(away[0])
  # it jumped half way: the median lies between, where no exit is
  if not (np.abs(away - shift) <= room).any():
    shift = int(np.sort(away)[(len(away) - 1) // 2])
  y = (away - shift).astype(np.float64)
  sane = np.abs(y) <= room
  x, y = x[sane], y[sane]
  low, high = float(x.min()), float(x.max())
  if len(x) < MIN_STEPS or high <= low:
    return Correction(base, shift, np.array([0.0, 1.0]), np.zeros(2))
  pieces = int(np.clip(min(len(x) // _KNOTS, (high - low) * 1e-9 / _KNOT_SECONDS), 1,
                       _KNOTS))
  at = np.linspace(low, high, pieces + 1)
  i = np.clip(np.searchsorted(at, x, side="right") - 1, 0, pieces - 1)
  right = (x - at[i]) / (at[i + 1] - at[i])
  left = 1 - right
  bend = np.zeros((max(pieces - 1, 0), pieces + 1))
  for knot in range(pieces - 1):
    bend[knot, knot:knot + 3] = 1, -2, 1
  weight = np.ones_like(x)
  more = np.zeros(pieces + 1)
  for _ in range(_ITERATIONS):
    normal = np.zeros((pieces + 1, pieces + 1))
    np.add.at(normal, (i, i), weight * left * left)
    np.add.at(normal, (i, i + 1), weight * left * right)
    np.add.at(normal, (i + 1, i), weight * left * right)
    np.add.at(normal, (i + 1, i + 1), weight * right * right)
    target = (np.bincount(i, weight * left * y, pieces + 1)
              + np.bincount(i + 1, weight * right * y, pieces + 1))
    scale = normal.trace() / (pieces + 1)
    # Knots between which there is no exit lie on the line of their neighbours.
    more = np.linalg.solve(normal + scale * (1e-6 * bend.T @ bend + 1e-12 * np.eye(pieces + 1)),
                           target)
    weight = 1 / np.maximum(np.abs(y - left * more[i] - right * more[i + 1]), _NARROW)
  return Correction(base, shift, at, more)
