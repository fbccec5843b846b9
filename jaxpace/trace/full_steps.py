"""The steps of an observed run that are written in full, as a run of their own."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from jaxpace.trace.run import MISSING, CollectiveTimes, HostCauses, Run


def in_full(whole: Run, collectives: Sequence[CollectiveTimes], steps: np.ndarray) -> Run:
  """Cuts some steps out of a run and gives them their collectives.

  Args:
    whole: all steps; each ends with its last exit.
    collectives: of those steps, [R, D].
    steps: [D] their numbers, rising; `whole` has all of them.

  Returns:
    A run of these steps alone. Each is measured from the last exit of the step before, which
    `whole` knows.
  """
  at = np.searchsorted(whole.steps, steps)
  attempt = whole.attempt[:, at]
  for collective in collectives:
    attempt = np.maximum(attempt, collective.attempt)
  assert whole.end_ns is not None
  before = np.maximum(at - 1, 0)
  known = (at > 0) & (whole.steps[before] == steps - 1)
  previous = np.where(known & (whole.attempt[:, before] == attempt), whole.end_ns[:, before],
                      MISSING)
  causes = HostCauses(whole.host_causes.processes,
                      {name: values[:, at] for name, values in whole.host_causes.columns.items()})
  return dataclasses.replace(
      whole, steps=whole.steps[at], attempt=attempt, end_ns=None, collectives=tuple(collectives),
      durations={name: values[:, at] for name, values in whole.durations.items()},
      guard={name: values[at] for name, values in whole.guard.items()}, host_causes=causes,
      whole=whole, previous_exit=previous)
