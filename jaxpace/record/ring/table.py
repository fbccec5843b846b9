"""What devices did in steps, as rows of the tables. Pure numpy: no device, no clock, no I/O."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from jaxpace.record.columns import Columns, length, null, picked
from jaxpace.runs.step_causes import HOST_CAUSES, Sample


class Range(NamedTuple):
  """Executions of a program that belong to a step: the numbers from `begin` to before `end`."""

  program: int
  begin: int
  end: int


UNKNOWN: Sample = (None,) * len(HOST_CAUSES)


class StepCalls(NamedTuple):
  """A step: what was executed, and what the host did."""

  step: int
  ranges: tuple[Range, ...]
  sample: Sample
  extra: dict[str, float]
  micro_batches: Mapping[int, int] | None = None
  """Of each rank of this process, where work is shared by speed."""


class DeviceSteps(NamedTuple):
  """What one device did in K steps."""

  # [K] bool, whether all executions of the step are there, and there were any
  whole: np.ndarray
  # [K] bool, whether some are not
  missing: np.ndarray
  # [K] int64 each
  start_ns: np.ndarray
  end_ns: np.ndarray
  # [K] each, what else the table `steps` has of them
  columns: Columns
  # [m] each: `row`, place of the step; `slot`; and what else the table `collectives` has
  collectives: Columns
  # [K] int64 between executions of the same step
  idle_ns: np.ndarray | int = 0
  # [K] int64 by which the program itself counts its steps, -1 where not known; None where it does
  # not count them
  number: np.ndarray | None = None
  # [j] each: `row`, and what the table `listening` has; none where nothing is listened to
  listening: Columns = {}  # noqa: RUF012


def rows(own: DeviceSteps, of: Columns, before: np.ndarray, host: Columns, chosen: np.ndarray,
         plan: Any) -> dict[str, Columns]:
  """Rows of the tables `steps`, `collectives` and `listening` of one device, for its whole steps.

  Args:
    own: what the device did in K steps.
    of: [K] columns of whose they are, see `jaxpace.record.columns.whose`.
    before: [whole steps] when the step before each ended, see `ends_before` there.
    host: [K] columns of what the process did.
    chosen: [K] bool, which steps' collectives are written one by one.
    plan: what is in each slot.
  """
  kept = own.whole
  idle = own.idle_ns if isinstance(own.idle_ns, int) else own.idle_ns[kept]
  steps = {**picked(of, kept), "start_ns": own.start_ns[kept], "end_ns": own.end_ns[kept],
           "gap_ns": own.start_ns[kept] - before + idle, **picked(own.columns, kept),
           **picked(host, kept)}
  waits = picked(own.collectives, (chosen & kept)[own.collectives["row"]])
  row, slot = waits.pop("row"), waits.pop("slot")
  size = plan.bytes[slot]
  waits = {**picked(of, row), "collective": slot.astype(np.int32), "name": plan.names[slot],
           "axis": plan.axes[slot], "bytes": null(np.maximum(size, 0), size < 0), **waits}
  tables = {"steps": steps, "collectives": waits}
  if length(own.listening):
    heard = picked(own.listening, kept[own.listening["row"]])
    tables["listening"] = {**picked(of, heard.pop("row")), **heard}
  return tables
