"""The same stamp and delay as PTX handed to XLA as it is, by `jax.ffi.ffi_call`: no Triton, no CUDA compiler.

XLA's target `__gpu$xla.gpu.ptx` takes a kernel's text and its launch dimensions; the arguments are pointers to the
operands, then to the results. It is XLA's own, not a documented part of JAX: measured beside, used by nothing.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from experiments.gpu.bench import Bench
from experiments.gpu.beside import measure
from jaxpace.execution import limits

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

# Naps of half of what is left; the count of cycles ends it should the timer stand still.
_DELAY = """
  .reg .u64 start, now, gone, wait, left, place, first, cycles;
  .reg .u32 low, high, nap;
  .reg .f32 asked;
  .reg .pred some, over;
  mov.u64 start, %globaltimer;
  mov.u64 now, start;
  mov.u64 first, %clock64;
  ld.param.u64 place, [p1];
  ld.global.f32 asked, [place];
  setp.gt.f32 some, asked, 0f00000000;
  mul.f32 asked, asked, {billion};
  min.f32 asked, asked, {limit};
  cvt.rpi.u64.f32 wait, asked;
  @!some bra DONE;
AGAIN:
  mov.u64 now, %globaltimer;
  sub.u64 gone, now, start;
  setp.ge.u64 over, gone, wait;
  @over bra DONE;
  mov.u64 cycles, %clock64;
  sub.u64 cycles, cycles, first;
  setp.gt.u64 over, cycles, 10000000000;
  @over bra DONE;
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


def text(name: str, parameters: int, body: str) -> str:
  """A kernel's PTX: `parameters` pointers p0, p1, ..."""
  listed = ", ".join(f".param .u64 p{i}" for i in range(parameters))
  return f".version 7.0\n.target sm_70\n.address_size 64\n.visible .entry {name}({listed})\n{{{body}}}\n"


def stamp_text(operands: int) -> str:
  return text("check_ptx_stamp", operands + 1, _STAMP.format(taken=operands))


def delay_text(operands: int, limit_ns: int) -> str:
  return text("check_ptx_delay", operands + 2, _DELAY.format(
      before=operands, end=operands + 1, billion=_single(1e9), limit=_single(float(limit_ns))))


def _single(value: float) -> str:
  """A float32 as PTX writes it."""
  return "0f" + struct.pack(">f", value).hex().upper()


class Kernels:
  """Stamp and delay with the signatures of a `jaxpace.execution.Clock`."""

  def stamp(self, previous: jax.Array, *after: jax.Array) -> jax.Array:
    result: jax.Array = _call("check_ptx_stamp", stamp_text(1 + len(after)), _WORDS)(previous, *after)
    return result

  def delay(self, seconds: jax.Array, limit_s: float, previous: jax.Array, *after: jax.Array
            ) -> tuple[jax.Array, jax.Array]:
    kernel = delay_text(2 + len(after), limits.nanoseconds(limit_s))
    before, end = _call("check_ptx_delay", kernel, (_WORDS, _WORDS))(previous, seconds, *after)
    return before, end


def _call(name: str, kernel: str, results: Any) -> Callable[..., Any]:
  one = dict.fromkeys(("grid_x", "grid_y", "grid_z", "block_x", "block_y", "block_z"), np.int32(1))
  call = jax.ffi.ffi_call("__gpu$xla.gpu.ptx", results)
  return lambda *operands: call(*operands, name=name, kernel_type="ptx", kernel_data=kernel,
                                shared_mem_bytes=np.int32(0), **one)


def run(bench: Bench) -> None:
  """Section ptx."""
  if bench.platform == "cpu":
    bench.note("PTX is for GPUs.")
    return
  measure(bench, Kernels(), "PTX handed to XLA")
