"""Clocks that run inside a compiled step, the choice among them, and what waits for one."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax

from jaxpace.core.varying import vary, varying
from jaxpace.observation.clocks import callback, native, operands, stream
from jaxpace.observation.clocks.operands import Event


class Clock(NamedTuple):
  """A clock usable under `jax.jit`, `jax.shard_map` (either `check_vma`) and `jax.pmap`.

  A timestamp has no side effect that orders it: it is taken because its result is used, after
  everything it is given, and two timestamps stay distinct and ordered because each is given the one
  before. What comes *after* a timestamp in time must use its result
  (`gate`).

  Under `check_vma=True` timestamps are typed as if they were the same on every device. They are
  not; but so they can hold back a parameter, which must not vary. Where a timestamp leaves the
  step, `jaxpace.core.varying.vary` gives it its axes.

  Attributes:
    name: "native", "stream" or "callback".
    platforms: where it runs, as in `jax.Device.platform`; None for all.
    unavailable: `unavailable()` registers what the clock needs; returns why it can't be used here,
      empty where it can.
    timestamp: `timestamp(previous, *after, event=NOWHERE)` -> uint32 [2], (high, low) words of
      nanoseconds of this host's monotonic clock, read when `previous` (uint32 [2], the last
      timestamp) and every array of `after` is ready. Arrays of any shape and dtype, PRNG keys
      included; none is read or copied, but XLA hands a native timestamp its operands whole and in
      row-major layout: give a slice where that would cost a transposition. With an event, it goes
      to the ring of timestamps, too.
    delay: `delay(seconds, limit_s, previous, *after)` -> the timestamps (uint32 [2] each) before
      and after sleeping min(max(seconds, 0), limit_s): `seconds` float32 [], NaN counts as 0;
      `limit_s` a Python float. The second timestamp is never earlier than the first plus the delay.
      Nothing sleeps, and the two are equal, where it is 0. With `events`, both timestamps go to the
      ring; the second may not where nothing slept.
    note: `note(chain, numbers, event)` -> `chain` (uint32 [2]), after the ring has `numbers`,
      uint32 [n, 2] of (high, low) words, as events with tags from the event's on.
    place: `place(rank)` -> what the clock must be given in `Event.place`, of the place of its
      device in the pace state; None where it needs nothing.
    gate: `gate(timestamp, values)` -> the values, once the timestamp is there; all varying over the
      same mesh axes. Use the function `gate`, which sees to that.
    awaited_under_pmap: `awaited_under_pmap(results)` -> those results of a step under `jax.pmap`
      that its last timestamp can wait for without a change in how they are computed.
    in_stream: whether what a timestamp waits for is best given whole, and costs nothing: kernels
      that run one after the other are given addresses, and to cut an element out would be one more
      kernel.
    notice: why a better clock is not used; empty where there is none better.
  """

  name: str
  platforms: tuple[str, ...] | None
  unavailable: Callable[[], str]
  timestamp: Callable[..., jax.Array]
  delay: Callable[..., tuple[jax.Array, jax.Array]]
  gate: Callable[[jax.Array, list[jax.Array]], list[jax.Array]]
  note: Callable[[jax.Array, jax.Array, Event], jax.Array]
  place: Callable[[jax.Array], jax.Array | None]
  awaited_under_pmap: Callable[[Sequence[jax.Array]], list[jax.Array]] = list
  in_stream: bool = False
  notice: str = ""


# Best first.
_CLOCKS = (
    Clock("native", ("cpu",), native.unavailable, native.timestamp, native.delay, native.gate,
          native.note, native.place),
    Clock("stream", ("gpu", "cuda"), stream.unavailable, stream.timestamp, stream.delay,
          stream.gate, stream.note, stream.place, in_stream=True),
    Clock("callback", None, lambda: "", callback.timestamp, callback.delay, callback.gate,
          callback.note, callback.place, callback.awaited_under_pmap),
)

CLOCKS = ("auto", *(clock.name for clock in _CLOCKS))
"""Names `resolve_clock` knows."""


class ClockError(RuntimeError):
  """The clock asked for can't be used here; the message says why and what to do."""


def resolve_clock(name: str = "auto", platform: str = "cpu") -> Clock:
  """Chooses the clock of a step.

  Args:
    name: "auto" for the best there is, or the name of one.
    platform: where the step runs, as in `jax.Device.platform`: "cpu", "gpu", "tpu", ....

  Returns:
    The clock. Its `notice` says what kept "auto" from a better one.

  Raises:
    ValueError: there is no clock of that name.
    ClockError: it is asked for by name and can't be used here.
  """
  if name not in CLOCKS:
    raise ValueError(f"Unknown clock {name!r}. Use one of: {', '.join(CLOCKS)}.")
  notices = []
  for clock in _CLOCKS:
    if name not in ("auto", clock.name):
      continue
    if reason := _unusable(clock, platform):
      notices.append(reason)
    else:
      # The first that is made for a platform is the best there.
      return clock._replace(notice=" ".join(notices) if clock.platforms is None else "")
  raise ClockError(f"{' '.join(notices)} Or pass clock='auto', which uses the best clock there is.")


def _unusable(clock: Clock, platform: str) -> str:
  if clock.platforms is not None and platform not in clock.platforms:
    return (f"The {clock.name} clock runs on {', '.join(clock.platforms)} only, and the step "
            f"runs on {platform}.")
  return clock.unavailable()


# What is made to wait for a timer.


def gate(clock: Clock, timestamp: jax.Array, values: Sequence[jax.Array]) -> list[jax.Array]:
  """Makes values available only once a timestamp has been taken.

  They are the same, bit for bit, and so are gradients. Real dataflow: on CPU an
  `optimization_barrier` orders nothing at run time. And opaque to XLA: a mere `where(stamp_high ==
  0xFFFFFFFF, 0, value)` would be fused into the kernels around it, where other multiplications and
  additions are then contracted, or other conversions elided, than without it.

  Hold what is in memory in any case (operands and results of collectives, inputs of the step): then
  the kernels before and after are the very same. Holding a value in the middle of a fused kernel
  cuts that kernel in two. The values get XLA's default layout: hold no transposed matrix.

  Args:
    timestamp: uint32 [2].
    values: any shapes and dtypes, PRNG keys included.

  Returns:
    The values, each varying over the timestamp's mesh axes too.
  """
  return _held(clock, timestamp, list(values))


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _held(clock: Clock, timestamp: jax.Array, values: list[jax.Array]) -> list[jax.Array]:
  axes = [varying(timestamp) | varying(value) for value in values]
  held = list(values)
  for kind in dict.fromkeys(axes):
    places = [i for i, own in enumerate(axes) if own == kind]
    data = [vary(operands.plain(values[i]), kind) for i in places]
    for place, value in zip(places, clock.gate(vary(timestamp, kind), data), strict=True):
      held[place] = _like(values[place], vary(value, kind))
  return held


@_held.defjvp
def _held_jvp(clock: Clock, primals: Any, tangents: Any) -> tuple[list[jax.Array], list[Any]]:
  """Holding back is the identity: so is its derivative, which waits for nothing."""
  held = _held(clock, *primals)
  slopes = [slope if slope.dtype == jax.dtypes.float0 else vary(slope, varying(value))
            for slope, value in zip(tangents[1], held, strict=True)]
  return held, slopes


def _like(value: jax.Array, data: jax.Array) -> jax.Array:
  """The data; a key of it, where `value` is one."""
  is_key = jax.dtypes.issubdtype(value.dtype, jax.dtypes.prng_key)
  return jax.random.wrap_key_data(data, impl=jax.random.key_impl(value)) if is_key else data
