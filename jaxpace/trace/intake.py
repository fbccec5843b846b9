"""Rows on the host that wait to be written: what is new in each copied ring, and what the host did
meanwhile."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from jaxpace.core.plan import OF_DEVICES, Plan
from jaxpace.trace import decode
from jaxpace.trace import step_causes as host
from jaxpace.trace.host_causes import HOST_CAUSES
from jaxpace.trace.problems import plural


@dataclasses.dataclass
class Batch:
  """One copy of this process's rings, and what its host did since the copy before."""

  ring: np.ndarray  # [local ranks, rows, width] uint32
  plan: Plan
  # one for each `record` call since the last batch, the newest step's last
  samples: list[host.Sample]
  extra: list[dict[str, float]]  # the user's own columns, one dict a sample
  # when the copy was read, of the host's monotonic clock; needed where the stamps are of another
  read_ns: int = 0
  # whether steps between this batch and the one before were left out on purpose
  sampled: bool = False

  @property
  def nbytes(self) -> int:
    """Memory that it takes while it waits."""
    return self.ring.nbytes

  def inherit(self, dropped: Batch, most: int) -> None:
    """Takes over the host's samples of a batch before it that is dropped, `most` in all."""
    # They stay aligned to the newest step.
    self.samples[:0], self.extra[:0] = dropped.samples, dropped.extra
    del self.samples[:-most], self.extra[:-most]


@dataclasses.dataclass
class Losses:
  """What a process did not manage to record."""

  lost_rows: int = 0  # ring rows overwritten before they were copied, or dropped
  holes: int = 0  # interruptions in the sequence of steps
  dropped_batches: int = 0  # copies dropped because the disk was too slow

  def __str__(self) -> str:
    copies = plural(self.dropped_batches, "copy", "copies")
    dropped = f", {copies} dropped because the disk was too slow" if self.dropped_batches else ""
    return f"{plural(self.lost_rows, 'row')} in {plural(self.holes, 'hole')}{dropped}"


class Intake:
  """Rows on the host that are not written yet, for each of this process's ranks, and what came
  before them."""

  def __init__(self, ranks: list[int], process: int, attempt: int, losses: Losses):
    self._ranks, self._process, self._attempt, self._losses = ranks, process, attempt, losses
    self._seen: list[int] | None = None  # last step seen of each rank
    self._went_back = False  # whether the next batch is the first after the loop went back
    self._previous: list[decode.Previous | None] = [None] * len(ranks)
    self._shift: list[int | None] = [None] * len(ranks)  # ns from each device's clock to the host's
    self._rows: list[list[np.ndarray]] = [[] for _ in ranks]
    self._host: list[tuple[int, list[host.Sample], list[dict[str, float]]]] = []
    self._listening: list[decode.Columns] = []
    self.rows = 0

  wait_seconds: float | None = None
  """How long the writer may sleep before it polls; None as long as it likes."""

  def poll(self) -> Batch | None:
    """What is to be taken in that was not submitted: nothing."""
    return None

  def plan_of(self, batch: Batch) -> Any:
    """What the stamps of a batch mean."""
    return batch.plan

  @property
  def last_step(self) -> int | None:
    """Newest step taken in."""
    return max(self._seen, default=None) if self._seen else None

  def goes_back(self, batch: Batch) -> bool:
    """Tells whether the loop went back to an earlier step, by a restored checkpoint or a new pace
    state."""
    return self._seen is not None and any(
        -1 < decode.newest_step(copy) < seen
        for copy, seen in zip(batch.ring, self._seen, strict=True))

  def next_attempt(self) -> None:
    """Counts the steps that follow as another attempt. Nothing may be waiting to be decoded."""
    self._attempt += 1
    self._seen, self._went_back = None, True
    self._previous = [None] * len(self._ranks)

  def add(self, batch: Batch) -> None:
    """Takes in what is new in a batch."""
    newest = [decode.newest_step(copy) for copy in batch.ring]
    calls = len(batch.samples)
    first = self._seen is None
    if self._seen is None:
      # Older rows are not this recorder's: warm-up steps, or a restored pace state with another
      # process's stamps.
      self._seen = [max(step - calls, -1) for step in newest]
    if max(newest) - max(self._seen) == calls or first or batch.sampled:
      self._host.append((max(newest), batch.samples, batch.extra))
    hole, went_back, self._went_back = False, self._went_back, False
    for i, copy in enumerate(batch.ring):
      if self._shift[i] is None and newest[i] >= 0:
        # Once and for all: what is between two stamps must not depend on when they were copied.
        self._shift[i] = (batch.read_ns - decode.end_ns(copy, batch.plan)
                          if batch.plan.clock in OF_DEVICES else 0)
      rows, missing = decode.new_rows(copy, self._seen[i])
      # steps of the state before that no copy holds: it was gone when the next was due
      if went_back:
        missing = max(missing, calls - len(rows))
      if not batch.sampled:
        self._losses.lost_rows += missing
        hole |= missing > 0
      if len(rows):
        self._rows[i].append(rows)
        self.rows += len(rows)
        self._seen[i] = newest[i]
    self._losses.holes += hole

  def _decoded(self, i: int, rank: int, rows: np.ndarray,
               plan: Any) -> tuple[decode.Columns, decode.Columns]:
    """One rank's rows as columns."""
    return decode.decode(rows, plan, rank, self._process, self._attempt, self._previous[i],
                         self._shift[i] or 0)

  def _heard(self, rank: int, rows: np.ndarray, plan: Any) -> decode.Columns:
    """What was heard before collectives, as one rank's rows tell it."""
    return decode.listening(rows, plan, rank, self._process, self._attempt)

  def take_listening(self) -> decode.Columns:
    """Takes what was heard in the rows decoded so far; nothing where nobody listened."""
    heard = [columns for columns in self._listening if columns and len(columns["step"])]
    self._listening = []
    return decode.concatenate(heard) if heard else {}

  def decode(self, plan: Any) -> tuple[decode.Columns, decode.Columns]:
    """Decodes all rows taken in, and forgets them."""
    steps, collectives = [], []
    for i, rank in enumerate(self._ranks):
      if not self._rows[i]:
        continue
      rows = np.concatenate(self._rows[i])
      columns, waits = self._decoded(i, rank, rows, plan)
      if i == 0 and self._process == 0:  # what was heard is the same on all ranks
        self._listening.append(self._heard(rank, rows, plan))
      last_end = columns["end_ns"][-1]
      self._previous[i] = decode.Previous(
          int(columns["step"][-1]), 0 if last_end is np.ma.masked else int(last_end))
      steps.append(columns)
      collectives.append(waits)
      self._rows[i] = []
    self.rows = 0
    joined = decode.join_host(decode.concatenate(steps), host_columns(self._host))
    self._host = []
    return joined, decode.concatenate(collectives)


def host_columns(pieces: list[tuple[int, list[host.Sample],
                                    list[dict[str, float]]]]) -> decode.Columns:
  """Lays the samples out by step: the last sample of a piece belongs to its newest step.

  Args:
    pieces: (newest step, samples, the user's own columns) of successive steps.
  """
  if not pieces:
    return {"step": np.zeros(0, np.int64)}
  samples = [sample for _, piece, _ in pieces for sample in piece]
  extra = [columns for _, _, piece in pieces for columns in piece]
  steps = np.concatenate([
      np.arange(newest - len(piece) + 1, newest + 1, dtype=np.int64)
      for newest, piece, _ in pieces])
  columns: decode.Columns = {"step": steps}
  for i, cause in enumerate(HOST_CAUSES):
    values = [sample[i] for sample in samples]
    unknown = np.array([value is None for value in values], bool)
    columns[cause.column] = np.ma.masked_array(np.array([value or 0 for value in values], np.int64),
                                               unknown)
  for name in sorted({name for row in extra for name in row}):
    unknown = np.array([name not in row for row in extra], bool)
    columns[f"host_{name}"] = np.ma.masked_array(
        np.array([row.get(name, 0.0) for row in extra], np.float64), unknown)
  return columns
