"""Cuts the beginning off a run that is in memory."""

from __future__ import annotations

import dataclasses

from jaxpace.trace.run import Run


def cut(run: Run, first: int) -> Run:
  """The run from the step at index `first` on; the one before it is kept as for any window."""
  part = slice(max(first - 1, 0), None)
  causes = dataclasses.replace(run.host_causes,
                               columns={n: v[:, part] for n, v in run.host_causes.columns.items()})
  return dataclasses.replace(
      run, steps=run.steps[part], attempt=run.attempt[:, part],
      window=(int(run.steps[first]), run.window[1]),
      end_ns=None if run.end_ns is None else run.end_ns[:, part],
      durations={name: values[:, part] for name, values in run.durations.items()},
      collectives=tuple(dataclasses.replace(c, enter_ns=c.enter_ns[:, part],
                                            exit_ns=c.exit_ns[:, part], attempt=c.attempt[:, part],
                                            held=None if c.held is None else c.held.at(part))
                        for c in run.collectives),
      guard={name: values[part] for name, values in run.guard.items()}, host_causes=causes)
