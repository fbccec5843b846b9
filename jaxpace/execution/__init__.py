"""Clocks and the delay operation: the timers inside the compiled step."""

from jaxpace.execution.clock import CLOCKS, Clock, ClockError, clock_notice, resolve_clock
from jaxpace.execution.operands import gate

__all__ = ["CLOCKS", "Clock", "ClockError", "clock_notice", "gate", "resolve_clock"]
