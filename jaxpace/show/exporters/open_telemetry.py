"""OpenTelemetry metrics: the same figures as for Prometheus, through a meter of the program's
own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from jaxpace.record.columns import Columns
from jaxpace.show.exporters.figures import Bounded, figures


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
    counter = meter.create_counter
    # What takes each number, by the names of `Bounded.points`.
    self._takes: dict[str, Callable[[float, dict[str, str | int]], None]] = {
        "steps": counter("jaxpace.steps", description="Steps recorded.").add,
        "step_seconds": meter.create_histogram("jaxpace.step.duration", "s",
                                               "Time of a step, end to end.").record,
        "phase_seconds": counter("jaxpace.phase.time", "s",
                                 "Time in a phase; delay is pacing's.").add,
        "wait_seconds": counter("jaxpace.wait.time", "s",
                                "Time in a collective, from entry to exit.").add,
        "host_seconds": counter("jaxpace.host.time", "s",
                                "Time the process spent on something, by cause.").add,
        "involuntary_switches": counter("jaxpace.involuntary_switches",
                                        description="Involuntary context switches.").add,
        "last_step": meter.create_gauge("jaxpace.last_step",
                                        description="Number of the newest step recorded.").set,
        "decision": meter.create_gauge(
            "jaxpace.decision", description="What the pacer decided for the newest step.").set}

  def export(self, steps: Columns, collectives: Columns) -> None:
    """Adds rows up; see `jaxpace.record.exporting.Exporter`."""
    found = figures(steps, collectives)
    for name, labels, number in self._bounded.points(found) if found else ():
      if name in self._takes:
        self._takes[name](number, labels)

  def close(self) -> None:
    """Leaves the provider running: it is the program's."""
