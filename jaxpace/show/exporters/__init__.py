"""Exporters: what a recorder records, for monitoring systems, while the job runs. See
docs/watch.md."""

from jaxpace.show.exporters.scalars import Scalars, TensorBoard
from jaxpace.show.exporters.series import OpenTelemetry, Prometheus

__all__ = ["OpenTelemetry", "Prometheus", "Scalars", "TensorBoard"]
