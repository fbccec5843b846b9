"""The native CPU clock, of XLA FFI handlers in C++: under a microsecond a timestamp.

Dispatch stays asynchronous.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from jaxpace.observation.clocks import operands
from jaxpace.observation.clocks.native.library import DELAY, HOLD, NOTE, STAMP, unavailable
from jaxpace.observation.clocks.operands import NOWHERE, Event

__all__ = ["delay", "gate", "note", "place", "timestamp", "unavailable"]

_WORDS = jax.ShapeDtypeStruct((2,), jnp.uint32)

# No `has_side_effect`: with it, dispatch waits for the step.
#
# ORDER. XLA combines all-reduces in the order in which it meets them, walking from the step's
# results through operands, first to last. What the step itself computes comes first among the
# operands here, the chain of timestamps last: so XLA meets the step's own collectives in the order
# it would without the timestamps. The last timestamp is the first result and has the entry
# timestamps as its first operands, so that all that one of them waits for is met before what
# follows: else XLA combines all-reduces of one collective with those of a later one, and some start
# before their timestamp.


def place(_rank: jax.Array) -> None:
  """What a handler must be given to know its device: nothing."""


def timestamp(previous: jax.Array, *after: jax.Array, event: Event = NOWHERE) -> jax.Array:
  """Reads the clock in an XLA FFI handler; see `jaxpace.observation.clocks.Clock`."""
  # In this order: see ORDER.
  arguments = operands.prepare((*after, previous))
  call = jax.ffi.ffi_call(STAMP, _WORDS, vmap_method="sequential")
  return call(*arguments, program=np.int32(event.program), tag=np.int32(event.tag))


def delay(
    seconds: jax.Array, limit_s: float, previous: jax.Array, *after: jax.Array,
    events: tuple[Event, Event] = (NOWHERE, NOWHERE)
) -> tuple[jax.Array, jax.Array]:
  """Sleeps in an XLA FFI handler; see `jaxpace.observation.clocks.Clock`."""
  limit_ns = np.int64(operands.nanoseconds(limit_s))
  arguments = operands.prepare((previous, jnp.asarray(seconds, jnp.float32), *after))
  call = jax.ffi.ffi_call(DELAY, (_WORDS, _WORDS), vmap_method="sequential")
  first, last = events
  before, end = call(*arguments, limit_ns=limit_ns, program=np.int32(first.program),
                     tag=np.int32(first.tag), end_tag=np.int32(last.tag))
  return before, end


def note(chain: jax.Array, numbers: jax.Array, event: Event) -> jax.Array:
  """Writes numbers to the ring in an XLA FFI handler; see `jaxpace.observation.clocks.Clock`."""
  given = operands.prepare((chain, numbers))
  call = jax.ffi.ffi_call(NOTE, _WORDS, vmap_method="sequential", input_output_aliases={0: 0})
  return call(*given, program=np.int32(event.program), tag=np.int32(event.tag))


def gate(timestamp: jax.Array, values: list[jax.Array]) -> list[jax.Array]:
  """Hands values through in their own memory, after the timestamp; see
  `jaxpace.observation.clocks.gate`."""
  call = jax.ffi.ffi_call(
      HOLD, [jax.ShapeDtypeStruct(value.shape, value.dtype) for value in values],
      vmap_method="sequential",
      input_output_aliases={i: i for i in range(len(values))})
  # In this order: see ORDER.
  return list(call(*values, timestamp))
