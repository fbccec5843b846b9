"""Clocks and the delay operation: the timers inside the compiled step."""

from jaxpace.execution.clock import CLOCKS, Clock, ClockError, clock_notice, resolve_clock
from jaxpace.execution.holding import hold

__all__ = ["CLOCKS", "Clock", "ClockError", "clock_notice", "hold", "resolve_clock"]
