"""Reads where all ranks of a job are from the rings and plans in its run directory."""

from __future__ import annotations

import dataclasses
import os
import pathlib
import time
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from jaxpace.core.observed import ObservedPlan
from jaxpace.core.words import list_ranks, plural
from jaxpace.files.reading import UnreadableError, why_unreadable
from jaxpace.hang.describe import Flight
from jaxpace.hang.positions import Position, ProgramsByKey, position
from jaxpace.hang.waits import SHORT
from jaxpace.record.ring.executions import DeviceBuffer
from jaxpace.runs import ring_file, rundir
from jaxpace.runs.ring_file import RingFile, read_pulse, read_ring
from jaxpace.runs.run import Process
from jaxpace.runs.rundir import read_processes

_MOST_NAMED, _MOST_PROCESSES = 3, 1 << 20
_MOST_HOLES = 64
"""Slots that a killed process left half written: one a thread."""
WATCHED_SECONDS = 3.0
"""For so long rings of ranks that wait are watched: a process says several times per second in its
ring that it lives."""
_GLANCE = 0.1
"""Seconds between two looks."""


def read_flight(directory: str | os.PathLike[str], *, own: Flight | None = None) -> Flight | None:
  """Reads the rings of a run that goes on, has ended or was killed; not those of processes of whose
  ranks more is known than by their files, `own`.

  Returns where its ranks are; None where no process has a ring here, as in a run that was never
  observed, or all have closed their recordings without an error. Where ranks have waited for
  seconds, it takes up to `WATCHED_SECONDS` to see who still writes.
  """
  directory = pathlib.Path(directory)
  rings = _rings(directory)
  if not rings and not own:
    return None
  info = rundir.read_json(directory / rundir.RUN_FILE) or {}
  run, attempt = info.get("run"), info.get("attempt", 0)
  processes = {one.process: one for one in read_processes(directory, run, [])}
  info = info or rundir.told_by(processes.values())
  if rings and not own and _all_clean(rings, processes, info):
    return None
  reading = _Reading(directory, run, attempt, processes, own or Flight({}, ProgramsByKey()))
  for process, path in rings.items():
    reading.add(process, path)
  # A watchdog knows by their heartbeats how the others are.
  return reading.flight(info, 0.0 if own else reading.watch(WATCHED_SECONDS))


def of_ring(ranks: np.ndarray, heads: np.ndarray, events: np.ndarray, process: int,
            plan: ObservedPlan, programs: ProgramsByKey, alive_ns: int | None = None
            ) -> list[Position]:
  """Where the ranks of a process are, by its ring, in place or as it was read.

  Args:
    ranks: [buffers] int32, less than 0 for none.
    heads: [buffers] uint64, which may grow.
    events: [buffers, capacity] `ring_layout.EVENT`.
    programs: gets them.
    alive_ns: when the process last said that it lives, 0 where it hasn't; None: it is this one.
  """
  keys = programs.add(plan)
  found = []
  for buffer, rank in enumerate(ranks.tolist()):
    if rank >= 0:
      tag, ns = _events(events[buffer], lambda buffer=buffer: int(heads[buffer]))
      # Read after the timestamps: none of them is later. A process that has just begun may have
      # timestamps and no word yet.
      now = (time.monotonic_ns() if alive_ns is None
             else max(alive_ns, int(ns[-1])) if len(ns) and alive_ns else None)
      found.append(position(rank, process, tag, ns, keys, programs, now))
  return found


class _Reading:
  """What the files have shown so far."""

  def __init__(self, directory: pathlib.Path, run: str | None, attempt: int,
               processes: Mapping[int, Process], own: Flight):
    self._directory, self._run, self._attempt = directory, run, attempt
    self._processes = processes
    self._programs, self._positions = own.programs, dict(own.positions)
    self._read = {one.process for one in self._positions.values()}
    self._open: dict[int, tuple[pathlib.Path, RingFile]] = {}
    self._faults: dict[str, list[int]] = {}

  def add(self, process: int, path: pathlib.Path) -> None:
    """Reads a process's ring and plan, unless it is known where its ranks are."""
    try:
      if process not in self._read:
        self._take(process, path, *self._ring_and_plan(process, path))
    except UnreadableError as error:
      self._faults.setdefault(str(error), []).append(process)

  def _ring_and_plan(self, process: int, path: pathlib.Path) -> tuple[RingFile, ObservedPlan]:
    """Raises an `UnreadableError` where these can't be used."""
    try:
      ring = read_ring(path)
    except (OSError, UnreadableError) as error:
      raise UnreadableError(f"can't be used: it {why_unreadable(error)}") from error
    if self._run is not None and ring.run != self._run:
      raise UnreadableError("is of another run")
    if ring.attempt != self._attempt:
      raise UnreadableError(
          f"is of attempt {ring.attempt}, not of attempt {self._attempt}, the newest")
    try:
      run, attempt, plan = ring_file.read_plan(self._directory, process)
    except (OSError, UnreadableError) as error:
      if ring.events["seq"].any():
        raise UnreadableError("has no plan beside it that says what its timestamps mean: it "
                              f"{why_unreadable(error)}") from error
      return ring, ObservedPlan()  # it has compiled nothing yet
    if (run, attempt) != (ring.run, ring.attempt):
      raise UnreadableError("has a plan of another start of the job beside it")
    return ring, plan

  def _take(self, process: int, path: pathlib.Path, ring: RingFile, plan: ObservedPlan) -> None:
    said = self._processes.get(process, Process(process, {}))
    for one in of_ring(ring.ranks, ring.heads, ring.events, process, plan, self._programs,
                       ring.alive_ns):
      self._positions.setdefault(one.rank, dataclasses.replace(
          one, host=said.host, ended_by=said.info.get("ended_by") or "",
          state="closed" if ring.closed else "silent"))
    self._read.add(process)
    if not ring.closed:
      self._open[process] = path, ring

  @property
  def _in_question(self) -> bool:
    """Whether ranks have waited for so long that it is worth an alarm."""
    return any(execution.pending and (one.state == "closed" or (one.waiting or 0.0) >= SHORT)
               for one in self._positions.values() for execution in one.executions)

  def watch(self, seconds: float) -> float:
    """Waits until the processes whose recordings are open have written, for so long at most;
    returns the seconds for which the rings were watched, 0 where no long wait makes that necessary.

    Processes that have are "running", and ranks with new timestamps "moving". No two clocks are
    compared, and no process is asked by its number, which may be that of another container.
    """
    if not self._in_question:
      return 0.0
    begun, written = time.monotonic(), set[int]()
    while True:
      for process in self._open.keys() - written:
        path, ring = self._open[process]
        pulse = read_pulse(path)
        if pulse is not None and pulse[0] != ring.alive_ns:
          written.add(process)
      passed = time.monotonic() - begun
      if len(written) == len(self._open) or passed >= seconds:
        break
      time.sleep(_GLANCE)
    for process in written:
      path, ring = self._open[process]
      _, heads = read_pulse(path) or (0, ())
      for buffer, rank in enumerate(ring.ranks.tolist()):
        one = self._positions.get(rank)
        if one is not None and one.process == process:
          moving = buffer >= len(heads) or int(heads[buffer]) != int(ring.heads[buffer])
          self._positions[rank] = dataclasses.replace(one, state="running", moving=moving)
    return passed

  def flight(self, info: Mapping[str, Any], watched: float) -> Flight:
    """Puts it together."""
    running = not watched or any(one.state == "running" for one in self._positions.values())
    declared = info.get("processes")
    missing = sorted(set(range(min(declared or 0, _MOST_PROCESSES))) - self._read)
    return Flight(self._positions, self._programs, tuple(self._sentences(missing)), running,
                  watched, run=str(info.get("run") or ""))

  def _sentences(self, missing: list[int]) -> Iterable[str]:
    for why, processes in list(self._faults.items())[:_MOST_NAMED]:
      which = (f"{processes[0]}.ring" if len(processes) == 1
               else f"of processes {list_ranks(processes)} each")
      yield f"The ring {ring_file.FOLDER}/{which} {why}." if len(
          processes) == 1 else f"The rings {which} {why}."
    faulty = {process for processes in self._faults.values() for process in processes}
    silent = [process for process in missing if process not in faulty]
    if silent and self._read:
      yield (f"{plural(len(silent), 'process', 'processes')} ({list_ranks(silent)}) left no ring "
             f"here: {rundir.TOGETHER}.")


def _rings(directory: pathlib.Path) -> dict[int, pathlib.Path]:
  """The rings in a run directory by process, rising."""
  try:
    names = os.listdir(directory / ring_file.FOLDER)
  except OSError:
    return {}
  owners = {owner for name in names if (owner := ring_file.process_of(name)) is not None}
  return {owner: directory / ring_file.FOLDER / ring_file.name(owner)
          for owner in sorted(owners) if ring_file.name(owner) in names}


def _all_clean(rings: Iterable[int], processes: Mapping[int, Process],
               info: Mapping[str, Any]) -> bool:
  declared = info.get("processes") or 0
  expected = {*rings, *range(declared if declared <= _MOST_PROCESSES else 0)}
  return all(process in processes and processes[process].info.get("closed_cleanly") is True
             and not processes[process].info.get("ended_by") for process in expected)


def _events(slots: np.ndarray, head: Any) -> tuple[np.ndarray, np.ndarray]:
  """(tag, ns) of all events that a device buffer still holds."""
  buffer = DeviceBuffer()
  tags, times = [np.empty(0, np.uint32)], [np.empty(0, np.int64)]
  reached = head()
  for _ in range(_MOST_HOLES):
    if buffer.position >= reached:
      break
    tag, ns, lost = buffer.take(slots, head, final=True)
    tags.append(tag)
    times.append(ns)
    if not len(tag) and not lost:
      break
  return np.concatenate(tags), np.concatenate(times)
