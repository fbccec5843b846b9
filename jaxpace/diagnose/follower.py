"""Follows a run directory: what is new in it is read once, and what is shown is made of a window of
bounded size."""

from __future__ import annotations

import collections
import pathlib
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import numpy as np

from jaxpace.core.words import Sentence, list_ranks, plural
from jaxpace.diagnose import stream
from jaxpace.diagnose.alive import Alert, EventFollower, ProcessFiles, judge
from jaxpace.diagnose.floor import RUNNING_MINIMUM, above, find_floor, shares_in
from jaxpace.diagnose.groups import joined_ranks
from jaxpace.diagnose.inconclusive import find_inconclusive
from jaxpace.diagnose.limits import CELLS, SAMPLED
from jaxpace.diagnose.pacing import GuardEstimate, last_estimate
from jaxpace.diagnose.selected_steps import (
  WARMUP_STEPS,
  StepTime,
  count_steps,
  step_time_of,
  step_times,
)
from jaxpace.diagnose.totals import Totals, add_up, typical
from jaxpace.diagnose.words.notes import Note
from jaxpace.record.ring.plan import CLOCK as OBSERVED_CLOCK
from jaxpace.runs import growing as windows
from jaxpace.runs.columns import Columns, joined
from jaxpace.runs.growing import PartFollower
from jaxpace.runs.loops import step_found
from jaxpace.runs.run import Run
from jaxpace.runs.rundir import RUN_FILE, left_nothing, read_json, told_by

_TOLD = 200
"""Onsets and ends that are remembered."""


class Follower:
  """A run directory, which may not be there yet, may be restarted, or be taken over by another
  run."""

  def __init__(self, path: pathlib.Path, steps: int = 200) -> None:
    """Reads nothing yet.

    Args:
      steps: steps that the numbers shown are of.
    """
    self._path, self._steps = path, steps
    self._timestamp: tuple[int, int, int] | None = None
    self._info: dict[str, Any] = {}
    self._joined: list[list[int]] | None = None  # ranks that any collective of the plan joins
    self._begin()

  def poll(self, now: float, unix: float) -> Snapshot:
    """Reads what is new.

    Raises:
      PermissionError: a folder or file can't be read.
    """
    self._read_info()
    run = self._info.get("run")
    self._processes.poll(run, now, unix)
    if self._read_rows(now, unix):
      self._update()
    return self._look(now, self._events.poll(run))

  def _begin(self) -> None:
    """Forgets everything: another run."""
    run = self._info.get("run")
    self._collectives = PartFollower(self._path / "collectives", "collectives", run)
    self._rows = PartFollower(self._path / "steps", "steps", run)
    self._processes = ProcessFiles(self._path / "process")
    self._events = EventFollower(self._path)
    self._window: windows.Window | None = None
    self._numbers: Numbers | None = None
    self._timestamped = False  # whether any collective is recorded
    self._since = 0  # first step of the loop that is shown
    self._newest: float | None = None  # s, monotonic, when the newest rows were written
    self._told: collections.deque[Alert] = collections.deque(maxlen=_TOLD)
    self._restart(-1)

  def _restart(self, attempt: int) -> None:
    """Forgets what an attempt before has shown of the job's usual speed."""
    self._attempt = attempt
    self._stream: stream.StreamState | None = None
    self._ranks = 0  # of the tests
    self._floor: np.ndarray | None = None
    self._tested = -1  # last step that was tested for onsets

  def _read_info(self) -> None:
    try:
      status = (self._path / RUN_FILE).stat()
    except OSError:
      return
    timestamp = status.st_mtime_ns, status.st_size, status.st_ino
    if timestamp == self._timestamp:
      return
    info = read_json(self._path / RUN_FILE)
    if info is None:
      return  # torn, on a file system without whole renames: next time
    self._timestamp, before, self._info = timestamp, self._info, info
    self._joined = joined_ranks(info)
    if info.get("run") != before.get("run"):
      self._begin()

  def _read_rows(self, now: float, unix: float) -> bool:
    """Reads the new parts. Collectives first: their rows are written after those of `steps`, so
    none lack theirs."""
    if self._window is None:
      ranks = self._info.get("ranks") or max((1 + max(p.ranks, default=-1)
                                                   for p in self._processes.processes),
                                                  default=0)
      planned = (self._info.get("plan") or {}).get("collectives")
      slots = 1 if planned is None or self._observed else len(planned)
      self._window = windows.Window(
          windows.kept_steps(ranks, slots, self._steps + 2), ranks)
    window, any_new = self._window, False
    window.follow(step_found(self._info).get("first_step") or 0)
    if not self._observed:
      for rows in _pieces(self._collectives.poll(windows.COLLECTIVES_COLUMNS, window.size)):
        any_new, self._timestamped = window.add(rows, now) or any_new, True
    # the sums of an observed step, as of one collective in which all ranks meet
    leads = self._observed or not self._timestamped
    columns = (*windows.STEPS_COLUMNS, *windows.GUARD_COLUMNS,
               *(windows.SUMS_COLUMNS if self._observed else ("end_ns",) if leads else ()))
    for rows in _pieces(self._rows.poll(columns, window.size)):
      any_new = window.add(rows, now, leads) or any_new
    self._timestamped |= self._observed
    written = max((p.newest_unix for p in (self._collectives, self._rows) if p.newest_unix),
                  default=None)
    if written is not None:
      self._newest = now if self._newest is not None else now - max(0.0, unix - written)
    return any_new

  @property
  def _observed(self) -> bool:
    """Whether the run is of an observed step: hundreds of collectives, of which only some steps
    have rows."""
    return self._info.get("clock") == OBSERVED_CLOCK

  def _of_sums(self) -> dict[str, Any]:
    """`run.json` of the run as it is shown: where its collectives are taken for one, the ranks that
    any of them joins are its groups."""
    if not self._observed:
      return self._info
    entry = {"slot": 0, "name": "all collectives of the step", "groups": self._joined}
    return {**self._info, "settings": {}, "plan": {"collectives": [entry], "clock": OBSERVED_CLOCK}}

  def _update(self) -> None:
    assert self._window is not None
    window = self._window
    if window.attempt != self._attempt:
      if self._attempt >= 0:
        self._told.append(Alert(
            f"Restarted: attempt {window.attempt + 1} goes on at step {window.first:,}.", True))
      self._restart(window.attempt)
    elif window.since != self._since:
      self._told.append(Alert(
          f"From step {window.since:,} on the step is {step_found(self._info).get('why')}.", True))
      self._restart(window.attempt)
    self._since = window.since
    last = window.advance()
    if last < window.low:
      return
    numbers = measure(self._cut(last - self._steps + 1, last), self._floor)
    if numbers is not None:
      self._numbers, self._floor = numbers, numbers.floor
    self._test(last)

  def _test(self, last: int) -> None:
    """Tests the steps up to `last` for onsets. An attempt's first steps, when programs compile, are
    not tested."""
    assert self._window is not None
    window = self._window
    if self._stream is None or self._ranks != window.ranks:
      self._stream, self._ranks = stream.init(window.ranks), window.ranks
    first = max(self._tested + 1, window.low + 1, window.first + WARMUP_STEPS, last - SAMPLED + 1)
    if first > last:
      return
    self._stream, alarms = stream.follow(self._stream, self._cut(first, last))
    self._tested = last
    self._told.extend(Alert(alarm.sentence(), alarm.over) for alarm in alarms)

  def _cut(self, first: int, last: int) -> Run:
    assert self._window is not None
    return self._window.run(first, last, self._path, self._of_sums(), self._processes.processes)

  def _look(self, now: float, events: tuple[Alert, ...]) -> Snapshot:
    window, numbers, seen = self._window, self._numbers, self._processes.seen
    age = None if self._newest is None else max(0.0, now - self._newest)
    step = window.high if window is not None else -1
    declared = self._declared
    state = judge(seen, declared, age if step >= 0 else None, step,
                  numbers.step_time.median if numbers else None, now)
    if state.code == "waiting" and step < 0 and (self._collectives.refused or self._rows.refused):
      state = Sentence("waiting", "No row of what lies there can be read: see below.")
    hosts = {s.process.host for s in seen if s.process.host}
    ranks = max(self._info.get("ranks") or 0, window.recorded if window else 0)
    return Snapshot(
        path=str(self._path), run=str(self._info.get("run") or ""),
        attempt=max(self._attempt, self._info.get("attempt") or 0), ranks=ranks,
        processes=max(declared, len(seen)), hosts=len(hosts), state=state, step=step,
        age=age if step >= 0 else None, numbers=numbers, alerts=tuple(self._told), events=events,
        notes=self._notes())

  @property
  def _declared(self) -> int:
    """Processes of the job, as far as it or any of them says; 0 where nothing does."""
    return (self._info or told_by(self._processes.processes)).get("processes") or 0

  def _notes(self) -> tuple[str, ...]:
    notes: list[Sentence] = []
    window, numbers = self._window, self._numbers
    away = left_nothing(self._declared, [one.process for one in self._processes.processes])
    if away and numbers is not None:
      notes.append(Sentence(Note.PARTS_AWAY, away))
    if window is not None and numbers is not None and window.high >= 0:
      behind = np.flatnonzero((window.last_of_rank < window.frontier) & (window.last_of_rank >= 0))
      if numbers.silent:
        notes.append(Note.SILENT_RANKS.say(ranks=plural(len(numbers.silent), "rank"),
            silent=list_ranks(numbers.silent)))
        notes.append(Note.NOT_CLEARED.say())
      if numbers.inconclusive:
        notes.append(Sentence(Note.UNTOLD, numbers.inconclusive))
      late = sorted(set(behind.tolist()) - set(numbers.silent))
      if late:
        notes.append(Note.STOPPED_EARLY.say(ranks=plural(len(late), "rank"),
            late=list_ranks(late)))
    if window is not None and window.left_out:
      notes.append(Note.RANKS_NOT_SHOWN.say(first=window.left_out))
    for seen in self._processes.seen:
      stopped = seen.process.info.get("stopped")
      if stopped:
        notes.append(Note.STOPPED_RECORDING.say(name=seen.name,
            stopped=str(stopped)[:300].rstrip(".")))
    unnamed = [found.unnamed for found in (self._collectives, self._rows) if found.unnamed]
    return (*[*notes, *unnamed][:8], *self._collectives.problems[-3:], *self._rows.problems[-3:])


def _pieces(new: Iterable[Columns]) -> Iterator[Columns]:
  """Rows of many processes together, as far as they take little memory."""
  waiting: list[Columns] = []
  number = 0
  for rows in new:
    waiting.append(rows)
    number += len(rows["step"])
    if number > CELLS:
      yield from joined(waiting)
      waiting, number = [], 0
  yield from joined(waiting)


# What is shown, as values: made of a window of the run by the same functions as the report.


class LateRank(NamedTuple):
  """A rank of the window. Seconds."""

  rank: int
  host: str
  lateness: float  # mean undelayed arrival after the typical rank, which is the lower median
  last: float  # part of the steps in which the job waited for it
  cost: float  # share of the step that the ranks waited for it


class Numbers(NamedTuple):
  """A window of steps. K steps, seconds."""

  first: int
  last: int
  steps: int  # that count
  warmup: int  # left out as warm-up
  step_time: StepTime
  series: np.ndarray  # [K] mean over ranks, NaN where not known; the warm-up is in it
  shares: dict[str, float]
  late: tuple[LateRank, ...]  # the latest first
  silent: tuple[int, ...]  # ranks without a row in the window
  delayed: float  # part of the ranks' steps of the window with a delay
  guard: GuardEstimate
  floor: np.ndarray  # [C] lowest so far
  inconclusive: str = ""  # why nobody can say who is late, in a sentence


class Snapshot(NamedTuple):
  """Everything the screen shows at one moment."""

  path: str
  run: str
  attempt: int
  ranks: int
  processes: int
  hosts: int
  state: Sentence  # see `alive.judge`
  step: int  # last recorded; -1 for none
  age: float | None  # s since the newest rows were written
  numbers: Numbers | None
  alerts: tuple[Alert, ...]  # of the steps, the newest last
  events: tuple[Alert, ...]  # of watchdogs, the newest last
  notes: tuple[str, ...]


def measure(run: Run, floor: np.ndarray | None = None) -> Numbers | None:
  """Measures a window; None where no step of it counts."""
  selected = count_steps(run)
  if not selected.size or (not run.collectives and run.end_ns is None):
    return None
  totals = add_up(run, selected)
  known = selected.mask & np.isfinite(totals.per_step["step"])
  steps = totals.per_step["step"][known]
  if not steps.size or not steps.mean() > 0:
    return None
  own = find_floor(run, None, totals).floor
  if floor is not None and floor.shape == own.shape:
    own = np.fmin(own, floor)
  divided = above(totals.transfer, own, RUNNING_MINIMUM, 0)
  if run.silent.size:
    # What is waited for may be they.
    divided = divided.inconclusive_in(np.ones(len(run.steps), bool))
  present = int(totals.present.sum())
  return Numbers(
      first=int(run.steps[selected.mask][0]), last=int(run.steps[-1]), steps=selected.size,
      warmup=len(selected.warmup), step_time=step_time_of(steps),
      series=step_times(run)[run.inside],
      shares=shares_in(totals, divided, known),
      late=_late(run, totals), silent=tuple(run.silent.tolist()),
      delayed=totals.delayed / present if present else 0.0, guard=last_estimate(run),
      floor=own, inconclusive=find_inconclusive(run, selected))


def _late(run: Run, totals: Totals) -> tuple[LateRank, ...]:
  """Ranks by lateness; nobody where no collective shows it."""
  known = np.flatnonzero(totals.present > 0)
  if not run.collectives or len(known) < 2:
    return ()
  joined = totals.groups.joined[known]
  mean = totals.lateness.sum(axis=(0, 2))[known] / totals.present[known]
  lateness = mean - typical(mean, joined)
  elapsed = float(np.nansum(totals.per_step["step"]))
  rows = []
  for at in np.argsort(-lateness, kind="stable")[:64].tolist():
    rank = int(known[at])
    rows.append(LateRank(rank, run.host_of_rank(rank), float(lateness[at]),
                         float(totals.last[rank] / totals.present[rank]),
                         float(totals.blame[rank]) / elapsed))
  return tuple(rows)
