"""Scalars by step, for TensorBoard or anything that has `write_scalars(step, scalars)`; from
process 0 only."""

from __future__ import annotations

import os
from typing import Any

import numpy as np

from jaxpace.record.columns import Columns
from jaxpace.show.exporters.figures import BatchFigures, figures


class Scalars:
  """An exporter of means over the steps since the last ones it wrote, of process 0's ranks.

  Every few seconds it writes `jaxpace/step_ms`, `jaxpace/<phase>_ms`, `jaxpace/wait_ms`,
  `jaxpace/gc_ms` and others that the run has, and `jaxpace/decision/<name>`, the pacer's newest,
  under the number of the newest step.
  """

  def __init__(self, writer: Any):
    """Prepares.

    Args:
      writer: has a method `write_scalars(step, scalars)`, called with numbers by name, as `clu`'s
        metric writers have. It is called by a thread of the recorder's: one that the loop uses too
        must bear that.

    Raises:
      TypeError: the writer has no method `write_scalars`.
    """
    if not callable(getattr(writer, "write_scalars", None)):
      raise TypeError("Scalars takes an object with write_scalars(step, scalars), not "
                      f"{type(writer).__name__}. For TensorBoard files: TensorBoard(logdir).")
    self._writer = writer

  def export(self, steps: Columns, collectives: Columns) -> None:
    """Writes the means of new rows; see `jaxpace.record.exporting.Exporter`."""
    found = figures(steps, collectives)
    if found is not None and found.process == 0:
      scalars = {f"jaxpace/{name}": value for name, value in means(found).items()}
      self._writer.write_scalars(found.last_step, scalars)

  def close(self) -> None:
    """Leaves the writer open: it is the caller's."""


class TensorBoard:
  """An exporter that writes TensorBoard files, by tensorboardX; see `Scalars` for the names."""

  def __init__(self, logdir: str | os.PathLike[str]):
    """Prepares; the folder is made with the first rows, by process 0.

    Raises:
      ImportError: the package tensorboardX is not installed.
    """
    try:
      import tensorboardX
    except ImportError as error:
      raise ImportError(
          "TensorBoard() needs tensorboardX: pip install 'jaxpace[metrics]'.") from error
    self._make = lambda: tensorboardX.SummaryWriter(os.path.abspath(logdir))
    self._files: Any = None
    self._scalars = Scalars(self)

  def export(self, steps: Columns, collectives: Columns) -> None:
    """Writes the means of new rows; see `jaxpace.record.exporting.Exporter`."""
    self._scalars.export(steps, collectives)

  def write_scalars(self, step: int, scalars: dict[str, float]) -> None:
    """Writes numbers by name."""
    if self._files is None:
      self._files = self._make()
    for name, value in scalars.items():
      self._files.add_scalar(name, value, step)
    self._files.flush()

  def close(self) -> None:
    """Closes the files."""
    if self._files is not None:
      self._files.close()


def means(found: BatchFigures) -> dict[str, float]:
  """Means a step over the process's ranks, in ms, and the pacer's newest decisions."""
  rows, steps = sum(found.steps.values()), max(found.steps.values())
  durations = np.concatenate(list(found.step_seconds.values()))
  scalars = {"step_ms": float(durations.mean() * 1e3)} if durations.size else {}
  for (_, phase), seconds in found.phases.items():
    scalars[f"{phase}_ms"] = scalars.get(f"{phase}_ms", 0.0) + seconds * 1e3 / rows
  if found.waits:
    scalars["wait_ms"] = sum(found.waits.values()) * 1e3 / rows
  scalars.update({f"{cause}_ms": seconds * 1e3 / steps for cause, seconds in found.host.items()})
  scalars.update({f"decision/{name}": value for name, value in found.decisions.items()})
  return scalars
