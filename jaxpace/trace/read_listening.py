"""Reads the `listening` table of a recorded run: what the job heard before its collectives."""

from __future__ import annotations

import pathlib
from typing import NamedTuple

import numpy as np

from jaxpace.trace import part_files
from jaxpace.trace.dense import StepAxis, integers
from jaxpace.trace.table_reader import open_table

_COLUMNS = ("step", "collective", "turn", "heard_ns", "told_ns")


class Listening(NamedTuple):
  """Readings in the order of step, collective and turn; N of them. ns, `MISSING` where null."""

  step: np.ndarray  # [N] int64, step numbers
  collective: np.ndarray  # [N] int64, slot before which it was listened
  turn: np.ndarray  # [N] int64, 0 for the first time before that collective
  heard_ns: np.ndarray  # [N] int64
  told_ns: np.ndarray  # [N] int64


def read_listening(path: pathlib.Path, run: str | None, axis: StepAxis, attempt: np.ndarray
                   ) -> tuple[Listening, list[str]]:
  """Reads what was heard in a run's steps.

  Args:
    path: run directory.
    run: id of the run; None takes every run's.
    axis: the step numbers wanted.
    attempt: [R, K] newest attempt of each rank and step, -1 where nothing is recorded; only the
      newest one's readings count.

  Returns:
    The readings, none where nobody listened; and sentences about what was left out.

  Raises:
    PermissionError: the folder or a part may not be read.
  """
  table = open_table("listening", part_files.list_parts(path / "listening", run).parts)
  newest = attempt.max(axis=0)
  parts: list[list[np.ndarray]] = []
  for rows in table.read([*_COLUMNS, "attempt"], (int(axis.steps[0]), int(axis.steps[-1]))):
    columns = [integers(rows.column(name)) for name in _COLUMNS]
    at, inside = axis.index(columns[0])
    keep = np.ones(len(at), bool) if inside is None else inside
    keep = keep & (integers(rows.column("attempt")) == newest[np.where(keep, at, 0)])
    parts.append([values[keep] for values in columns])
  step, slot, turn, heard, told = ([np.concatenate(each).astype(np.int64)
                                   for each in zip(*parts, strict=True)]
                                  or [np.zeros(0, np.int64)] * 5)
  # Of rows that say it twice, the one read last.
  order = np.lexsort((np.arange(len(step)), turn, slot, step))
  keys = np.stack([step, slot, turn])[:, order]
  last = np.append((keys[:, 1:] != keys[:, :-1]).any(axis=0), True)[:len(order)]
  return (Listening(*(values[order[last]] for values in (step, slot, turn, heard, told))),
          list(table.problems))
