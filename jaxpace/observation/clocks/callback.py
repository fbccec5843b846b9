"""The portable clock: host callbacks.

Tens of microseconds a timestamp, and dispatch becomes synchronous.
"""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import io_callback

from jaxpace.core.varying import vary, varying
from jaxpace.observation.clocks import host_ring, operands, words
from jaxpace.observation.clocks.operands import NOWHERE, Event

_WORDS = jax.ShapeDtypeStruct((2,), jnp.uint32)
SENT_WHOLE = 64
"""Arrays of at most this many elements are sent whole."""


def place(rank: jax.Array) -> jax.Array:
  """What a callback must be given to know its device: the place of that in the pace state."""
  return rank


def timestamp(previous: jax.Array, *after: jax.Array, event: Event = NOWHERE) -> jax.Array:
  """Reads the clock on the host; see `jaxpace.observation.clocks.Clock`."""
  *ready, previous = operands.prepare((*after, previous))
  given = operands.prepare((*_whose(event), *_sentinels(previous, ready), previous))
  return io_callback(functools.partial(_read, event.program, event.tag), _WORDS, *given)


def delay(
    seconds: jax.Array, limit_s: float, previous: jax.Array, *after: jax.Array,
    events: tuple[Event, Event] = (NOWHERE, NOWHERE)
) -> tuple[jax.Array, jax.Array]:
  """Sleeps in a host callback; see `jaxpace.observation.clocks.Clock`."""
  limit_ns = operands.nanoseconds(limit_s)
  first, last = events
  before = timestamp(previous, *after, seconds, event=first)
  seconds = jax.lax.stop_gradient(jnp.asarray(seconds, jnp.float32))

  def sleep(seconds, before):
    asked = operands.prepare((seconds, before, *_whose(last)))
    return io_callback(functools.partial(_sleep, limit_ns, last.program, last.tag), _WORDS, *asked)

  # A callback that would sleep 0 s still costs milliseconds. NaN > 0 is false.
  end = jax.lax.cond(
      seconds > jnp.float32(0.0), sleep, lambda _, before: before, seconds, before)
  return before, end


def note(chain: jax.Array, numbers: jax.Array, event: Event) -> jax.Array:
  """Writes numbers to the ring in a host callback; see `jaxpace.observation.clocks.Clock`."""
  given = operands.prepare((*_whose(event), numbers, chain))
  return io_callback(functools.partial(_note, event.program, event.tag), _WORDS, *given)


def _whose(event: Event) -> list[jax.Array]:
  return [] if event.place is None else [event.place]


def gate(timestamp: jax.Array, values: list[jax.Array]) -> list[jax.Array]:
  """Hands values through a loop that never turns, after the timestamp; see
  `jaxpace.observation.clocks.gate`.

  No callback: that would copy the values to the host and back. XLA can't tell that the loop never
  turns.
  """
  never = timestamp[0] == jnp.uint32(0xFFFFFFFF)

  def turn(carry):
    values, turning = carry
    zeros = [vary(jnp.zeros_like(value), varying(timestamp)) for value in values]
    return zeros, jnp.logical_not(turning)

  return jax.lax.while_loop(lambda carry: carry[1], turn, (values, never))[0]


def awaited_under_pmap(results: Sequence[jax.Array]) -> list[jax.Array]:
  """The small ones, or the smallest.

  No large array can be sent whole, and there a single element of one would cut the kernel that
  makes it anew.
  """
  return [v for v in results if v.size <= SENT_WHOLE] or sorted(results, key=lambda v: v.size)[:1]


def _sentinels(previous: jax.Array, after: list[jax.Array]) -> list[jax.Array]:
  """Returns a few elements of every array, that are ready only when the arrays are.

  Whole arrays would be copied to the host, so large ones send one element. A bare slice is not
  enough for that: XLA may fuse it into what computes the array and compute that element alone,
  early. The operands of a conditional are whole.
  """
  small = [array for array in after if array.size <= SENT_WHOLE]
  large = [array for array in after if array.size > SENT_WHOLE]
  if large:
    never = previous[0] == jnp.uint32(0xFFFFFFFF)
    small += jax.lax.cond(never, _last_elements, _first_elements, *large)
  return small


def _first_elements(*arrays: jax.Array) -> list[jax.Array]:
  return [array.reshape(-1)[:1] for array in arrays]


def _last_elements(*arrays: jax.Array) -> list[jax.Array]:
  return [array.reshape(-1)[-1:] for array in arrays]


# Below runs on the host, in a thread of the runtime. Its arguments are small host arrays; it must
# start no JAX operation, which could wait for the very thread it runs in.


def _read(program: int, tag: int, place: Any = None, *_: Any) -> np.ndarray:
  now = time.monotonic_ns()
  if program:
    host_ring.record(program, int(place), tag, now)
  return words.from_ns(now)


def _note(program: int, tag: int, place: Any, numbers: Any, chain: Any) -> np.ndarray:
  for offset, number in enumerate(words.to_ns(np.asarray(numbers).reshape(-1, 2)).tolist()):
    host_ring.record(program, int(place), tag + offset, number)
  return np.array(chain)


def _sleep(limit_ns: int, program: int, tag: int, seconds: Any, before: Any, place: Any = None
           ) -> np.ndarray:
  wanted = min(float(np.asarray(seconds)) * 1e9, float(limit_ns))
  deadline = int(words.to_ns(np.asarray(before))) + math.ceil(wanted)
  while (left := deadline - time.monotonic_ns()) > 0:
    time.sleep(left * 1e-9)
  return _read(program, tag, place)
