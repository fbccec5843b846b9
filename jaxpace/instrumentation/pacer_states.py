"""The pacer's own state in a pace state, where it is one vector: taken out, and put back in."""

from __future__ import annotations

import functools

import jax
import numpy as np

from jaxpace.core import own_context, packing
from jaxpace.core.pace import PaceState
from jaxpace.core.types import PacerState
from jaxpace.instrumentation import checks


def taken_out(pace: PaceState) -> PacerState:
  """Returns the tree that the pacer's `init` returns, with the pace state's axis of ranks in front
  of every leaf; () without a pacer.

  Raises:
    ValueError: it is no pace state.
  """
  checks.is_pace(pace)
  packed = checks.packed_pacer(pace)
  if packed is None:
    return ()
  if not isinstance(packed.words, jax.Array) or isinstance(packed.words, jax.core.Tracer):
    return packing.unpack(packed)
  with own_context.on(packed.words):
    return jax.jit(packing.unpack)(packed)


def put_in(pace: PaceState, state: PacerState) -> PaceState:
  """Returns the pace state with another state of the pacer's in it, laid out as it was.

  Args:
    pace: a pace state.
    state: what `taken_out` returned, changed.

  Raises:
    ValueError: `state` has other names, shapes or dtypes than the pacer's.
  """
  checks.is_pace(pace)
  packed = checks.packed_pacer(pace)
  if packed is None:
    checks.same_layout(packing.layout_of(state), packing.layout_of(()))
    return pace
  lead = packed.words.shape[:-1]
  checks.same_layout(packing.layout_of(state, len(lead)), packed.layout)
  pack = functools.partial(packing.pack, layout=packed.layout, lead=lead)
  if not isinstance(packed.words, jax.Array):
    return pace._replace(pacer=pack(jax.tree.map(np.asarray, state), xp=np))
  if isinstance(packed.words, jax.core.Tracer) or not packed.words.committed:
    return pace._replace(pacer=pack(state))
  with own_context.on(packed.words):
    return pace._replace(pacer=jax.jit(pack, out_shardings=packed.words.sharding)(state))


__all__ = ["put_in", "taken_out"]
