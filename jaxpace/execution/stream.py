"""A clock for NVIDIA GPUs: kernels of one warp on the stream read the device's timer and wait on it.

Nothing goes to the host and back: the stamps are kernels like any other, which XLA keeps in its command buffers. Times
are nanoseconds of the GPU's own timer (PTX ISA, `%globaltimer`), which starts anywhere: only differences of stamps of
one GPU mean something.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxpace.core.varying import unvarying
from jaxpace.execution import limits, operands

_MOST_OPERANDS = 256
"""Addresses given to one kernel: 2 of the 4 KiB of parameters that any GPU takes."""

LONGEST_S = 2.0
"""No delay on the stream is longer: what holds up a GPU for longer looks like a hang, to NCCL too."""

_HIGH, _LOW = "mov.u32 $0, %globaltimer_hi; // after $1", "mov.u32 $0, %globaltimer_lo; // after $1"

# $0: nanoseconds waited, $1: to wait, $2: low word of the start. A nap takes between nothing and twice what is asked
# for, so half of what is left never oversleeps; the hardware takes no more than a millisecond. Should the timer ever
# stand still, the count of cycles ends the loop: 5 s at 2 GHz, half a minute at the clock of an idle GPU.
_WAIT = """{
  .reg .u32 nap;
  .reg .u64 first, cycles;
  .reg .pred over;
  mov.u64 first, %clock64;
AGAIN:
  mov.u32 $0, %globaltimer_lo;
  sub.u32 $0, $0, $2;
  setp.ge.u32 over, $0, $1;
  @over bra DONE;
  mov.u64 cycles, %clock64;
  sub.u64 cycles, cycles, first;
  setp.gt.u64 over, cycles, 10000000000;
  @over bra DONE;
  sub.u32 nap, $1, $0;
  shr.u32 nap, nap, 1;
  min.u32 nap, nap, 500000;
  nanosleep.u32 nap;
  bra AGAIN;
DONE:
}"""


def unavailable() -> str:
  """Returns why the stream clock can't be used; empty where it can, or where only the compiler is there."""
  try:
    jax.devices("rocm")
  except RuntimeError:
    return ""
  return "The stream clock is written for NVIDIA GPUs, and these are AMD's."


def stamp(previous: jax.Array, *after: jax.Array) -> jax.Array:
  """Reads the GPU's timer on the stream; see `jaxpace.execution.Clock`."""
  *ready, previous = operands.prepare((*after, previous))  # in this order: see ORDER in jaxpace.execution.native

  def kernel(*refs: Any) -> None:
    *_, previous, taken = refs
    _write(taken, _now(_word(previous)))

  for lot in _lots(ready) or [[]]:  # more than one kernel takes: one comes after the other, and the last counts
    (previous,) = _call(kernel, "jaxpace_stamp", [*lot, previous], [_WORDS])
  return previous


def delay(
    seconds: jax.Array, limit_s: float, previous: jax.Array, *after: jax.Array
) -> tuple[jax.Array, jax.Array]:
  """Waits on the stream; see `jaxpace.execution.Clock`.

  Raises:
    ValueError: the limit is no delay, or longer than `LONGEST_S`.
  """
  limit_ns = limits.nanoseconds(limit_s)
  if limit_s > LONGEST_S:
    raise ValueError(f"The limit of a delay is {limit_s} s, and on a GPU's stream none may be longer than {LONGEST_S} "
                     "s. Delays are a few milliseconds: 20 ms is 20e-3. Or use clock='callback'.")
  seconds = jnp.asarray(seconds, jnp.float32).reshape((1,))
  *ready, seconds, previous = operands.prepare((*after, seconds, previous))
  if len(ready) > _MOST_OPERANDS:
    ready = [stamp(previous, *ready)]

  def kernel(*refs: Any) -> None:
    *_, seconds, previous, before, end = refs
    start = _now(_word(previous))
    asked = seconds[_first()]
    asked = jnp.where(asked > 0.0, asked, 0.0)  # false for NaN
    wait = jnp.ceil(jnp.minimum(asked * np.float32(1e9), np.float32(limit_ns))).astype(jnp.int32)
    waited = _assembly(_WAIT, "=&r,r,r", wait, start[1])
    later = _now(waited)
    _write(before, start)
    _write(end, (jnp.where(wait > 0, later[0], start[0]), jnp.where(wait > 0, later[1], start[1])))

  before, end = _call(kernel, "jaxpace_delay", [*ready, seconds, previous], [_WORDS, _WORDS])
  return before, end


def hold(stamp: jax.Array, values: list[jax.Array]) -> list[jax.Array]:
  """Hands values through in their own memory, after the stamp; see `jaxpace.execution.hold`."""
  return [held for lot in _lots(values)
          for held in _call(lambda *_: None, "jaxpace_hold", [*lot, stamp], lot, {i: i for i in range(len(lot))})]


_WORDS = jax.ShapeDtypeStruct((2,), jnp.uint32)


def _lots(arrays: Sequence[jax.Array]) -> list[list[jax.Array]]:
  return [list(arrays[i:i + _MOST_OPERANDS]) for i in range(0, len(arrays), _MOST_OPERANDS)]


def _first() -> Any:
  from jax.experimental import pallas

  return pallas.ds(0, 1)


def _word(words: Any) -> jax.Array:
  """The first word of a timestamp, for what comes next to depend on: [1] int32."""
  return words[_first()].astype(jnp.int32)


def _now(after: jax.Array) -> tuple[jax.Array, jax.Array]:
  """(high, low) words of the timer, [1] int32 each, read when `after` is there.

  Three reads: Pallas knows no assembly of two results, and the low word may come round in between.
  """
  first = _assembly(_HIGH, "=r,r", after)
  low = _assembly(_LOW, "=r,r", first)
  high = _assembly(_HIGH, "=r,r", low)
  return high, jnp.where(first == high, low, jnp.int32(0))


def _write(words: Any, value: tuple[jax.Array, jax.Array]) -> None:
  from jax.experimental import pallas

  for place, word in enumerate(value):
    words[pallas.ds(place, 1)] = word.astype(jnp.uint32)


def _assembly(text: str, constraints: str, *arguments: jax.Array) -> jax.Array:
  """Runs PTX. It is taken to be without effect, so what must stay in order has to depend on what it follows."""
  from jax.experimental.pallas import triton

  # uint32 would be right, but of that Pallas makes a type that Triton refuses.
  (result,) = triton.elementwise_inline_asm(
      text, args=arguments, constraints=constraints, pack=1,
      result_shape_dtypes=[jax.ShapeDtypeStruct((1,), jnp.int32)])
  return result


def _call(kernel: Any, name: str, arguments: Sequence[jax.Array], results: Sequence[Any],
          aliases: dict[int, int] | None = None) -> list[jax.Array]:
  """Runs a kernel of one warp on arrays that stay where they are."""
  from jax.experimental import pallas
  from jax.experimental.pallas import triton

  anywhere = pallas.BlockSpec(memory_space=pallas.ANY)
  return list(pallas.pallas_call(
      kernel, name=name, in_specs=[anywhere] * len(arguments), out_specs=[anywhere] * len(results),
      out_shape=[unvarying(result.shape, result.dtype) for result in results],
      input_output_aliases=aliases or {}, compiler_params=triton.CompilerParams(num_warps=1, num_stages=1))(*arguments))
