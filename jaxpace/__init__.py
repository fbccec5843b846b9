"""jaxpace: where the step time of a distributed JAX training run goes, who is late, and why."""

import importlib
import sys
import types
from typing import TYPE_CHECKING

if TYPE_CHECKING:
  from jaxpace.communication.phases import phase
  from jaxpace.control.control import Control
  from jaxpace.coordination.combinators import chain, limit, only_ranks
  from jaxpace.coordination.early_ranks import pace_early_ranks
  from jaxpace.coordination.guard import guard
  from jaxpace.coordination.interleave import interleave_jobs
  from jaxpace.coordination.knobs import Knobs
  from jaxpace.coordination.steer import steerable
  from jaxpace.core.pace import PaceState
  from jaxpace.core.plan import Plan
  from jaxpace.core.types import Decision, Observation, Pacer
  from jaxpace.housekeeping.keeper import Housekeeper
  from jaxpace.instrument import instrument, spec
  from jaxpace.pieces import delay, pmean, psum
  from jaxpace.probing.links import probe_links
  from jaxpace.probing.on_contention import ProbeOnContention
  from jaxpace.profiled.recorder import ProfiledRecorder
  from jaxpace.recorded import recorded
  from jaxpace.restoring import pace_target, restore_pace
  from jaxpace.trace.recorder import Recorder
  from jaxpace.watching.watchdog import Watchdog

__all__ = [
    "Control", "Decision", "Housekeeper", "Knobs", "Observation", "PaceState", "Pacer", "Plan", "ProbeOnContention",
    "ProfiledRecorder", "Recorder", "Watchdog", "chain", "delay", "guard", "instrument", "interleave_jobs", "limit",
    "only_ranks", "pace_early_ranks", "pace_target", "phase", "pmean", "probe_links", "psum", "recorded",
    "restore_pace", "spec", "steerable"]

_HOMES = {
    "Control": "jaxpace.control.control",
    "Decision": "jaxpace.core.types",
    "Housekeeper": "jaxpace.housekeeping.keeper",
    "Knobs": "jaxpace.coordination.knobs",
    "Observation": "jaxpace.core.types",
    "PaceState": "jaxpace.core.pace",
    "Pacer": "jaxpace.core.types",
    "Plan": "jaxpace.core.plan",
    "ProbeOnContention": "jaxpace.probing.on_contention",
    "ProfiledRecorder": "jaxpace.profiled.recorder",
    "Recorder": "jaxpace.trace.recorder",
    "Watchdog": "jaxpace.watching.watchdog",
    "chain": "jaxpace.coordination.combinators",
    "delay": "jaxpace.pieces",
    "guard": "jaxpace.coordination.guard",
    "instrument": "jaxpace.instrument",
    "interleave_jobs": "jaxpace.coordination.interleave",
    "limit": "jaxpace.coordination.combinators",
    "only_ranks": "jaxpace.coordination.combinators",
    "pace_early_ranks": "jaxpace.coordination.early_ranks",
    "pace_target": "jaxpace.restoring",
    "phase": "jaxpace.communication.phases",
    "pmean": "jaxpace.pieces",
    "probe_links": "jaxpace.probing.links",
    "psum": "jaxpace.pieces",
    "recorded": "jaxpace.recorded",
    "restore_pace": "jaxpace.restoring",
    "spec": "jaxpace.instrument",
    "steerable": "jaxpace.coordination.steer",
}
"""Where each name lives. It is imported when first used: the `jaxpace` command must not wait for JAX."""

_MODULES = ("distributed", "flags")
"""Modules that are used by their own name after `import jaxpace`."""


class _Package(types.ModuleType):
  """The package itself; `jaxpace.instrument` is the function, also after its module of the same name was imported."""

  def __getattr__(self, name: str) -> object:
    if name in _MODULES:
      return importlib.import_module(f"{__name__}.{name}")
    if name not in _HOMES:
      raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOMES[name]), name)
    setattr(self, name, value)
    return value

  def __setattr__(self, name: str, value: object) -> None:
    if not (name in _HOMES and isinstance(value, types.ModuleType)):  # the import system binds submodules so
      super().__setattr__(name, value)

  def __dir__(self) -> list[str]:
    return sorted({*super().__dir__(), *__all__, *_MODULES})


sys.modules[__name__].__class__ = _Package
