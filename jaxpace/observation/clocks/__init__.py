"""Clocks and the delay operation: the timers inside the compiled step."""

from jaxpace.observation.clocks.clock import CLOCKS, Clock, ClockError, clock_notice, resolve_clock
from jaxpace.observation.clocks.gate import hold

__all__ = ["CLOCKS", "Clock", "ClockError", "clock_notice", "hold", "resolve_clock"]
