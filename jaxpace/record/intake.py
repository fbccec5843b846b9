"""Steps on the host that wait to be written: what is new of each rank, and what the host did
meanwhile."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from jaxpace.record import decode
from jaxpace.record.decode import Columns, TimestampedSteps
from jaxpace.runs import step_causes as host
from jaxpace.runs.problems import plural
from jaxpace.runs.step_causes import HOST_CAUSES

_LOG = logging.getLogger("jaxpace")
_STANDING = 2
"""Steps in a row with the number of the one before that are no slip."""


@dataclasses.dataclass
class Losses:
  """What a process did not manage to record."""

  lost_rows: int = 0  # steps of a rank that were lost before they were read
  holes: int = 0  # interruptions in the sequence of steps

  def __str__(self) -> str:
    return f"{plural(self.lost_rows, 'row')} in {plural(self.holes, 'hole')}"


class Batch(NamedTuple):
  """Steps of this process's ranks that are over."""

  plan: Any
  """What their timestamps mean."""
  ranks: Sequence[int]
  numbers: Sequence[np.ndarray]
  """[n] int64 of each rank: which execution each step was, rising; the same on all ranks."""
  steps: Sequence[TimestampedSteps]
  """Of each rank, in that order."""
  host: Mapping[int, tuple[host.Sample, dict[str, float]]]
  """By execution, what the host did and the user's own columns; none where that isn't known."""


@dataclasses.dataclass
class Attempt:
  """Steps that follow each other, before the loop goes back to an earlier one."""

  number: int
  parts: list[tuple[Batch, list[np.ndarray]]] = dataclasses.field(default_factory=list)
  """Batches, and of each rank which of its steps belong here."""
  host: dict[int, tuple[host.Sample, dict[str, float]]] = dataclasses.field(default_factory=dict)
  """By step."""

  def of_rank(self, place: int) -> TimestampedSteps:
    """One rank's steps."""
    return decode.joined([batch.steps[place].picked(kept[place]) for batch, kept in self.parts])


class Intake:
  """Steps of this process's ranks that are not written yet. Belongs to the writer's thread."""

  wait_seconds: float | None = None
  """How long the writer may sleep before it polls; None as long as it likes."""

  def __init__(self, process: int, attempt: int, losses: Losses):
    """Begins with none.

    Args:
      process: index of this process.
      attempt: attempt of the run.
      losses: what could not be recorded is counted there.
    """
    self._process, self._losses = process, losses
    self._waiting = [Attempt(attempt)]
    self._previous: dict[int, decode.Previous | None] = {}
    self._standing, self._warned = 0, False
    self._listening: list[Columns] = []
    self.ranks: list[int] = []
    """Ranks of which steps came."""
    self.rows = 0
    self.last_step: int | None = None

  def poll(self) -> Batch | None:
    """Takes what is new from where it lies; None where nothing is."""
    raise NotImplementedError

  def plan_of(self, batch: Batch) -> Any:
    """What the timestamps of a batch mean."""
    self.ranks = list(batch.ranks)
    return batch.plan

  def add(self, batch: Batch) -> None:
    """Takes a batch in. A step with an earlier number than the one before begins another attempt:
    the loop went back, by a restored checkpoint or a new pace state."""
    attempts = self._attempts(batch)
    for attempt in self._waiting:
      chosen = [np.array([attempts.get(number) is attempt for number in numbers.tolist()], bool)
                for numbers in batch.numbers]
      if any(each.any() for each in chosen):
        attempt.parts.append((batch, chosen))
        self.rows += int(sum(each.sum() for each in chosen))

  def _attempts(self, batch: Batch) -> dict[int, Attempt]:
    """The attempt of each execution; a step that ran again has none."""
    steps = {number: step for numbers, own in zip(batch.numbers, batch.steps, strict=True)
             for number, step in zip(numbers.tolist(), own.step.tolist(), strict=True)}
    found = {}
    for number in sorted(steps):
      step = steps[number]
      if self.last_step is not None and step < self.last_step:
        self._waiting.append(Attempt(self._waiting[-1].number + 1))
      elif step == self.last_step:
        self._stands()
        continue
      self.last_step = step
      found[number] = self._waiting[-1]
      if number in batch.host:
        self._waiting[-1].host[step] = batch.host[number]
    return found

  def _stands(self) -> None:
    self._standing += 1
    if self._standing >= _STANDING and not self._warned:
      self._warned = True
      _LOG.warning("The pace state given to the step does not advance, so steps are missing from "
                   "the recording. Give each step the state that the one before returned: `pace, "
                   "out = step(pace, state, batch)`.")

  def decode(self, plan: Any) -> tuple[Columns, Columns]:
    """Makes rows of the tables of all steps taken in, and forgets them."""
    steps, collectives = [], []
    for attempt in self._waiting:
      if attempt is not self._waiting[0]:
        self._previous = {}
      if attempt.parts:
        rows, waits = self._decoded(attempt, plan)
        steps.append(decode.join_host(decode.concatenate(rows), host_columns(attempt.host)))
        collectives += waits
    self._waiting, self.rows = [Attempt(self._waiting[-1].number)], 0
    return decode.concatenate(steps), decode.concatenate(collectives)

  def _decoded(self, attempt: Attempt, plan: Any
               ) -> tuple[list[Columns], list[Columns]]:
    """Rows of `steps` and `collectives` of each rank."""
    rows, waits = [], []
    for place, rank in enumerate(self.ranks):
      own = attempt.of_rank(place)
      if not len(own.step):
        continue
      columns, of_collectives = self._of_rank(place, rank, own, attempt, plan)
      if place == 0 and self._process == 0:  # what was heard is the same on all ranks
        self._listening.append(decode.listening(own, plan, rank, self._process, attempt.number))
      last_end = columns["end_ns"][-1]
      self._previous[rank] = decode.Previous(
          int(columns["step"][-1]), 0 if last_end is np.ma.masked else int(last_end))
      rows.append(columns)
      waits.append(of_collectives)
    return rows, waits

  def _of_rank(self, place: int, rank: int, own: TimestampedSteps, attempt: Attempt, plan: Any
               ) -> tuple[Columns, Columns]:
    """One rank's rows of both tables; `place` is its place among `ranks`."""
    return decode.decode(own, plan, rank, self._process, attempt.number, self._previous.get(rank))

  def take_listening(self) -> Columns:
    """Takes what was heard in the steps decoded so far; nothing where nobody listened."""
    heard = [columns for columns in self._listening if columns and len(columns["step"])]
    self._listening = []
    return decode.concatenate(heard) if heard else {}



def host_columns(samples: Mapping[int, tuple[host.Sample, dict[str, float]]]) -> Columns:
  """Lays samples of the host out as columns.

  Args:
    samples: by step, what the host did and the user's own columns.
  """
  if not samples:
    return {"step": np.zeros(0, np.int64)}
  columns: Columns = {"step": np.array(list(samples), np.int64)}
  for i, cause in enumerate(HOST_CAUSES):
    values = [sample[i] for sample, _ in samples.values()]
    unknown = np.array([value is None for value in values], bool)
    columns[cause.column] = np.ma.masked_array(np.array([value or 0 for value in values], np.int64),
                                               unknown)
  extra = [own for _, own in samples.values()]
  for name in sorted({name for row in extra for name in row}):
    unknown = np.array([name not in row for row in extra], bool)
    columns[f"host_{name}"] = np.ma.masked_array(
        np.array([row.get(name, 0.0) for row in extra], np.float64), unknown)
  return columns
