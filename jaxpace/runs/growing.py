"""Reads a run that grows: each row once, or again with the part it was merged into, in a window
of bounded size."""

from __future__ import annotations

import collections
import pathlib
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from jaxpace.runs import dense, table_reader
from jaxpace.runs.columns import KEYS, Axis, Columns
from jaxpace.runs.run import MISSING, PAUSES, Process, Run
from jaxpace.runs.table_reader import Part, Rows, TableFiles


class PartFollower:
  """The new parts of one table, known by their names: a file is opened once.

  A job writes small parts and merges them into larger ones whose names cover theirs. A part counts
  as new if its range goes beyond what was read of its process; the larger part of a merge that
  holds nothing new is never opened.
  """

  def __init__(self, folder: pathlib.Path, table: str, run: str | None = None):
    """Reads nothing yet. Without the id of a run it will take that of most parts."""
    self._folder, self._table, self._run = folder, table, run
    self._read: dict[int, int] = {}  # by process, the number of the last part read
    self._torn: dict[str, tuple[int, int]] = {}  # by name, size and time of what can't be read
    self.problems: list[str] = []
    self.unnamed = ""
    """Says which files are no parts, if any are not."""
    self.newest_unix: float | None = None
    """When the newest of the parts that `poll` found was written, by the file system's clock; None
    if it found none."""

  def poll(self, columns: Sequence[str], steps: int) -> Iterator[Columns]:
    """Yields those columns of the rows that are new, oldest first in each process, at most a row
    group at a time; of what has piled up, only the newest `steps` step numbers of each process are
    wanted. Rows that a merge carried over may come a second time."""
    self.newest_unix = None
    parts, others = table_reader.list_parts(self._folder)
    self.unnamed = table_reader.others_left_out(self._table, others) if others else ""
    if self._run is None and (runs := Counter(part.run for part in parts)):
      self._run = runs.most_common(1)[0][0]
    self._torn = {part.path.name: self._torn[part.path.name] for part in parts
                  if part.path.name in self._torn}
    pending: dict[int, list[Part]] = collections.defaultdict(list)
    for part in parts:
      if part.run == self._run and self._is_new(part):
        pending[part.process].append(part)
    for process, own in sorted(pending.items()):
      yield from self._catch_up(process, table_reader.outermost(own), columns, steps)

  @property
  def refused(self) -> bool:
    """Whether files lie there that are no parts, or can't be read."""
    return bool(self.unnamed or self.problems)

  def _is_new(self, part: Part) -> bool:
    """Whether a part holds what was not read. One that could not be read is tried again once it has
    changed: it was copied in pieces, or seen too early over a network."""
    if part.path.name in self._torn:
      return self._torn[part.path.name] != _timestamp(part.path)
    return part.last > self._read.get(part.process, -1)

  def _catch_up(self, process: int, parts: list[Part], columns: Sequence[str],
                steps: int) -> Iterator[Columns]:
    """Opens parts from the newest back, as far as is wanted, and reads them in their order."""
    opened: list[tuple[Part, TableFiles]] = []
    for part in reversed(parts):
      table = TableFiles(self._table, [part])
      if table.vanished:  # merged just now: what holds its rows is listed next time
        return
      self._note(part, table)
      if table.rows:
        opened.append((part, table))
        if table.step_range[0] <= opened[0][1].step_range[1] - steps + 1:
          break
    for part, table in reversed(opened):
      yield from table.read(columns)
      if table.vanished:
        return
      self._note(part, table)
    self._read[process] = max(self._read.get(process, -1), parts[-1].last)
    if written := _timestamp(parts[-1].path)[1] / 1e9:
      self.newest_unix = max(written, self.newest_unix or 0.0)

  def _note(self, part: Part, table: TableFiles) -> None:
    """Notes what is wrong with a part, in place of what was wrong before."""
    name = part.path.name
    self.problems = [problem for problem in self.problems if name not in problem]
    self._torn.pop(name, None)
    if table.torn:
      self.problems += table.problems
      self._torn[name] = _timestamp(part.path)


def _timestamp(path: pathlib.Path) -> tuple[int, int]:
  """Size and time of the last change, ns since 1970; zeros where it is gone."""
  try:
    status = path.stat()
  except OSError:
    return 0, 0
  return status.st_size, status.st_mtime_ns


CELLS = 1 << 20
"""Ranks times collectives times steps kept, about: some 60 bytes each."""
_ROOM = 1 << 24
"""Ranks times steps, at most. A rank number that needs more is left out."""
LEAST, MOST = 256, 8192
"""Steps kept, whatever the number of ranks: processes write every few seconds, not at the same
time."""
STEPS_COLUMNS = (*KEYS, "gap_ns", "delay_applied_ns", *(cause.column for cause in PAUSES.values()))
COLLECTIVES_COLUMNS = (*KEYS, "collective", "enter_ns", "exit_ns", "held_ns")
SUMS_COLUMNS = ("sync_ns", "last_exit_ns")
"""Of observed steps: see `Window.add`."""
GUARD_COLUMNS = tuple(f"decision_{name}" for name in dense.GUARD)
_SILENT = 15.0
"""Seconds after which a rank that brings no rows is not waited for any more: the others' steps
count without it."""


def kept_steps(ranks: int, collectives: int, wanted: int) -> int:
  """Number of steps a window keeps so that it takes some 64 MiB at most, or as many as are
  wanted."""
  return max(wanted, int(np.clip(CELLS // max(1, ranks * collectives), LEAST, MOST)))


class Window:
  """The rows of the newest attempt's last W steps. Of rows that come twice the last one counts."""

  def __init__(self, steps: int, ranks: int = 0):
    """Makes an empty window of W steps, with the ranks known to be there; more are added as their
    rows come."""
    self.size = steps
    self.since = 0  # step at which the loop began that is followed
    self.left_out = 0  # rank numbers from here on had rows that were left out; 0: none
    self._room = max(_ROOM // steps, 1)
    self._begin(-1, min(ranks, self._room))

  def follow(self, since: int) -> None:
    """Follows a loop of the program from its first step on: forgets the rows of one before."""
    if since != self.since:
      self.since = since
      self._begin(self.attempt, self.ranks)

  def _begin(self, attempt: int, ranks: int) -> None:
    """Forgets all rows."""
    self.attempt = attempt
    self.first = -1  # first step of the attempt that was seen
    self.high = -1  # highest step
    self.frontier = -1  # step up to which all ranks that still write have brought theirs
    self._steps, self._collectives = Rows(), Rows()
    self.ranks = ranks
    """Ranks known so far: one more than the highest number."""
    self._last = np.full(self._room, -1, np.int64)
    self._heard = np.full(self._room, -np.inf)
    self._recorded = np.zeros(self._room, bool)

  @property
  def recorded(self) -> int:
    """Ranks that have brought rows in this attempt."""
    return int(self._recorded.sum())

  @property
  def low(self) -> int:
    """Lowest step kept."""
    return max(self.high - self.size + 1, self.first, 0)

  @property
  def last_of_rank(self) -> np.ndarray:
    """[R] last step that each rank has brought, -1 for none."""
    return self._last[:self.ranks]

  def add(self, data: Columns, now: float, leads: bool = True) -> bool:
    """Takes rows of the table `collectives` or `steps` in; says whether any counted. Those of
    `steps` say how far a rank is, `leads`, only where no collectives are recorded.

    Those of observed steps hold the time in all collectives together and the last exit: that is
    taken for one collective, which ranks enter when they have been busy for as long as they were in
    the whole step.
    """
    rows = self._admit(data, now, leads)
    if rows is None:
      return False
    if "collective" in rows:
      self._collectives.add(rows)
      return True
    self._steps.add({name: values for name, values in rows.items() if name not in SUMS_COLUMNS})
    if all(name in rows for name in SUMS_COLUMNS):
      known = np.all([rows[name] != MISSING for name in SUMS_COLUMNS], axis=0)
      leave = rows["last_exit_ns"][known]
      if leave.size:
        self._collectives.add({
            **{name: rows[name][known] for name in KEYS if name in rows},
            "enter_ns": leave - rows["sync_ns"][known], "exit_ns": leave})
    return True

  def advance(self) -> int:
    """Moves the frontier to where all ranks that still write have come, and returns it; -1 before
    there is one."""
    there = (self._last >= 0) & (self._last > self.high - self.size)
    if there.any():
      there &= self._heard > self._heard[there].max() - _SILENT
      self.frontier = max(self.frontier, int(self._last[there].min()))
    return self.frontier

  def run(self, first: int, last: int, path: pathlib.Path, info: dict[str, Any],
          processes: tuple[Process, ...]) -> Run:
    """Builds the run of the steps `first` to `last`, and the one before them, from whose exits the
    first one is measured."""
    low = max(first - 1, self.low)
    axis = Axis(np.arange(low, max(min(last, self.high), low) + 1, dtype=np.int64))
    # Where the attempt's beginning is in it, its warm-up counts as such.
    window = (low + 1 if low > self.first else None, None)
    return dense.build(path, info, processes, self._steps, self._collectives, axis, self.ranks,
                       declared=info.get("ranks") or 0, window=window)

  def _admit(self, data: Columns, now: float, leads: bool) -> Columns | None:
    """Makes room for rows, and returns those that count; None if there are none."""
    ranks, attempts = data["rank"], data["attempt"]
    sound = (data["step"] >= 0) & (ranks >= 0) & (ranks < self._room)
    if (ranks >= self._room).any():
      self.left_out = self._room
    newest = int(attempts[sound].max(initial=-1))
    # Restarted: what the attempts before did is no part of what happens now.
    if newest > self.attempt:
      self._begin(newest, self.ranks)
    sound &= (attempts == self.attempt) & (data["step"] >= self.since)
    if not sound.any():
      return None
    self.ranks = max(self.ranks, int(ranks[sound].max()) + 1)
    self.high = max(self.high, int(data["step"][sound].max()))
    for table in (self._steps, self._collectives):
      table.forget(self.high - self.size + 1)
    sound &= data["step"] > self.high - self.size
    if not sound.any():
      return None
    rows = data if sound.all() else {name: values[sound] for name, values in data.items()}
    least = int(rows["step"].min())
    self.first = least if self.first < 0 else min(self.first, least)
    self._recorded[rows["rank"]] = True
    if leads:
      np.maximum.at(self._last, rows["rank"], rows["step"])
      self._heard[rows["rank"]] = now
    return rows
