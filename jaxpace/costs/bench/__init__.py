"""Measures collectives over sizes on the devices at hand, and fits latency and bandwidth. See
docs/forecast.md."""
