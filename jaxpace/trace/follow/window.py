"""The newest steps of a run in memory: a ring of bounded size, from which parts are cut as a
`Run`."""

from __future__ import annotations

import pathlib
from typing import Any

import numpy as np

from jaxpace.trace.decisions import GUARD
from jaxpace.trace.dense import CollectiveRows, SlotTimes
from jaxpace.trace.follow.columns import CAUSES, Columns
from jaxpace.trace.reader import name_collectives
from jaxpace.trace.run import MISSING, HeldTimes, HostCauses, Process, Run

CELLS = 1 << 21
"""Ranks times collectives times steps kept, about: 16 bytes each."""
_ROOM = 1 << 24
"""Ranks times steps, at most: 20 bytes each for a collective. A rank number that needs more is left
out."""
LEAST, MOST = 256, 8192
"""Steps kept, whatever the number of ranks: processes write every few seconds, not at the same
time."""
RANKS = 1 << 17
"""Rank numbers from here on are damaged."""
STEPS_COLUMNS = ("step", "rank", "process", "attempt", "gap_ns", "delay_applied_ns", *CAUSES)
COLLECTIVES_COLUMNS = ("step", "rank", "process", "attempt", "collective", "enter_ns", "exit_ns",
                       "held_ns")
SUMS_COLUMNS = ("sync_ns", "last_exit_ns")
"""Of observed steps: see `Window.add_steps`."""
GUARD_COLUMNS = tuple(f"decision_{name}" for name in GUARD)
_LARGEST_STEP = 1 << 53
_SILENT = 15.0
"""Seconds after which a rank that brings no rows is not waited for any more: the others' steps
count without it."""


def kept_steps(ranks: int, collectives: int, wanted: int) -> int:
  """Number of steps a window keeps so that it takes some 32 MiB at most, or as many as are
  wanted."""
  return max(wanted, int(np.clip(CELLS // max(1, ranks * collectives), LEAST, MOST)))


class Window:
  """The newest attempt's last W steps. Rows that come twice land in the same cells: nothing is
  counted twice."""

  def __init__(self, steps: int, ranks: int = 0):
    """Makes an empty window.

    Args:
      steps: W.
      ranks: ranks known to be there; more are added as their rows come.
    """
    self.size = steps
    self.attempt = -1
    self.first = -1  # first step of the attempt that was seen
    self.high = -1  # highest step
    self.frontier = -1  # step up to which all ranks that still write have brought theirs
    self._ranks = 0
    self._guard_rank = -1  # whose guard is shown: the lowest rank's
    self._clear()
    self.left_out = 0  # rank numbers from here on had rows that were left out; 0: none
    self._grow(min(ranks, max(_ROOM // steps, 1)))

  @property
  def ranks(self) -> int:
    """Ranks known so far: one more than the highest number."""
    return self._ranks

  @property
  def recorded(self) -> int:
    """Ranks that have brought rows in this attempt."""
    return int(((self._recorded >= 0).any(axis=1) | (self._last >= 0)).sum())

  @property
  def low(self) -> int:
    """Lowest step kept."""
    return max(self.high - self.size + 1, self.first, 0)

  @property
  def last_of_rank(self) -> np.ndarray:
    """[R] last step that each rank has brought, -1 for none."""
    return self._last

  def add_collectives(self, data: Columns, now: float) -> bool:
    """Takes rows of the table `collectives` in, at `now` (seconds, monotonic). Returns whether any
    row counted."""
    placed = self._place(data, now, leads=True)
    if placed is None:
      return False
    rows, ranks, at = placed
    enter, leave = data["enter_ns"][rows], data["exit_ns"][rows]
    slots = data["collective"][rows]
    for slot in np.unique(slots).tolist():
      own = slots == slot
      times = self._slots.get(slot)
      if times is None:
        if len(self._slots) * self._ranks * self.size > 4 * _ROOM:
          continue
        times = self._slots[slot] = _no_times((self._ranks, self.size))
      times.enter_ns[ranks[own], at[own]] = enter[own]
      times.exit_ns[ranks[own], at[own]] = leave[own]
      times.attempt[ranks[own], at[own]] = self.attempt
      if "held_ns" in data:
        if times.held is None:
          times.held = HeldTimes.missing((self._ranks, self.size))
        times.held.held_ns[ranks[own], at[own]] = data["held_ns"][rows[own]]
    return True

  def add_steps(self, data: Columns, now: float, leads: bool) -> bool:
    """Takes rows of the table `steps` in.

    Of an observed step they hold the time in all its collectives together and the last exit: that
    is taken for one collective, which ranks enter when they have been busy for as long as they were
    in the whole step.

    Args:
      data: the rows.
      now: seconds, monotonic.
      leads: whether they say how far a rank is: where no collectives are recorded.

    Returns:
      Whether any row counted.
    """
    placed = self._place(data, now, leads)
    if placed is None:
      return False
    rows, ranks, at = placed
    self._recorded[ranks, at] = self.attempt
    for name, values in self._durations.items():
      if f"{name}_ns" in data:
        values[ranks, at] = _seconds(data[f"{name}_ns"][rows])
    for column in CAUSES:
      if column in data:
        name = column.removesuffix("_ns")
        if name not in self._causes:
          self._causes[name] = np.full((self._ranks, self.size), np.nan, np.float32)
        self._causes[name][ranks, at] = _seconds(data[column][rows])
    if all(name in data for name in SUMS_COLUMNS):
      leave, waited = (data[name][rows] for name in reversed(SUMS_COLUMNS))
      known = (leave != MISSING) & (waited != MISSING)
      times = self._slots.setdefault(0, _no_times((self._ranks, self.size)))
      own = ranks[known], at[known]
      times.enter_ns[own], times.exit_ns[own] = leave[known] - waited[known], leave[known]
      times.attempt[own] = self.attempt
    if leads and "end_ns" in data:
      self._end[ranks, at] = data["end_ns"][rows]
    guards = [name for name in GUARD_COLUMNS if name in data]
    if guards:
      lowest = int(ranks.min())
      if self._guard_rank < 0 or lowest <= self._guard_rank:
        self._guard_rank = lowest
        own = ranks == lowest
        for name in guards:
          values = self._guard.setdefault(name.removeprefix("decision_"),
                                          np.full(self.size, np.nan, np.float32))
          values[at[own]] = data[name][rows[own]]
    return True

  def advance(self, now: float) -> int:
    """Moves the frontier to where all ranks that still write have come, and returns it; -1 before
    there is one."""
    there = (self._last >= 0) & (self._last > self.high - self.size)
    if there.any():
      there &= self._heard > self._heard[there].max() - _SILENT
      self.frontier = max(self.frontier, int(self._last[there].min()))
    return self.frontier

  def run(self, first: int, last: int, path: pathlib.Path, info: dict[str, Any],
          processes: tuple[Process, ...]) -> Run:
    """Cuts the steps `first` to `last` out, and the one before them, from whose exits the first one
    is measured.

    Args:
      first: first step wanted.
      last: last step wanted, as far as it is kept.
      path: run directory.
      info: `run.json`.
      processes: as they described themselves.
    """
    low = max(first - 1, self.low)
    steps = np.arange(low, max(min(last, self.high), low) + 1, dtype=np.int64)
    at = steps % self.size
    slots = {slot: SlotTimes(t.enter_ns[:, at], t.exit_ns[:, at], t.attempt[:, at],
                             None if t.held is None else t.held.at(at))
             for slot, t in self._slots.items()}
    attempt = self._recorded[:, at]
    for times in slots.values():
      np.maximum(attempt, times.attempt, out=attempt)
    # All ranks of a process have its causes: those of its first one are taken.
    owners, own = np.unique(self._process, return_index=True)
    own = own[owners >= 0]
    causes = HostCauses(owners[owners >= 0].astype(np.int64), {
        name: values[np.ix_(own, at)]
        for name, values in self._causes.items()} if own.size else {})
    # Where the attempt's beginning is in it, its warm-up is told as such.
    middle = low > self.first
    return Run(path=path, id=str(info.get("run") or path.name), info=info, processes=processes,
               steps=steps, attempt=attempt, end_ns=None if slots else self._end[:, at],
               durations={name: values[:, at] for name, values in self._durations.items()},
               collectives=name_collectives(info, CollectiveRows(slots, {}, self._process)),
               process_of_rank=self._process.copy(), skipped={}, duplicates=0, problems=(),
               window=(low + 1 if middle else None, None),
               guard={name: values[at] for name, values in self._guard.items()}, host_causes=causes,
               declared=info.get("ranks") or 0)

  def _place(self, data: Columns, now: float,
             leads: bool) -> tuple[np.ndarray, np.ndarray, np.ndarray] | None:
    """Rows that count, their ranks and their places in the ring; None if there are none."""
    steps, ranks = data["step"], data["rank"]
    attempts = data["attempt"]
    sound = ((steps >= 0) & (steps < _LARGEST_STEP) & (ranks >= 0) & (ranks < RANKS)
             & (attempts < 1 << 15))
    room = max(self._ranks, _ROOM // self.size)
    if (ranks[sound] >= room).any():
      self.left_out, sound = room, sound & (ranks < room)
    if not sound.any():
      return None
    newest = int(attempts[sound].max())
    # restarted: what the attempts before did is no part of what happens now
    if newest > self.attempt:
      self._clear()
      self.attempt, self.first, self.high, self.frontier = newest, -1, -1, -1
    rows = np.flatnonzero(sound & (attempts == self.attempt))
    if not rows.size:
      return None
    self._grow(int(ranks[rows].max()) + 1)
    self._roll(int(steps[rows].max()))
    rows = rows[steps[rows] > self.high - self.size]
    if not rows.size:
      return None
    steps, ranks = steps[rows], ranks[rows]
    least = int(steps.min())
    self.first = least if self.first < 0 else min(self.first, least)
    if "process" in data:
      self._process[ranks] = np.clip(data["process"][rows], -1, RANKS)
    if leads:
      np.maximum.at(self._last, ranks, steps)
      self._heard[ranks] = now
    return rows, ranks, steps % self.size

  def _clear(self) -> None:
    shape = self._ranks, self.size
    self._recorded = np.full(shape, -1, np.int16)
    self._end = np.full(shape, MISSING, np.int64)
    self._durations = {name: np.full(shape, np.nan, np.float32)
                       for name in ("gap", "delay_applied")}
    self._causes: dict[str, np.ndarray] = {}  # [R, W] s, by name
    self._slots: dict[int, SlotTimes] = {}
    self._guard: dict[str, np.ndarray] = {}
    self._guard_rank = -1
    self._process = np.full(self._ranks, -1, np.int32)
    self._last = np.full(self._ranks, -1, np.int64)
    self._heard = np.full(self._ranks, -np.inf)

  def _grow(self, ranks: int) -> None:
    more = ranks - self._ranks
    if more <= 0:
      return

    def grown(values: np.ndarray, empty: float) -> np.ndarray:
      return np.concatenate([values, np.full((more, *values.shape[1:]), empty, values.dtype)])

    self._recorded, self._end = grown(self._recorded, -1), grown(self._end, MISSING)
    self._durations = {name: grown(values, np.nan) for name, values in self._durations.items()}
    self._causes = {name: grown(values, np.nan) for name, values in self._causes.items()}
    for slot, times in self._slots.items():
      self._slots[slot] = SlotTimes(grown(times.enter_ns, MISSING), grown(times.exit_ns, MISSING),
                                    grown(times.attempt, -1), None if times.held is None else
                                    HeldTimes(*(grown(each, MISSING) for each in times.held)))
    self._process, self._last = grown(self._process, -1), grown(self._last, -1)
    self._heard = grown(self._heard, -np.inf)
    self._ranks = ranks

  def _roll(self, high: int) -> None:
    """Makes room for steps up to `high`: the oldest go."""
    if high <= self.high:
      return
    first = max(self.high + 1, high - self.size + 1) if self.high >= 0 else high - self.size + 1
    at = np.arange(first, high + 1) % self.size
    self.high = high
    if len(at) == self.size and self.first < 0:
      return  # still empty
    self._recorded[:, at], self._end[:, at] = -1, MISSING
    for values in (*self._durations.values(), *self._causes.values()):
      values[:, at] = np.nan
    for times in self._slots.values():
      times.enter_ns[:, at], times.exit_ns[:, at], times.attempt[:, at] = MISSING, MISSING, -1
      if times.held is not None:
        times.held.held_ns[:, at] = MISSING
    for values in self._guard.values():
      values[at] = np.nan


def _no_times(shape: tuple[int, int]) -> SlotTimes:
  return SlotTimes(np.full(shape, MISSING, np.int64), np.full(shape, MISSING, np.int64),
                   np.full(shape, -1, np.int16))


def _seconds(values: np.ndarray) -> np.ndarray:
  return np.where(values == MISSING, np.nan, values * 1e-9).astype(np.float32)
