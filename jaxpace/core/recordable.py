"""What a recorder records: a function that timestamps its steps."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxpace.core.observed import ObservedPlan
from jaxpace.core.plan import Plan


class Recordable:
  """Base of what `jaxpace.instrument` and `jaxpace.observe` return.

  A class to inherit from, not a protocol: `jax.jit` and `jax.shard_map` copy the attributes of what
  they wrap, so attributes can't tell an instrumented function from a compiled one around it.
  """

  plan: Plan | ObservedPlan | None = None
  """What the timestamps mean; known once the function has been traced."""

  def settings_json(self) -> dict[str, Any]:
    """Returns how the function was instrumented, as plain JSON values."""
    raise NotImplementedError


class InstrumentedFunction(Recordable):
  """Base of what `jaxpace.instrument` returns: a function whose steps write events."""

  plan: Plan | None = None
  """What the events mean; known once the function has been traced."""

  number: int | None = None
  """Number of its events' program in this process; None before the first trace, or where they go
  nowhere."""

  devices: tuple[int, ...] = ()
  """`jax.Device.id` of each place of the pace state, from `first_place` on, as `init` last made
  it."""

  first_place: int = 0
  """Number of the first of these."""


def observed_function(step: Any) -> ObservedFunction | None:
  """The observed function that a call of `step` runs: itself, or that of a bound method."""
  if isinstance(step, ObservedFunction):  # asked in each step of a loop
    return step
  step = getattr(step, "__func__", None)
  return step if isinstance(step, ObservedFunction) else None


class ObservedFunction(Recordable):
  """Base of what `jaxpace.observe` returns: a function whose compiled programs write timestamps."""

  plan: ObservedPlan | None = None
  """What the timestamps mean: the programs met so far."""

  clock: str = "auto"
  """Who writes the timestamps: "stream" for GPUs themselves, where that was asked for."""

  runs: frozenset[int] = frozenset()
  """Numbers of the programs with timestamps of which each call dispatches one; what is compiled
  beside them, to cut arguments up say, is not among them."""

  micro_batches: Mapping[int, int] | None = None
  """Of each of this process's devices, by its place in `jax.devices()`, in the step that comes;
  None where no work is shared by speed."""

  calls: int = 0
  """Calls so far in this process: the k-th execution of any of these to start on a device is of the
  k-th call. Counted as long as all programs of the function have timestamps."""
