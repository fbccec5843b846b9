"""The ranks' arrivals and applied delays, carried inside the all-reduce that is there anyway.

Each rank adds its own numbers at its own place of a vector of zeros; the sum is everyone's. The
vector is an operand of its own of the gradient all-reduce, with the dtype and axes of the operands
it joins: anything else would make XLA send a second message or change how gradients are combined.
"""

from __future__ import annotations

import dataclasses
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxpace.core import pacing
from jaxpace.core.types import Pacer
from jaxpace.observation.clocks import Clock

UNKNOWN = -1.0
"""Stands for an arrival that is not known (a rank's first step); NaN would spread to every rank."""

_NONE = -1e6
"""Stands for an unknown time where times are added up: the sum, and so the average, is negative."""

_PARTS = {"float32": 1, "float64": 1, "bfloat16": 3}
"""Numbers of a dtype that carry one float32 exactly: 24 bits of mantissa, 8 in each bfloat16."""


Share = Literal["auto"] | bool | None
"""What a user asks for."""


@dataclasses.dataclass(frozen=True)
class Carrier:
  """The all-reduce in which an operand of ours rides."""

  slot: int
  dtype: str
  axes: tuple[str, ...]


def carries(dtype: str) -> bool:
  """Whether times can be written in numbers of a type."""
  return dtype in _PARTS


def refusal(carrier: Carrier | None, axis: tuple[str, ...]) -> str:
  """Why arrivals can't ride in this all-reduce; empty if they can."""
  if carrier is None:
    return "no sum over the data axis that an operand could join"
  if not carries(carrier.dtype):
    return f"the all-reduce is of {carrier.dtype}, which can't carry times"
  if set(carrier.axes) != set(axis):
    return f"the all-reduce is over {', '.join(carrier.axes)}, not over {', '.join(axis)} alone"
  return ""


def chosen(wanted: Share, carrier: Carrier | None, clock: Clock, pacer: Pacer | None,
           axis: tuple[str, ...], platform: str) -> tuple[Carrier | None, str]:
  """Chooses the all-reduce that carries, or none, and says why in a few words."""
  if not wanted:
    return None, "not shared: share=None"
  why = refusal(carrier, axis)
  if why or carrier is None:
    return None, f"not shared: {why}"
  if wanted == "auto" and pacer is None and clock.in_stream:
    return None, ("not shared: no pacer would see it, and it would be some kernels more "
                  "(share=True shares)")
  processes = jax.process_count()
  # All ranks must hold alike.
  needed = pacer is not None and pacer.hold is not None
  if wanted == "auto" and not needed and platform == "cpu" and processes > 2:
    # gloo sends every operand in turn: one more operand is one more round of messages.
    return None, (f"not shared: gloo would send {processes} processes one more message a step "
                   "(share=True shares)")
  return carrier, f"shared in the all-reduce of collective {carrier.slot}"


def operand(arrival: jax.Array, delay: jax.Array, job: jax.Array, index: jax.Array, ranks: int,
            dtype: str, digest: jax.Array | None = None) -> jax.Array:
  """Packs one rank's numbers.

  Args:
    arrival: [] float32 seconds, NaN if unknown.
    delay: [] float32 seconds applied.
    job: [1 + n] float32 seconds, or [0]: own step time, of which rank 0's is sent; times of
      collectives, which are averaged: those of the step before, then this step's waits. NaN if
      unknown.
    index: [] int32, this rank's index along the axis.
    ranks: ranks along the axis.
    dtype: of the all-reduce.
    digest: [] float32, a whole number below 2**24 that is compared; None where none is.

  Returns:
    [parts * (2 * ranks + len(job))] of `dtype`, or 3 * ranks with a digest: zero but at this
    rank's places and in what is added up.
  """
  known = jnp.where(jnp.isnan(arrival), jnp.float32(UNKNOWN), arrival)
  own = jnp.stack([known, delay, *(() if digest is None else (digest,))])
  mine = jnp.arange(ranks, dtype=jnp.int32) == index
  values = jnp.where(mine[None, :], own[:, None], jnp.float32(0)).reshape(-1)
  if job.shape[0]:
    weight = jnp.full(job.shape, 1 / ranks, jnp.float32).at[0].set((index == 0).astype(jnp.float32))
    values = jnp.concatenate([values, jnp.where(jnp.isnan(job), jnp.float32(_NONE), job) * weight])
  return jnp.concatenate(_split(values, dtype))


class PiggybackSum(NamedTuple):
  """What the sum says."""

  arrivals: jax.Array  # [ranks] float32 s, NaN where unknown
  delays: jax.Array  # [ranks] float32 s
  alike: pacing.Shared  # in bfloat16 averages are good to some 0.4 %
  digests: jax.Array | None  # [ranks] float32


def unpack(total: jax.Array, ranks: int, dtype: str, collectives: int, slots: int,
           digested: bool = False) -> PiggybackSum:
  """Reads the sum of the ranks' operands, of a step with so many collectives that have a slot."""
  values = total.reshape(_PARTS[dtype], -1).astype(jnp.float32).sum(axis=0)
  arrivals, delays = values[:ranks], values[ranks:2 * ranks]
  job = values[(3 if digested else 2) * ranks:]
  arrivals, job = (jnp.where(each < jnp.float32(0), jnp.float32(np.nan), each)
                   for each in (arrivals, job))
  before = 1 + collectives
  alike = pacing.nothing_shared(slots) if not job.shape[0] else pacing.Shared(
      job[0], pacing.by_slot(job[1:before], slots), pacing.by_slot(job[before:], slots))
  return PiggybackSum(arrivals, delays, alike, values[2 * ranks:3 * ranks] if digested else None)


def _split(values: jax.Array, dtype: str) -> list[jax.Array]:
  if _PARTS[dtype] == 1:
    return [values.astype(dtype)]
  parts, rest = [], values
  for _ in range(_PARTS[dtype]):
    # Cut bits off instead of converting there and back: XLA may elide such a pair of conversions.
    bits = jax.lax.bitcast_convert_type(rest, jnp.uint32) & jnp.uint32(0xFFFF0000)
    part = jax.lax.bitcast_convert_type(bits, jnp.float32)
    parts.append(part.astype(dtype))
    rest = rest - part
  return parts
