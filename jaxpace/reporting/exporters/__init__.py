"""Exporters: what a recorder records, for monitoring systems, while the job runs. See
docs/watch.md."""

from jaxpace.reporting.exporters.open_telemetry import OpenTelemetry
from jaxpace.reporting.exporters.prometheus import Prometheus
from jaxpace.reporting.exporters.scalars import Scalars, TensorBoard

__all__ = ["OpenTelemetry", "Prometheus", "Scalars", "TensorBoard"]
