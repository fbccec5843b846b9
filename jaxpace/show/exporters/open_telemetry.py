"""OpenTelemetry metrics: the same figures as for Prometheus, through a meter of the program's
own."""

from __future__ import annotations

from typing import Any

import numpy as np

from jaxpace.record.columns import Columns
from jaxpace.show.exporters.figures import (
  MOST_COLLECTIVES,
  MOST_DECISIONS,
  MOST_PHASES,
  MOST_RANKS,
  OTHER,
  Bounded,
  figures,
)


class OpenTelemetry:
  """An exporter to OpenTelemetry. Where figures go is up to the program's meter provider, as for
  all its metrics."""

  def __init__(self, meter: Any = None):
    """Makes the instruments.

    Args:
      meter: an `opentelemetry.metrics.Meter`; None takes "jaxpace" of the global provider.

    Raises:
      ImportError: no meter is given and the package opentelemetry-api is not installed.
    """
    if meter is None:
      try:
        from opentelemetry import metrics
      except ImportError as error:
        raise ImportError("OpenTelemetry() needs opentelemetry-api, and opentelemetry-sdk to send "
                          "anything: pip install 'jaxpace[opentelemetry]'.") from error
      meter = metrics.get_meter("jaxpace")
    self._bounded = Bounded()
    self._steps = meter.create_counter("jaxpace.steps", description="Steps recorded.")
    self._step_time = meter.create_histogram("jaxpace.step.duration", "s",
                                             "Time of a step, end to end.")
    self._phases = meter.create_counter("jaxpace.phase.time", "s",
                                        "Time in a phase; delay is pacing's.")
    self._waits = meter.create_counter("jaxpace.wait.time", "s",
                                       "Time in a collective, from entry to exit.")
    self._host = meter.create_counter("jaxpace.host.time", "s",
                                      "Time the process spent on something, by cause.")
    self._switches = meter.create_counter("jaxpace.involuntary_switches",
                                          description="Involuntary context switches.")
    self._last = meter.create_gauge("jaxpace.last_step",
                                    description="Number of the newest step recorded.")
    self._decision = meter.create_gauge("jaxpace.decision",
                                        description="What the pacer decided for the newest step.")

  def export(self, steps: Columns, collectives: Columns) -> None:
    """Adds rows up; see `jaxpace.record.exporting.Exporter`."""
    found = figures(steps, collectives)
    if found is None:
      return
    for rank, number in found.steps.items():
      self._steps.add(number, self._rank(rank))
    for rank, seconds in found.step_seconds.items():
      for value in np.maximum(seconds, 0).tolist():
        self._step_time.record(value, self._rank(rank))
    for (rank, phase), total in found.phases.items():
      self._phases.add(max(total, 0.0),
                       {**self._rank(rank), "phase": self._bounded("phase", phase, MOST_PHASES)})
    for (rank, name), total in found.waits.items():
      self._waits.add(total, {**self._rank(rank),
                              "collective": self._bounded("collective", name, MOST_COLLECTIVES)})
    process = {"process": found.process}
    for cause, total in found.host.items():
      self._host.add(max(total, 0.0), {**process, "cause": cause})
    if found.switches is not None:
      self._switches.add(max(found.switches, 0), process)
    self._last.set(found.last_step, process)
    for name, value in found.decisions.items():
      shown = self._bounded("decision", name, MOST_DECISIONS)
      if shown != OTHER:
        self._decision.set(value, {**process, "name": shown})

  def close(self) -> None:
    """Leaves the provider running: it is the program's."""

  def _rank(self, rank: int) -> dict[str, str]:
    return {"rank": self._bounded("rank", str(rank), MOST_RANKS)}
