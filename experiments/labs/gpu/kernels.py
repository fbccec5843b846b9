"""A kernel of known length: it spins on the GPU's timer, and what it is given is there again only
when it is done."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from jaxpace.observation.clocks import Clock, gate, stream, words

_SPIN = f"""
  .reg .u64 start, now, gone, wait, place, first, cycles;
  .reg .u32 few;
  .reg .pred over;
  mov.u64 start, %globaltimer;
  mov.u64 first, %clock64;
  ld.param.u64 place, [p1];
  ld.global.u32 few, [place];
  cvt.u64.u32 wait, few;
AGAIN:
{stream.UNTIL}
  bra AGAIN;
DONE:
  ret;
"""


def spin(x: jax.Array, nanoseconds: jax.Array, *after: jax.Array) -> jax.Array:
  """Occupies the stream for as long, by the GPU's timer, and hands x through in its own memory.

  Args:
    x: any shape.
    nanoseconds: [] int32.
    after: what it begins after; not read. In a command buffer what depends on nothing may run
      beside it.
  """
  (through,) = stream.launch("check_spin", _SPIN, [x, jnp.asarray(nanoseconds, jnp.int32), *after],
                             [jax.ShapeDtypeStruct(x.shape, x.dtype)], {0: 0})
  return through


def busy(clock: Clock, platform: str, x: jax.Array, nanoseconds: jax.Array,
         *after: jax.Array) -> jax.Array:
  """`spin` on a GPU; elsewhere the clock's own delay, so that a section can be tried without
  one."""
  if platform != "cpu":
    return spin(x, nanoseconds, *after)
  _, after = clock.delay(nanoseconds.astype(jnp.float32) * np.float32(1e-9), 1.0, words.zero(), x,
                         *after)
  return gate(clock, after, [x])[0]
