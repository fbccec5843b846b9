"""Clocks that run inside a compiled step, and the choice among them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import jax

from jaxpace.observation.clocks import callback, native, stream
from jaxpace.observation.clocks.events import Event


class TimestampCall(Protocol):
  def __call__(self, previous: jax.Array, *after: jax.Array, event: Event | None = None
               ) -> jax.Array: ...


class Delay(Protocol):
  def __call__(
      self, seconds: jax.Array, limit_s: float, previous: jax.Array, *after: jax.Array,
      events: tuple[Event, Event] | None = None
  ) -> tuple[jax.Array, jax.Array]: ...


class Note(Protocol):
  def __call__(self, chain: jax.Array, numbers: jax.Array, event: Event) -> jax.Array: ...


class GateCall(Protocol):
  def __call__(self, timestamp: jax.Array, values: list[jax.Array]) -> list[jax.Array]: ...


class Clock(NamedTuple):
  """A clock usable under `jax.jit`, `jax.shard_map` (either `check_vma`) and `jax.pmap`.

  A timestamp has no side effect that orders it: it is taken because its result is used, after
  everything it is given, and two timestamps stay distinct and ordered because each is given the one
  before. What comes *after* a timestamp in time must use its result
  (`jaxpace.observation.clocks.gate`).

  Under `check_vma=True` timestamps are typed as if they were the same on every device. They are
  not; but so they can hold back a parameter, which must not vary. Where a timestamp leaves the
  step, `jaxpace.core.varying.vary` gives it its axes.

  Attributes:
    name: "native", "stream" or "callback".
    timestamp: `timestamp(previous, *after, event=None)` -> uint32 [2], (high, low) words of
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
    place: `place(rank)` -> what the clock must be given in `Events.place`, of the place of its
      device in the pace state; None where it needs nothing.
    gate: `gate(timestamp, values)` -> the values, once the timestamp is there; all varying over the
      same mesh axes. Use `jaxpace.observation.clocks.gate`, which sees to that.
    notice: why a better clock is not used; empty where there is none better.
    awaited_under_pmap: `awaited_under_pmap(results)` -> those results of a step under `jax.pmap`
      that its last timestamp can wait for without a change in how they are computed.
    in_stream: whether what a timestamp waits for is best given whole, and costs nothing: kernels
      that run one after the other are given addresses, and to cut an element out would be one more
      kernel.
  """

  name: str
  timestamp: TimestampCall
  delay: Delay
  gate: GateCall
  note: Note
  place: Callable[[jax.Array], jax.Array | None]
  notice: str = ""
  awaited_under_pmap: Callable[[Sequence[jax.Array]], list[jax.Array]] = list
  in_stream: bool = False


class _ClockKind(NamedTuple):
  """A kind of clock: where it runs, and why it can't at the moment."""

  name: str
  platforms: tuple[str, ...] | None  # None: all
  unavailable: Callable[[], str]  # empty where it is available; registers what the clock needs
  timestamp: TimestampCall
  delay: Delay
  gate: GateCall
  note: Note
  place: Callable[[jax.Array], jax.Array | None]
  awaited_under_pmap: Callable[[Sequence[jax.Array]], list[jax.Array]] = list
  in_stream: bool = False
  tried: bool = True  # on real devices; "auto" takes no other


# Best first.
_SOURCES = (
    _ClockKind("native", ("cpu",), native.unavailable, native.timestamp, native.delay, native.gate,
               native.note, native.place),
    _ClockKind("stream", ("gpu", "cuda"), stream.unavailable, stream.timestamp, stream.delay,
               stream.gate, stream.note, stream.place, in_stream=True, tried=False),
    _ClockKind("callback", None, lambda: "", callback.timestamp, callback.delay, callback.gate,
               callback.note, callback.place, callback.awaited_under_pmap),
)

CLOCKS = ("auto", *(source.name for source in _SOURCES))
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
  for source in _SOURCES:
    if name not in ("auto", source.name):
      continue
    if reason := _unusable(source, platform):
      if name == source.name or source.tried:
        notices.append(reason)
    elif name == "auto" and not source.tried:
      notices.append(f"The {source.name} clock (clock={source.name!r}) has not been tried on such "
                     "a device yet.")
    else:
      return Clock(source.name, source.timestamp, source.delay, source.gate, source.note,
                   source.place, " ".join(notices), source.awaited_under_pmap, source.in_stream)
  raise ClockError(f"{' '.join(notices)} Or pass clock='auto', which uses the best clock there is.")


def clock_notice(platform: str = "cpu") -> str:
  """Returns why "auto" does not use the native clock on `platform`; empty where it does."""
  return resolve_clock("auto", platform).notice


def _unusable(source: _ClockKind, platform: str) -> str:
  if source.platforms is not None and platform not in source.platforms:
    return (f"The {source.name} clock runs on {', '.join(source.platforms)} only, and the step "
            f"runs on {platform}.")
  return source.unavailable()
