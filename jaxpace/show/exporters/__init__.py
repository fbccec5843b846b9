"""Exporters: what a recorder records, for monitoring systems, while the job runs. See
docs/watch.md."""

from jaxpace.show.exporters.open_telemetry import OpenTelemetry
from jaxpace.show.exporters.prometheus import Prometheus
from jaxpace.show.exporters.scalars import Scalars, TensorBoard

__all__ = ["OpenTelemetry", "Prometheus", "Scalars", "TensorBoard"]
