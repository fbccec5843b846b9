"""jaxpace: where the step time of a distributed JAX training run goes, who is late, and why."""

import importlib
from typing import TYPE_CHECKING

# For type checkers and editors only. A test holds it against the table below.
if TYPE_CHECKING:
  from jaxpace import distributed as distributed
  from jaxpace.communication.phases import phase as phase
  from jaxpace.coordination.balancer import share_by_speed as share_by_speed
  from jaxpace.coordination.combinators import chain as chain
  from jaxpace.coordination.combinators import limit as limit
  from jaxpace.coordination.combinators import only_ranks as only_ranks
  from jaxpace.coordination.early_ranks import pace_early_ranks as pace_early_ranks
  from jaxpace.coordination.guard import guard as guard
  from jaxpace.coordination.interleave import interleave_jobs as interleave_jobs
  from jaxpace.coordination.knobs import Knobs as Knobs
  from jaxpace.coordination.lengths import balance as balance
  from jaxpace.coordination.lengths import fit_costs as fit_costs
  from jaxpace.coordination.share_work import share_work as share_work
  from jaxpace.coordination.steer import steerable as steerable
  from jaxpace.coordination.take_turns import take_turns as take_turns
  from jaxpace.core.pace import PaceState as PaceState
  from jaxpace.core.plan import Plan as Plan
  from jaxpace.core.types import Balancer as Balancer
  from jaxpace.core.types import Decision as Decision
  from jaxpace.core.types import Hold as Hold
  from jaxpace.core.types import Moment as Moment
  from jaxpace.core.types import Observation as Observation
  from jaxpace.core.types import Pacer as Pacer
  from jaxpace.live.control.control import Control as Control
  from jaxpace.live.housekeeping.keeper import Housekeeper as Housekeeper
  from jaxpace.live.probe.links import probe_links as probe_links
  from jaxpace.live.profiler.recorder import ProfiledRecorder as ProfiledRecorder
  from jaxpace.live.shares import shares as shares
  from jaxpace.live.watchdog.watchdog import Watchdog as Watchdog
  from jaxpace.step.accumulate import accumulate as accumulate
  from jaxpace.step.instrument import instrument as instrument
  from jaxpace.step.instrument import spec as spec
  from jaxpace.step.observe import observe as observe
  from jaxpace.step.pieces import delay as delay
  from jaxpace.step.pieces import pmean as pmean
  from jaxpace.step.pieces import psum as psum
  from jaxpace.step.restoring import pace_target as pace_target
  from jaxpace.step.restoring import restore_pace as restore_pace
  from jaxpace.trace.observed import observed as observed
  from jaxpace.trace.recorded import recorded as recorded
  from jaxpace.trace.recorder import Recorder as Recorder

_HOMES = {
    "Balancer": "core.types",
    "Control": "live.control.control",
    "Decision": "core.types",
    "Hold": "core.types",
    "Housekeeper": "live.housekeeping.keeper",
    "Knobs": "coordination.knobs",
    "Moment": "core.types",
    "Observation": "core.types",
    "PaceState": "core.pace",
    "Pacer": "core.types",
    "Plan": "core.plan",
    "ProfiledRecorder": "live.profiler.recorder",
    "Recorder": "trace.recorder",
    "Watchdog": "live.watchdog.watchdog",
    "accumulate": "step.accumulate",
    "balance": "coordination.lengths",
    "chain": "coordination.combinators",
    "delay": "step.pieces",
    "fit_costs": "coordination.lengths",
    "guard": "coordination.guard",
    "instrument": "step.instrument",
    "interleave_jobs": "coordination.interleave",
    "limit": "coordination.combinators",
    "observe": "step.observe",
    "observed": "trace.observed",
    "only_ranks": "coordination.combinators",
    "pace_early_ranks": "coordination.early_ranks",
    "pace_target": "step.restoring",
    "phase": "communication.phases",
    "pmean": "step.pieces",
    "probe_links": "live.probe.links",
    "psum": "step.pieces",
    "recorded": "trace.recorded",
    "restore_pace": "step.restoring",
    "share_by_speed": "coordination.balancer",
    "share_work": "coordination.share_work",
    "shares": "live.shares",
    "spec": "step.instrument",
    "steerable": "coordination.steer",
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
