"""Clocks and the delay operation: the timers inside the compiled step."""

from jaxpace.observation.clocks.clock import (
  CLOCKS,
  Clock,
  ClockError,
  gate,
  resolve_clock,
)

__all__ = ["CLOCKS", "Clock", "ClockError", "gate", "resolve_clock"]
