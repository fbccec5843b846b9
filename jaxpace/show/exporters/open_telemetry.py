"""OpenTelemetry metrics: the same figures as for Prometheus, through a meter of the program's
own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from jaxpace.record.columns import Columns
from jaxpace.show.exporters.figures import SERIES, Bounded, figures


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
    made: dict[str, Callable[..., Any]] = {
        "counter": lambda *said: meter.create_counter(*said).add,
        "histogram": lambda *said: meter.create_histogram(*said).record,
        "gauge": lambda *said: meter.create_gauge(*said).set}
    self._takes = {name: made[kind](f"jaxpace.{called}", unit, what)
                   for name, (kind, called, unit, what, _) in SERIES.items()}

  def export(self, steps: Columns, collectives: Columns) -> None:
    """Adds rows up; see `jaxpace.record.exporting.Exporter`."""
    found = figures(steps, collectives)
    for name, labels, number in self._bounded.points(found) if found else ():
      self._takes[name](number, labels)

  def close(self) -> None:
    """Leaves the provider running: it is the program's."""
