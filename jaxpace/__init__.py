"""jaxpace: where the step time of a distributed JAX training run goes, who is late, and why."""

import importlib
from typing import TYPE_CHECKING

# For type checkers and editors only. A test holds it against the table below.
if TYPE_CHECKING:
  from jaxpace import distributed as distributed
  from jaxpace.coordination.balancer import share_by_speed as share_by_speed
  from jaxpace.coordination.combinators import chain as chain
  from jaxpace.coordination.combinators import limit as limit
  from jaxpace.coordination.combinators import only_ranks as only_ranks
  from jaxpace.coordination.early_ranks import pace_early_ranks as pace_early_ranks
  from jaxpace.coordination.guard import guard as guard
  from jaxpace.coordination.interleave import interleave_jobs as interleave_jobs
  from jaxpace.coordination.knobs import Knobs as Knobs
  from jaxpace.coordination.knobs import steerable as steerable
  from jaxpace.coordination.lengths import balance as balance
  from jaxpace.coordination.lengths import fit_costs as fit_costs
  from jaxpace.coordination.take_turns import take_turns as take_turns
  from jaxpace.core.pace import PaceState as PaceState
  from jaxpace.core.plan import Plan as Plan
  from jaxpace.core.types import Balancer as Balancer
  from jaxpace.core.types import Decision as Decision
  from jaxpace.core.types import Hold as Hold
  from jaxpace.core.types import Moment as Moment
  from jaxpace.core.types import Observation as Observation
  from jaxpace.core.types import Pacer as Pacer
  from jaxpace.hang.watchdog import Watchdog as Watchdog
  from jaxpace.instrumentation.accumulate import accumulate as accumulate
  from jaxpace.instrumentation.instrument import instrument as instrument
  from jaxpace.instrumentation.instrument import spec as spec
  from jaxpace.instrumentation.pieces import delay as delay
  from jaxpace.instrumentation.pieces import pmean as pmean
  from jaxpace.instrumentation.pieces import psum as psum
  from jaxpace.instrumentation.restoring import pace_target as pace_target
  from jaxpace.instrumentation.restoring import restore_pace as restore_pace
  from jaxpace.live.control import Control as Control
  from jaxpace.live.housekeeper import Housekeeper as Housekeeper
  from jaxpace.live.probe import probe_links as probe_links
  from jaxpace.live.shares import shares as shares
  from jaxpace.observation.observe import observe as observe
  from jaxpace.observation.phases import phase as phase
  from jaxpace.record.observed import observed as observed
  from jaxpace.record.profiler import ProfiledRecorder as ProfiledRecorder
  from jaxpace.record.recorded import recorded as recorded
  from jaxpace.record.recorder import Recorder as Recorder

_HOMES = {
    "Balancer": "core.types",
    "Control": "live.control",
    "Decision": "core.types",
    "Hold": "core.types",
    "Housekeeper": "live.housekeeper",
    "Knobs": "coordination.knobs",
    "Moment": "core.types",
    "Observation": "core.types",
    "PaceState": "core.pace",
    "Pacer": "core.types",
    "Plan": "core.plan",
    "ProfiledRecorder": "record.profiler",
    "Recorder": "record.recorder",
    "Watchdog": "hang.watchdog",
    "accumulate": "instrumentation.accumulate",
    "balance": "coordination.lengths",
    "chain": "coordination.combinators",
    "delay": "instrumentation.pieces",
    "fit_costs": "coordination.lengths",
    "guard": "coordination.guard",
    "instrument": "instrumentation.instrument",
    "interleave_jobs": "coordination.interleave",
    "limit": "coordination.combinators",
    "observe": "observation.observe",
    "observed": "record.observed",
    "only_ranks": "coordination.combinators",
    "pace_early_ranks": "coordination.early_ranks",
    "pace_target": "instrumentation.restoring",
    "phase": "observation.phases",
    "pmean": "instrumentation.pieces",
    "probe_links": "live.probe",
    "psum": "instrumentation.pieces",
    "recorded": "record.recorded",
    "restore_pace": "instrumentation.restoring",
    "share_by_speed": "coordination.balancer",
    "shares": "live.shares",
    "spec": "instrumentation.instrument",
    "steerable": "coordination.knobs",
    "take_turns": "coordination.take_turns",
}
"""Where each public name lives. It is imported when first used: the `jaxpace` command must not wait
for JAX."""

_MODULES = {"distributed": "distributed"}
"""Modules that are used by their own name after `import jaxpace`."""

__all__ = [*_HOMES]


def __getattr__(name: str) -> object:
  if name in _MODULES:
    value: object = importlib.import_module(f"{__name__}.{_MODULES[name]}")
  elif name in _HOMES:
    value = getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
  else:
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
  globals()[name] = value
  return value


def __dir__() -> list[str]:
  return sorted({*globals(), *__all__, *_MODULES})
