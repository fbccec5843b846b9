"""A kernel of known length: it spins on the GPU's timer, and what it is given is there again only when it is done."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxpace.execution import Clock, hold, words

# $0: nanoseconds spun, $1: to spin. The count of cycles ends the loop should the timer stand still: 5 s at 2 GHz.
_SPIN = """{
  .reg .u32 start;
  .reg .u64 first, cycles;
  .reg .pred over;
  mov.u64 first, %clock64;
  mov.u32 start, %globaltimer_lo;
AGAIN:
  mov.u32 $0, %globaltimer_lo;
  sub.u32 $0, $0, start;
  setp.ge.u32 over, $0, $1;
  @over bra DONE;
  mov.u64 cycles, %clock64;
  sub.u64 cycles, cycles, first;
  setp.gt.u64 over, cycles, 10000000000;
  @over bra DONE;
  bra AGAIN;
DONE:
}"""


def spin(x: jax.Array, nanoseconds: jax.Array, *after: jax.Array) -> jax.Array:
  """Occupies the stream for as long, by the GPU's timer, and hands x through in its own memory.

  Args:
    x: any shape.
    nanoseconds: [] int32.
    after: what it begins after; not read. In a command buffer what depends on nothing may run beside it.
  """
  from jax.experimental import pallas
  from jax.experimental.pallas import triton

  def kernel(_: Any, asked: Any, *others: Any) -> None:
    spun = others[-1]
    first = pallas.ds(0, 1)
    (took,) = triton.elementwise_inline_asm(
        _SPIN, args=[asked[first]], constraints="=&r,r", pack=1,
        result_shape_dtypes=[jax.ShapeDtypeStruct((1,), jnp.int32)])
    spun[first] = took

  anywhere = pallas.BlockSpec(memory_space=pallas.ANY)
  through, _ = pallas.pallas_call(
      kernel, name="check_spin", in_specs=[anywhere] * (2 + len(after)), out_specs=[anywhere] * 2,
      out_shape=[jax.ShapeDtypeStruct(x.shape, x.dtype), jax.ShapeDtypeStruct((1,), jnp.int32)],
      input_output_aliases={0: 0}, compiler_params=triton.CompilerParams(num_warps=1, num_stages=1))(
          x, jnp.asarray(nanoseconds, jnp.int32).reshape((1,)), *after)
  result: jax.Array = through
  return result


def busy(clock: Clock, platform: str, x: jax.Array, nanoseconds: jax.Array, *after: jax.Array) -> jax.Array:
  """`spin` on a GPU; elsewhere the clock's own delay, so that a section can be tried without one."""
  if platform != "cpu":
    return spin(x, nanoseconds, *after)
  _, after = clock.delay(nanoseconds.astype(jnp.float32) * np.float32(1e-9), 1.0, words.zero(), x, *after)
  return hold(clock, after, [x])[0]
