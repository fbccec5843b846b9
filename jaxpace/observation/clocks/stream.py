"""A clock for NVIDIA GPUs: kernels of one thread on the stream read the device's timer and wait on
it.

Nothing goes to the host and back: the timestamps are kernels like any other, which XLA keeps in its
command buffers. Times are nanoseconds of the GPU's own timer (PTX ISA, `%globaltimer`), which
starts anywhere: only differences of timestamps of one GPU mean something.

The kernels are PTX, which XLA's custom call `__gpu$xla.gpu.ptx` takes as it is: no compiler, no
CUDA toolkit, no language for kernels between; see `jaxpace.observation.clocks.kernels`.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from jaxpace.observation.clocks import kernels, operands
from jaxpace.observation.clocks.operands import NOWHERE, Event

LONGEST_S = 2.0
"""No delay on the stream is longer: what holds up a GPU longer looks like a hang, to NCCL too."""

_MOST_OPERANDS = 256
"""Addresses given to one kernel: 2 of the 4 KiB of parameters that any GPU takes."""

_WORDS = jax.ShapeDtypeStruct((2,), jnp.uint32)

_STAMP = """
  .reg .u64 time, place;
  .reg .u32 low, high;
  mov.u64 time, %globaltimer;
  mov.b64 {{low, high}}, time;
  ld.param.u64 place, [p{taken}];
  st.global.u32 [place], high;
  st.global.u32 [place+4], low;
  ret;
"""

UNTIL = """
  mov.u64 now, %globaltimer;
  sub.u64 gone, now, start;
  setp.ge.u64 over, gone, wait;
  @over bra DONE;
  mov.u64 cycles, %clock64;
  sub.u64 cycles, cycles, first;
  setp.gt.u64 over, cycles, 10000000000;
  @over bra DONE;
"""
"""One look of a kernel that waits for `wait` nanoseconds since `start`."""

# A nap takes between nothing and twice what is asked for, so half of what is left never oversleeps;
# the hardware takes no more than a millisecond. Should the timer ever stand still, the count of
# cycles ends the loop: 5 s at 2 GHz, half a minute at the clock of an idle GPU.
_DELAY = """
  .reg .u64 start, now, gone, wait, left, place, first, cycles;
  .reg .u32 low, high, nap;
  .reg .f32 asked;
  .reg .pred some, over;
  mov.u64 start, %globaltimer;
  mov.u64 now, start;
  mov.u64 first, %clock64;
  ld.param.u64 place, [p{seconds}];
  ld.global.f32 asked, [place];
  setp.gt.f32 some, asked, 0f00000000;
  selp.f32 asked, asked, 0f00000000, some;
  mul.f32 asked, asked, {billion};
  min.f32 asked, asked, {limit};
  cvt.rpi.u64.f32 wait, asked;
  setp.eq.u64 over, wait, 0;
  @over bra DONE;
AGAIN:
""" + UNTIL + """
  sub.u64 left, wait, gone;
  shr.u64 left, left, 1;
  min.u64 left, left, 500000;
  cvt.u32.u64 nap, left;
  nanosleep.u32 nap;
  bra AGAIN;
DONE:
  ld.param.u64 place, [p{before}];
  mov.b64 {{low, high}}, start;
  st.global.u32 [place], high;
  st.global.u32 [place+4], low;
  ld.param.u64 place, [p{end}];
  mov.b64 {{low, high}}, now;
  st.global.u32 [place], high;
  st.global.u32 [place+4], low;
  ret;
"""


def unavailable() -> str:
  """Returns why the stream clock can't be used; empty where it can, or with the compiler alone."""
  try:
    jax.devices("rocm")
  except RuntimeError:
    return ""
  return "Timestamps for GPUs are written for NVIDIA's, and these are AMD's."


def place(_rank: jax.Array) -> jax.Array:
  """What a kernel must be given to know its device: that device's block."""
  call = jax.ffi.ffi_call(
      kernels.DEVICE_BUFFER, jax.ShapeDtypeStruct((kernels.BLOCK_WORDS,), jnp.uint32),
      vmap_method="sequential")
  return call()


def timestamp(previous: jax.Array, *after: jax.Array, event: Event = NOWHERE) -> jax.Array:
  """Reads the GPU's timer on the stream; see `jaxpace.observation.clocks.Clock`."""
  # In this order: see ORDER in jaxpace.observation.clocks.native.
  *ready, previous = operands.prepare((*after, previous))
  # More than one kernel takes: one comes after the other, and the last counts.
  for lot in _lots(ready) or [[]]:
    body = _STAMP.format(taken=len(lot) + 1)
    (previous,) = launch("jaxpace_stamp", body, [*lot, previous], [_WORDS])
  return _put(previous, previous[None], event, timed=True) if event.program else previous


def note(chain: jax.Array, numbers: jax.Array, event: Event) -> jax.Array:
  """Writes numbers to the ring on the stream; see `jaxpace.observation.clocks.Clock`."""
  return _put(chain, numbers, event, timed=False)


def _put(chain: jax.Array, numbers: jax.Array, event: Event, timed: bool) -> jax.Array:
  """Writes numbers to the ring; times of the GPU's timer as those of the host's clock."""
  assert event.place is not None
  given = operands.prepare((chain, numbers.reshape(-1, 2), event.place))
  body = kernels.put(event.program, event.tag, given[1].shape[0], timed)
  (held,) = launch("jaxpace_note", body, given, [_WORDS], {0: 0})
  return held


def delay(
    seconds: jax.Array, limit_s: float, previous: jax.Array, *after: jax.Array,
    events: tuple[Event, Event] = (NOWHERE, NOWHERE)
) -> tuple[jax.Array, jax.Array]:
  """Waits on the stream; see `jaxpace.observation.clocks.Clock`.

  Raises:
    ValueError: the limit is no delay, or longer than `LONGEST_S`.
  """
  limit_ns = operands.nanoseconds(limit_s)
  if limit_s > LONGEST_S:
    raise ValueError(f"The limit of a delay is {limit_s} s, and on a GPU's stream none may be "
                     f"longer than {LONGEST_S} s. Delays are a few milliseconds: 20 ms is 20e-3. "
                     "Or use clock='callback'.")
  *ready, seconds, previous = operands.prepare(
      (*after, jnp.asarray(seconds, jnp.float32), previous))
  if len(ready) > _MOST_OPERANDS:
    ready = [timestamp(previous, *ready)]
  given = [*ready, seconds, previous]
  body = _DELAY.format(seconds=len(ready), before=len(given), end=len(given) + 1,
                       billion=_single(1e9),
                       limit=_single(float(limit_ns)))
  before, end = launch("jaxpace_delay", body, given, [_WORDS, _WORDS])
  first, last = events
  if first.program:
    before = _put(before, before[None], first, timed=True)
    # After the first in the ring, too.
    (end,) = gate(before, [end])
    end = _put(end, end[None], last, timed=True)
  return before, end


def gate(timestamp: jax.Array, values: list[jax.Array]) -> list[jax.Array]:
  """Hands values through in their own memory, after the timestamp; see
  `jaxpace.observation.clocks.gate`."""
  return [held for lot in _lots(values) for held in launch(
      "jaxpace_hold", kernels.NOTHING, [*lot, timestamp],
      [jax.ShapeDtypeStruct(value.shape, value.dtype) for value in lot],
      {i: i for i in range(len(lot))})]


def launch(name: str, body: str, arguments: Sequence[jax.Array],
           results: Sequence[jax.ShapeDtypeStruct],
           aliases: dict[int, int] | None = None) -> list[jax.Array]:
  """Runs a kernel on arrays that stay where they are; see `kernels.kernel`.

  Args:
    body: PTX instructions. p0, p1, ... are the addresses of the arguments, then of the results.
    arguments: of any shape and dtype.
    results: their types.
    aliases: numbers of arguments and of the results that take their memory.
  """
  text = kernels.kernel(name, body, len(arguments) + len(results)).text
  call = jax.ffi.ffi_call(
      kernels.TARGET, list(results), vmap_method="sequential", input_output_aliases=aliases or {})
  return list(call(*arguments, name=name, kernel_type="ptx", kernel_data=text,
                   shared_mem_bytes=np.int32(0),
                   **dict.fromkeys(kernels.ONE_THREAD, np.int32(1))))


def _lots(arrays: Sequence[jax.Array]) -> list[list[jax.Array]]:
  return [list(arrays[i:i + _MOST_OPERANDS]) for i in range(0, len(arrays), _MOST_OPERANDS)]


def _single(value: float) -> str:
  """A float32 as PTX writes it."""
  return "0f" + struct.pack(">f", value).hex().upper()
