"""Shared words: observations, decisions, pacers, the plan of a step, the layout of its stamps."""

from jaxpace.core.plan import Collective, Mark, Plan, Unstamped
from jaxpace.core.types import Decision, Observation, Pacer, PacerState

__all__ = [
    "Collective", "Decision", "Mark", "Observation", "Pacer", "PacerState", "Plan", "Unstamped"]
