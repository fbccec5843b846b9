"""A merged timeline of all ranks, clocks aligned by the exits of collectives: what each rank did,
who waited for whom, and what was found, laid out as slices. Pure."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import numpy as np

from jaxpace.core.words import plain
from jaxpace.diagnose.accounting import account
from jaxpace.diagnose.clock_alignment import Alignment, align
from jaxpace.diagnose.modes.inputs import Finding
from jaxpace.diagnose.step_times import busy
from jaxpace.runs.dense import Bounds
from jaxpace.runs.run import MISSING, PAUSES, Run, cut
from jaxpace.show.slices import (
  JOB,
  UNKNOWN,
  Slices,
  Timeline,
  Track,
  order,
  pour,
  text,
)


class TimelineWaits(NamedTuple):
  """Of one collective."""

  last: np.ndarray  # [K] rank that the others waited for
  transfer: np.ndarray  # [K] ns; -1 where not known
  longest: np.ndarray  # [K] ns
  # [R, K] `last` and `transfer` of each; None: all alike
  of_rank: tuple[np.ndarray, np.ndarray] | None = None


def collective_waits(run: Run) -> list[TimelineWaits]:
  """Who was last and how long the transfer took, as the report accounts for them; by waits where it
  does not."""
  if not run.collectives:
    return []
  work, newest = busy(run, slice(0, len(run.steps))), run.attempt.max(axis=0)
  accounted, found = work.valid.any(axis=0), []
  for collective, split in zip(run.collectives, account(work).waits, strict=True):
    there = ((collective.enter_ns != MISSING) & (collective.exit_ns != MISSING)
             & (collective.attempt == newest))
    wait = np.where(there, np.clip(collective.exit_ns - collective.enter_ns, 0, None),
                    np.iinfo(np.int64).max)
    # Where ranks wait for those of their own group only: of the group that waits longest.
    longest = np.where(split.there, split.early, -1.0).argmax(axis=0)[None]
    last = np.take_along_axis(split.last, longest, axis=0)[0]
    of_ranks = np.where(work.valid & np.isfinite(split.transfer),
                        np.rint(np.nan_to_num(split.transfer) * 1e9), -1).astype(np.int64)
    transfer = np.take_along_axis(of_ranks, longest, axis=0)[0]
    if work.meetings.all_meet:
      last = np.where(accounted, last, wait.argmin(axis=0))
      least = np.where(there.any(axis=0), wait.min(axis=0), -1)
      transfer = np.where(accounted, transfer, least)
      found.append(TimelineWaits(last, transfer, np.where(there, wait, 0).max(axis=0)))
    else:
      most = np.where(there & (split.last == last), wait, 0).max(axis=0)
      found.append(TimelineWaits(last, transfer, most, (split.last, of_ranks)))
  return found


MOST_SLICES = 2_000_000
"""A timeline of more takes a browser too long."""
_PAUSE_THREAD = 1 << 24
"""Tracks of a process from this number on show its pauses; those below, its ranks."""
_FAR = 10_000_000_000
"""ns off the other ranks' exits of a step from which on a rank's timestamps are damaged."""
_BRIEF = 2_000
"""ns: being asked, and not held back, takes no longer than this."""
_FLOW = 100_000
"""Shortest wait, ns, to which an arrow is drawn."""


def latest(run: Run, slices: int = MOST_SLICES) -> Run:
  """The run itself, or its last steps where all of them would be more than so many slices."""
  each = 6 + sum(name not in ("sync", "delay") for name in run.durations) + 3 * len(run.collectives)
  steps = max(slices // max(run.ranks * each, 1), 2)
  if int(run.inside.sum()) <= steps:
    return run
  return cut(run, len(run.steps) - steps)


def build(run: Run, bounds: Bounds, findings: tuple[Finding, ...] = ()) -> Timeline:
  """Builds the timeline of all ranks in the steps of the run's window.

  Returns:
    The timeline, from 0 on; empty where nothing was timestamped.
  """
  alignment = align(run)
  gathered = Slices()
  tracks, of_rank = _tracks(run, findings)
  edges = _edges(run, bounds, alignment)
  here = edges.known & run.inside
  whole = gathered.add(of_rank[:, None], edges.begin, edges.end, _step_names(run, gathered),
                       run.steps, 0, here)
  gathered.add(of_rank[:, None], edges.begin, edges.start, gathered.name("gap"), run.steps, 1,
               here)
  gathered.add(of_rank[:, None], edges.start, edges.work, gathered.name("delay"), run.steps, 1,
               here)
  work = _phases(run, edges, gathered, of_rank, here)
  waits = collective_waits(run)
  transfers = []
  for c, collective in enumerate(run.collectives):
    enter, leave = edges.enter[c], edges.exit[c]
    size = "" if collective.bytes is None else f" ({collective.bytes:,} bytes)"
    there = here & edges.timestamped[c]
    gathered.add(of_rank[:, None], edges.ready[c], enter, gathered.name("held back"), run.steps, 1,
                 there & (enter - edges.ready[c] > _BRIEF))
    gathered.add(of_rank[:, None], enter, leave, gathered.name(text(collective.name) + size),
                 run.steps, 1, there)
    last, transfer = waits[c].of_rank or (waits[c].last, waits[c].transfer)
    split = np.clip(leave - np.where(transfer >= 0, transfer, leave - enter), enter, leave)
    waiting = np.array([gathered.name(f"wait for rank {rank}") for rank in range(run.ranks)],
                       np.int64)
    gathered.add(of_rank[:, None], enter, split, waiting[last], run.steps, 2,
                 there & (transfer >= 0))
    transfers.append(gathered.add(of_rank[:, None], split, leave, gathered.name("transfer"),
                                  run.steps, 2, there))
  _pauses(run, edges, gathered, tracks)
  slices_of = _findings(run, edges, here, findings, gathered)
  counters, lines = _job(run, edges, waits, gathered)
  columns, place = gathered.finish()
  flows = [*_late_flows(run, edges, waits, work, transfers),
           *_finding_flows(run, slices_of, findings, whole)]
  origin = int(columns["begin"].min()) if columns["begin"].size else 0
  details = {int(place[i]): values for i, values in [*lines, *_details(slices_of, findings)]}
  return Timeline(
      tracks=tuple(tracks), names=tuple(gathered.names), track=columns["track"],
      name=columns["name"], begin=columns["begin"] - origin, end=columns["end"] - origin,
      step=columns["step"], details=details,
      flows=tuple((a, b) for a, b in ((int(place[a]), int(place[b])) for a, b in flows)
                  if (columns["begin"][a], a) < (columns["begin"][b], b)),
      counters={name: (at - origin, values) for name, (at, values) in counters.items()},
      spread=alignment.spread, apart=alignment.apart)


@dataclasses.dataclass(frozen=True)
class _Edges:
  """Instants on the common axis, int64 ns, rising on every rank. R ranks, K steps, C
  collectives."""

  begin: np.ndarray  # [R, K] the gap's begin
  start: np.ndarray  # [R, K]
  work: np.ndarray  # [R, K] the delay's end
  ready: np.ndarray  # [C, R, K] before it was held back, else the same as its entry
  enter: np.ndarray  # [C, R, K]
  exit: np.ndarray  # [C, R, K]
  end: np.ndarray  # [R, K]
  timestamped: np.ndarray  # [C, R, K] whether entry and exit are known
  started: np.ndarray  # [R, K] whether the start is known
  known: np.ndarray  # [R, K] whether anything of the step is


def _tracks(run: Run, findings: tuple[Finding, ...]) -> tuple[list[Track], np.ndarray]:
  """All tracks but those of pauses, and the track of each rank."""
  tracks = [Track("job", JOB, None), Track("steps", JOB, 1)]
  tracks += [Track(f"finding {i}: {finding.mode}", JOB, 1 + i)
             for i, finding in enumerate(findings, 1)]
  of_rank = np.zeros(run.ranks, np.int64)
  for process in np.unique(run.process_of_rank).tolist():
    ranks = np.flatnonzero(run.process_of_rank == process).tolist()
    host = text(run.host_of_rank(ranks[0])) or "unknown host"
    tracks.append(Track(f"{host}, process {process}" if process >= 0 else "unknown process",
                        _pid(process), None))
    for rank in ranks:
      of_rank[rank] = len(tracks)
      tracks.append(Track(f"rank {rank}", _pid(process), rank + 1))
  return tracks, of_rank


def _pid(process: int) -> int:
  return process + 1 if process >= 0 else UNKNOWN


def _step_names(run: Run, gathered: Slices) -> np.ndarray:
  return np.array([gathered.name(f"step {step}") for step in run.steps.tolist()], np.int64)


def _edges(run: Run, bounds: Bounds, alignment: Alignment) -> _Edges:
  current = (run.attempt == alignment.attempt) & (run.attempt >= 0)

  def common(times: np.ndarray, there: np.ndarray = current) -> np.ndarray:
    return alignment.apply(np.where(there, times, MISSING))

  raw_enter, raw_exit = [], []
  for c in run.collectives:
    both = (current & (c.attempt == alignment.attempt) & (c.enter_ns != MISSING)
            & (c.exit_ns != MISSING))
    raw_enter.append(common(c.enter_ns, both))
    raw_exit.append(common(c.exit_ns, both))
  start, end = map(common, bounds)
  timestamps = [start, *(t for pair in zip(raw_enter, raw_exit, strict=True) for t in pair), end]
  late = np.stack(timestamps).max(axis=0)
  known = (late != MISSING) & _sane(np.stack(timestamps))
  started = (start != MISSING) & known
  first = timestamps[-1]
  for times in reversed(timestamps[:-1]):
    first = np.where(times != MISSING, times, first)
  start = np.where(started, start, first)
  gap, delay = (np.where(started, _nanoseconds(run, name), 0) for name in ("gap", "delay_applied"))
  rows = np.stack([start - gap, start, start + delay, *timestamps[1:]], axis=2)  # [R, K, B]
  rows = np.where(known[..., None], rows, MISSING)
  rising = np.maximum.accumulate(rows.reshape(run.ranks, -1), axis=1).reshape(rows.shape)
  pairs = rising[..., 3:-1].transpose(2, 0, 1)
  timestamped = (np.stack([e != MISSING for e in raw_enter]) if raw_enter
             else np.zeros((0, *known.shape), bool))
  work, enter, leave = rising[..., 2], pairs[0::2], pairs[1::2]
  ready = enter.copy()
  for i, c in enumerate(run.collectives):
    if c.held is not None:
      held = np.where(timestamped[i] & (c.held.held_ns != MISSING), c.held.held_ns, 0)
      ready[i] = np.maximum(enter[i] - np.maximum(held, 0), leave[i - 1] if i else work)
  return _Edges(rising[..., 0], rising[..., 1], work, ready, enter, leave, rising[..., -1],
                timestamped, started, known)


def _sane(timestamps: np.ndarray) -> np.ndarray:
  """[R, K] whether all timestamps of a rank's step lie near the other ranks' latest ones, or its
  own."""
  late = np.where(timestamps.max(axis=0) == MISSING, np.nan,
                  timestamps.max(axis=0).astype(np.float64))
  earliest = np.where(timestamps == MISSING, np.inf, timestamps.astype(np.float64)).min(axis=0)
  some = np.isfinite(late).any(axis=0)
  middle = np.full(late.shape[1], np.nan)
  middle[some] = np.nanmedian(late[:, some], axis=0)
  with np.errstate(invalid="ignore"):
    return (np.abs(late - middle) <= _FAR) & (late - earliest <= 1e16)


def _nanoseconds(run: Run, name: str) -> np.ndarray:
  values = run.durations.get(name)
  if values is None:
    return np.zeros(run.attempt.shape, np.int64)
  seconds = np.nan_to_num(values.astype(np.float64), nan=0.0, posinf=0.0, neginf=0.0)
  return np.rint(np.clip(seconds, 0.0, 1e7) * 1e9).astype(np.int64)


def _phases(run: Run, edges: _Edges, gathered: Slices, of_rank: np.ndarray,
            keep: np.ndarray) -> list[np.ndarray]:
  """Adds the phases; returns for each collective [R, K] the slice of work that came before it, -1
  for none."""
  names = order(run)
  begins = np.concatenate([edges.work[None], edges.exit])
  ends = np.concatenate([edges.ready, edges.end[None]])
  free_known = np.concatenate([edges.timestamped, np.ones_like(edges.started)[None]])
  free = np.where(free_known, ends - begins, 0)
  before = [np.full(run.attempt.shape, -1, np.int64) for _ in run.collectives]
  for interval, phase, begin, end in pour(free, [_nanoseconds(run, name) for name in names]):
    shown = gathered.name(text(names[phase].removeprefix("phase_")))
    index = gathered.add(of_rank[:, None], begins[interval] + begin, begins[interval] + end, shown,
                         run.steps, 1, keep & edges.started & free_known[interval])
    if interval < len(before):
      before[interval] = np.where(index >= 0, index, before[interval])
  return before


def _pauses(run: Run, edges: _Edges, gathered: Slices, tracks: list[Track]) -> None:
  """Adds what the hosts' columns name. Where in its step a pause lay is not recorded: it is shown
  from its begin."""
  causes = run.host_causes
  for i, cause in enumerate(name for name in PAUSES if name in causes.columns):
    for process in causes.processes.tolist():
      row, ranks = causes.row(process), np.flatnonzero(run.process_of_rank == process)
      seconds = np.nan_to_num(causes.columns[cause][row], nan=0.0, posinf=0.0, neginf=0.0)
      if not ranks.size or not (seconds > 0).any():
        continue
      first = edges.begin[ranks[0]]
      keep = edges.known[ranks[0]] & run.inside & (seconds > 0)
      length = np.where(keep, np.rint(np.clip(seconds, 0, 1e7) * 1e9), 0).astype(np.int64)
      # One after the other: begin_k = max(first_k, end of the one before).
      run_up = np.cumsum(length) - length
      begin = np.maximum.accumulate(np.where(keep, first - run_up, MISSING)) + run_up
      gathered.add(np.array(len(tracks)), begin, begin + length, gathered.name(cause), run.steps,
                   0, keep)
      tracks.append(Track(f"{cause} (begin within the step not known)", _pid(process),
                          _PAUSE_THREAD + i))


def _findings(run: Run, edges: _Edges, here: np.ndarray, findings: tuple[Finding, ...],
              gathered: Slices) -> list[int]:
  """Adds the slice of each finding, on the tracks from 2 on; returns it, -1 where no step of it is
  shown."""
  slices_of = []
  for i, finding in enumerate(findings):
    steps = here.any(axis=0)
    if finding.first_step is not None:
      steps &= run.steps >= finding.first_step
    if finding.last_step is not None:
      steps &= run.steps <= finding.last_step
    own = here & steps
    begin = np.where(own, edges.begin, np.iinfo(np.int64).max)
    begin = np.where(begin == MISSING, np.iinfo(np.int64).max, begin).min()
    end = np.where(own, edges.end, MISSING).max()
    at = gathered.add(np.array(2 + i), np.array([begin]), np.array([end]),
                      gathered.name(finding.mode), np.array([-1]), 0, np.array([bool(own.any())]))
    slices_of.append(int(at[0]))
  return slices_of


def _details(slices_of: list[int],
             findings: tuple[Finding, ...]) -> list[tuple[int, dict[str, str | int | float]]]:
  return [(at, {"share": f.share, "confidence": f.confidence, "ranks": ", ".join(map(str, f.ranks)),
                "hosts": text(", ".join(f.hosts)), "advice": plain(f.advice),
                **{f"evidence {n + 1}": plain(line) for n, line in enumerate(f.evidence)}})
          for at, f in zip(slices_of, findings, strict=True) if at >= 0]


def _job(run: Run, edges: _Edges, waits: list[TimelineWaits], gathered: Slices
         ) -> tuple[dict[str, tuple[np.ndarray, np.ndarray]],
                    list[tuple[int, dict[str, str | int | float]]]]:
  """Adds the job's steps, from the last exit of one to that of the next; and makes its counters."""
  ends = edges.exit[-1] if len(edges.exit) else edges.end
  last = np.where(edges.known, ends, MISSING).max(axis=0)
  begin = np.maximum.accumulate(np.append(MISSING, last[:-1]))
  begin = np.where(begin == MISSING,
                   np.where(edges.known, edges.begin, np.iinfo(np.int64).max).min(axis=0), begin)
  there = (last != MISSING) & run.inside
  job = gathered.add(np.array(1), begin, last, _step_names(run, gathered), run.steps, 0, there)
  transfer = sum((np.maximum(w.transfer, 0) for w in waits),
                 start=np.zeros(len(run.steps), np.int64))
  longest = sum((w.longest - np.maximum(w.transfer, 0) for w in waits),
                start=np.zeros(len(run.steps), np.int64))
  at = np.flatnonzero(there)
  counters = {}
  if waits:
    counters = {"longest wait (ms)": (last[at], longest[at] * 1e-6),
                "transfer (ms)": (last[at], transfer[at] * 1e-6)}
  lines: list[tuple[int, dict[str, str | int | float]]] = [
      (int(job[k]), {"last rank": int(waits[0].last[k]),
                     "longest wait (ms)": float(longest[k] * 1e-6),
                     "transfer (ms)": float(transfer[k] * 1e-6)})
      for k in at.tolist() if waits and job[k] >= 0]
  return counters, lines


def _late_flows(run: Run, edges: _Edges, waits: list[TimelineWaits], work: list[np.ndarray],
                transfers: list[np.ndarray]
                ) -> list[tuple[int, int]]:
  """Arrows from the last rank's work to the rank of every other process that waited longest for
  it."""
  flows = []
  groups = [np.flatnonzero(run.process_of_rank == p) for p in np.unique(run.process_of_rank)]
  steps = np.arange(len(run.steps))
  for c, wait in enumerate(waits):
    source = work[c][wait.last, steps]
    waited = (np.where(edges.timestamped[c], edges.exit[c] - edges.enter[c], -1)
              - np.maximum(wait.transfer, 0))
    if wait.of_rank is not None:
      waited = np.where(wait.of_rank[0] == wait.last, waited, -1)
    for ranks in groups:
      most = ranks[waited[ranks].argmax(axis=0)]
      target = transfers[c][most, steps]
      other = run.process_of_rank[most] != run.process_of_rank[wait.last]
      drawn = (source >= 0) & (target >= 0) & other & (waited[most, steps] >= _FLOW) & run.inside
      flows += list(zip(source[drawn].tolist(), target[drawn].tolist(), strict=True))
  return flows


def _finding_flows(run: Run, slices_of: list[int], findings: tuple[Finding, ...], whole: np.ndarray
                   ) -> list[tuple[int, int]]:
  """Arrows from a finding to the first step of it on each of its ranks."""
  flows = []
  for at, finding in zip(slices_of, findings, strict=True):
    first = run.steps >= (finding.first_step if finding.first_step is not None else run.steps[0])
    for rank in finding.ranks[:16] if at >= 0 else ():
      there = (np.flatnonzero((whole[rank] >= 0) & first) if rank < run.ranks
               else np.zeros(0, np.int64))
      if there.size:
        flows.append((at, int(whole[rank, there[0]])))
  return flows
