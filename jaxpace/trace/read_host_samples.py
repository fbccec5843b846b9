"""Reads the `hosts` table of a recorded run: samples of each process's host, see
`jaxpace.trace.host_sampler`."""

from __future__ import annotations

import pathlib
from typing import NamedTuple

import numpy as np
import pyarrow as pa

from jaxpace.trace import part_files, schema
from jaxpace.trace.row_checks import filled
from jaxpace.trace.table_reader import open_table

COLUMNS = tuple(field.name for field in schema.HOSTS
                if field.name not in ("time_ns", "process", "attempt"))


class HostSamples(NamedTuple):
  """Samples in the order of process, attempt and time. Times of two processes can't be compared."""

  process: np.ndarray  # [N] int32
  attempt: np.ndarray  # [N] int32
  time_ns: np.ndarray  # [N] int64, that process's monotonic clock
  columns: dict[str, np.ndarray]  # [N] float64 by name of `COLUMNS`; NaN where null

  def of(self, process: int) -> HostSamples:
    """The samples of one process."""
    keep = self.process == process
    return HostSamples(self.process[keep], self.attempt[keep], self.time_ns[keep],
                       {name: values[keep] for name, values in self.columns.items()})

  def increase(self, name: str) -> dict[int, float]:
    """How much a counter rose in all, by process; those that never counted it are left out.

    Counters start anew with each attempt. A fall, as no counter has, counts as nothing.
    """
    found: dict[int, float] = {}
    values = self.columns[name]
    for process in np.unique(self.process).tolist():
      for attempt in np.unique(self.attempt[self.process == process]).tolist():
        own = values[(self.process == process) & (self.attempt == attempt)]
        own = own[np.isfinite(own)]
        if own.size:
          found[process] = found.get(process, 0.0) + float(np.maximum(np.diff(own), 0).sum())
    return found


def read_host_samples(path: pathlib.Path, run: str | None) -> tuple[HostSamples, list[str]]:
  """Reads all samples of a run.

  Args:
    path: run directory.
    run: id of the run; None takes every run's.

  Returns:
    The samples, none if nothing was sampled; and sentences about what was left out.

  Raises:
    PermissionError: the folder or a part may not be read.
  """
  table = open_table("hosts", part_files.list_parts(path / "hosts", run).parts)
  batches = list(table.read(["process", "attempt", "time_ns", *COLUMNS]))
  process = _join([_whole(batch, "process") for batch in batches])
  attempt = _join([_whole(batch, "attempt") for batch in batches])
  time_ns = _join([_whole(batch, "time_ns") for batch in batches])
  order = np.lexsort((time_ns, attempt, process))
  columns = {name: np.concatenate([_number(batch, name) for batch in batches] or [np.zeros(0)])[
      order]
             for name in COLUMNS}
  samples = HostSamples(process[order].astype(np.int32), attempt[order].astype(np.int32),
                        time_ns[order], columns)
  return samples, list(table.problems)


def _join(parts: list[np.ndarray]) -> np.ndarray:
  return np.concatenate(parts or [np.zeros(0, np.int64)])


def _whole(batch: pa.Table, name: str) -> np.ndarray:
  if name not in batch.column_names:
    return np.zeros(batch.num_rows, np.int64)
  return filled(batch.column(name), 0).astype(np.int64)


def _number(batch: pa.Table, name: str) -> np.ndarray:
  """A column as floats; NaN throughout where it is absent or holds no numbers."""
  kind = batch.schema.field(name).type if name in batch.column_names else None
  if kind is None or not (pa.types.is_integer(kind) or pa.types.is_floating(kind)):
    return np.full(batch.num_rows, np.nan)
  # Null is NaN by now; whole numbers beyond 2^53 are rounded.
  return batch.column(name).to_numpy().astype(np.float64, copy=False)
