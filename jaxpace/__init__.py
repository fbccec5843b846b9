"""jaxpace: where the step time of a distributed JAX training run goes, who is late, and why."""

from jaxpace.communication.phases import phase
from jaxpace.core.types import Decision, Observation, Pacer
from jaxpace.instrument import instrument, spec

__all__ = ["Decision", "Observation", "Pacer", "instrument", "phase", "spec"]
