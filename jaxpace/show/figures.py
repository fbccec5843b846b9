"""Adds up a batch of rows for exporters, and bounds label values in number: every one of them is a
time series that some server keeps. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from jaxpace.record.columns import Columns
from jaxpace.runs.run import TIMES

MOST_RANKS, MOST_PHASES, MOST_COLLECTIVES, MOST_DECISIONS = 64, 16, 32, 32
"""Label values that a process exports of each kind; what comes beyond them is added up under
"other"."""
OTHER = "other"
SERIES = {
    "steps": ("counter", "steps", "", "Steps recorded.", ("rank",)),
    "step_seconds": ("histogram", "step.duration", "s", "Time of a step, end to end.", ("rank",)),
    "phase_seconds": ("counter", "phase.time", "s", "Time in a phase; delay is pacing's.",
                      ("rank", "phase")),
    "wait_seconds": ("counter", "wait.time", "s", "Time in a collective, from entry to exit.",
                     ("rank", "collective")),
    "host_seconds": ("counter", "host.time", "s", "Time the process spent on something, by cause.",
                     ("process", "cause")),
    "involuntary_switches": ("counter", "involuntary_switches", "",
                             "Involuntary context switches.", ("process",)),
    "last_step": ("gauge", "last_step", "", "Number of the newest step recorded.", ("process",)),
    "attempt": ("gauge", "attempt", "", "Restarts of the run.", ("process",)),
    "decision": ("gauge", "decision", "", "What the pacer decided for the newest step.",
                 ("process", "name"))}
"""Kind, name in OpenTelemetry, unit, meaning and labels of what `Bounded.points` yields."""
_NOT_PHASES = ("start", "end", "sync", "delay", *TIMES)


class Bounded:
  """Lets the first values of each label through.

  >>> bounded = Bounded()
  >>> [bounded("phase", value, 2) for value in ("forward", "backward", "mine", "forward")]
  ['forward', 'backward', 'other', 'forward']
  """

  def __init__(self) -> None:
    self._seen: dict[str, set[str]] = {}

  def __call__(self, label: str, value: str, most: int) -> str:
    """The value, or "other" where that many others were seen before it."""
    seen = self._seen.setdefault(label, set())
    if value not in seen and len(seen) >= most:
      return OTHER
    seen.add(value)
    return value

  def points(self, found: BatchFigures) -> Iterator[tuple[str, dict[str, str | int], float]]:
    """Yields what a batch adds to time series: name, labels and number.

    `step_seconds` are single values for a histogram; `last_step`, `attempt` and `decision` take the
    place of the number before; all others are added to it.
    """
    process: dict[str, str | int] = {"process": found.process}
    for rank, number in found.steps.items():
      yield "steps", self._rank(rank), number
    for rank, seconds in found.step_seconds.items():
      for value in np.maximum(seconds, 0).tolist():
        yield "step_seconds", self._rank(rank), value
    for (rank, phase), total in found.phases.items():
      yield "phase_seconds", {**self._rank(rank),
                              "phase": self("phase", phase, MOST_PHASES)}, max(total, 0.0)
    for (rank, name), total in found.waits.items():
      yield "wait_seconds", {**self._rank(rank),
                             "collective": self("collective", name, MOST_COLLECTIVES)}, total
    for cause, total in found.host.items():
      yield "host_seconds", {**process, "cause": cause}, max(total, 0.0)
    if found.switches is not None:
      yield "involuntary_switches", process, max(found.switches, 0)
    yield "last_step", process, found.last_step
    yield "attempt", process, found.attempt
    for name, value in found.decisions.items():
      shown = self("decision", name, MOST_DECISIONS)
      if shown != OTHER:
        yield "decision", {**process, "name": shown}, value

  def _rank(self, rank: int) -> dict[str, str | int]:
    return {"rank": self("rank", str(rank), MOST_RANKS)}


class BatchFigures(NamedTuple):
  """A batch of one process's rows, added up. Seconds."""

  process: int
  attempt: int
  last_step: int
  steps: dict[int, int]  # rows by rank
  step_seconds: dict[int, np.ndarray]  # by rank: end to end of each step whose gap is known
  phases: dict[tuple[int, str], float]  # by rank and phase; the applied delay is "delay"
  waits: dict[tuple[int, str], float]  # by rank and collective: exit - enter
  host: dict[str, float]  # of the process, by name of `TIMES`
  switches: int | None  # involuntary context switches of the process
  # of the lowest rank's newest step, by the pacer's name; those that are numbers
  decisions: dict[str, float]


def figures(steps: Columns, collectives: Columns) -> BatchFigures | None:
  """Adds rows up; None where there is none."""
  if not len(steps.get("step", ())):
    return None
  rank = np.asarray(steps["rank"])
  own = {r: rank == r for r in np.unique(rank).tolist()}
  names = {name: name.removesuffix("_ns") for name in steps if name.endswith("_ns")}
  phases = {column: "delay" if name == "delay_applied" else name.removeprefix("phase_")
            for column, name in names.items() if name not in _NOT_PHASES}
  known = {column: _known(steps[column]) for column in phases}
  durations = _step_seconds(steps)
  lowest = own[min(own)]
  newest = int(np.flatnonzero(lowest)[np.asarray(steps["step"])[lowest].argmax()])
  switches = _known(steps["nivcsw"])[lowest] if "nivcsw" in steps else np.zeros(0)
  return BatchFigures(
      process=int(steps["process"][0]), attempt=int(np.max(steps["attempt"])),
      last_step=int(np.max(steps["step"])), steps={r: int(rows.sum()) for r, rows in own.items()},
      step_seconds={r: durations[rows & np.isfinite(durations)] for r, rows in own.items()},
      phases={(r, name): float(np.nansum(known[column][rows])) * 1e-9 for r, rows in own.items()
              for column, name in phases.items() if np.isfinite(known[column][rows]).any()},
      waits=_waits(collectives),
      host={name: float(np.nansum(values[lowest])) * 1e-9 for name in TIMES if f"{name}_ns" in steps
            for values in [_known(steps[f"{name}_ns"])] if np.isfinite(values[lowest]).any()},
      switches=int(np.nansum(switches)) if np.isfinite(switches).any() else None,
      decisions={name.removeprefix("decision_"): float(values[newest]) for name in steps
                 if name.startswith("decision_") for values in [_known(steps[name])]
                 if np.isfinite(values[newest])})


def _step_seconds(steps: Columns) -> np.ndarray:
  if not {"start_ns", "end_ns", "gap_ns"} <= set(steps):
    return np.full(len(steps["step"]), np.nan)
  # Whole nanoseconds first: a float64 of a clock's reading is off by more than a short step may be.
  start, end, gap = (np.ma.asarray(steps[name]) for name in ("start_ns", "end_ns", "gap_ns"))
  return _known(end - start + gap) * 1e-9


def _waits(collectives: Columns) -> dict[tuple[int, str], float]:
  if not {"rank", "name", "enter_ns", "exit_ns"} <= set(collectives):
    return {}
  wait = _known(np.ma.asarray(collectives["exit_ns"]) - np.ma.asarray(collectives["enter_ns"]))
  known = np.isfinite(wait)
  rank, name = np.asarray(collectives["rank"])[known], np.asarray(collectives["name"])[known]
  names, index = np.unique(name, return_inverse=True)
  ranks, place = np.unique(rank, return_inverse=True)
  total = np.bincount(place * len(names) + index, np.maximum(wait[known], 0),
                      len(ranks) * len(names))
  return {(int(r), str(n)): float(total[i * len(names) + j]) * 1e-9
          for i, r in enumerate(ranks) for j, n in enumerate(names)}


def _known(values: np.ndarray) -> np.ndarray:
  """float64; NaN where null."""
  return np.ma.filled(np.ma.asarray(values).astype(np.float64), np.nan)
