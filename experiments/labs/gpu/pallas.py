"""The same stamp and delay in Pallas, lowered by Triton, measured beside jaxpace's own kernels.

Newer versions of JAX say that Pallas's Triton is to go, which is why jaxpace hands PTX to XLA
instead. Two workarounds here: Pallas knows no assembly of two results, nor, in what Triton takes,
of unsigned ones.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from experiments.labs.gpu.bench import Bench
from experiments.labs.gpu.beside import measure
from jaxpace.execution import limits

_WORDS = jax.ShapeDtypeStruct((2,), jnp.uint32)
_HIGH, _LOW = "mov.u32 $0, %globaltimer_hi; // after $1", "mov.u32 $0, %globaltimer_lo; // after $1"

# $0: nanoseconds waited, $1: to wait, $2: low word of the start.
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


class Kernels:
  """Stamp and delay with the signatures of a `jaxpace.execution.Clock`."""

  def stamp(self, previous: jax.Array, *after: jax.Array) -> jax.Array:
    def kernel(*refs: Any) -> None:
      *_, previous, taken = refs
      _write(taken, _now(previous[_first()].astype(jnp.int32)))

    return _call(kernel, "check_pallas_stamp", [*after, previous], 1)[0]

  def delay(self, seconds: jax.Array, limit_s: float, previous: jax.Array, *after: jax.Array
            ) -> tuple[jax.Array, jax.Array]:
    limit_ns = limits.nanoseconds(limit_s)

    def kernel(*refs: Any) -> None:
      *_, seconds, previous, before, end = refs
      start = _now(previous[_first()].astype(jnp.int32))
      asked = seconds[_first()]
      asked = jnp.where(asked > 0.0, asked, 0.0)  # false for NaN
      wait = jnp.ceil(jnp.minimum(asked * np.float32(1e9), np.float32(limit_ns))).astype(jnp.int32)
      later = _now(_assembly(_WAIT, "=&r,r,r", wait, start[1]))
      _write(before, start)
      _write(end, (jnp.where(wait > 0, later[0], start[0]),
                   jnp.where(wait > 0, later[1], start[1])))

    before, end = _call(kernel, "check_pallas_delay", [*after, seconds.reshape((1,)), previous], 2)
    return before, end


def run(bench: Bench) -> None:
  """Section pallas."""
  if bench.platform == "cpu":
    bench.note("Triton is for GPUs.")
    return
  measure(bench, Kernels(), "Pallas")


def _first() -> Any:
  from jax.experimental import pallas

  return pallas.ds(0, 1)


def _now(after: jax.Array) -> tuple[jax.Array, jax.Array]:
  """(high, low) words of the timer, [1] int32 each, in three reads: the low word may come round in
  between."""
  first = _assembly(_HIGH, "=r,r", after)
  low = _assembly(_LOW, "=r,r", first)
  high = _assembly(_HIGH, "=r,r", low)
  return high, jnp.where(first == high, low, jnp.int32(0))


def _write(words: Any, value: tuple[jax.Array, jax.Array]) -> None:
  from jax.experimental import pallas

  for place, word in enumerate(value):
    words[pallas.ds(place, 1)] = word.astype(jnp.uint32)


def _assembly(text: str, constraints: str, *arguments: jax.Array) -> jax.Array:
  """Runs PTX. It is taken to be without effect, so what must stay in order has to depend on what it
  follows."""
  from jax.experimental.pallas import triton

  (result,) = triton.elementwise_inline_asm(
      text, args=arguments, constraints=constraints, pack=1,
      result_shape_dtypes=[jax.ShapeDtypeStruct((1,), jnp.int32)])
  return result


def _call(kernel: Any, name: str, arguments: Sequence[jax.Array], results: int) -> list[jax.Array]:
  from jax.experimental import pallas
  from jax.experimental.pallas import triton

  anywhere = pallas.BlockSpec(memory_space=pallas.ANY)
  with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)
    return list(pallas.pallas_call(
        kernel, name=name, in_specs=[anywhere] * len(arguments), out_specs=[anywhere] * results,
        out_shape=[_WORDS] * results,
        compiler_params=triton.CompilerParams(num_warps=1, num_stages=1))(*arguments))
