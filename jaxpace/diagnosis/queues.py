"""Data that queue on the way throughout a run whose quiet fabric nobody has measured: no finding, but worth a look."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from jaxpace.diagnosis.counters import quantiles
from jaxpace.diagnosis.diagnosis import Diagnosis
from jaxpace.diagnosis.findings import CONTENTION

_SHARE = 0.3
"""Of the step that transfers take, at least: else little is to be gained."""
_TIMES = 10.0
"""A round trip takes as many times as long as the shortest one, at least."""


class Queue(NamedTuple):
  """Round trips between the hosts, medians, seconds."""

  trip: float
  shortest: float
  share: float  # of the step that transfers take


def unexplained_queue(diagnosis: Diagnosis) -> Queue | None:
  """Round trips far over the shortest ones in a run of long transfers; None where they aren't, or contention is known.

  A job alone fills the queue of its own slowest link as others' traffic would: only a floor tells the two apart.
  """
  run, found = diagnosis.run, diagnosis.findings
  shares = diagnosis.shares
  if (shares is None or diagnosis.floor.known or not run.collectives
      or any(finding.mode == CONTENTION for finding in found)):
    return None
  share = shares["transfer"] + shares["contention"]
  trips, shortest = (quantiles(run, diagnosis.selected, name, (0.5,)) for name in ("tcp_rtt_ns", "tcp_min_rtt_ns"))
  if share < _SHARE or min(len(trips), len(shortest)) < 2:
    return None
  trip, least = (1e-9 * float(np.median(list(values.values()))) for values in (trips, shortest))
  return Queue(trip, least, share) if trip >= _TIMES * least > 0 else None
