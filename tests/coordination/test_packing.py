"""Packing: what goes in comes out, axes in front stay, and a state has few arrays."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxpace
from jaxpace.coordination import packing
from jaxpace.coordination.early_ranks import Own as EarlyOwn
from jaxpace.coordination.guard import Own

LIKE = {"a": 0.0, "b": (1, False), "c": True, "d": (2.0, 3)}
TREE = {"a": jnp.float32(np.nan), "b": (jnp.int32(-(2**31)), jnp.bool_(True)), "c": jnp.bool_(False),
        "d": (jnp.float32(-np.inf), jnp.int32(2**31 - 1))}


def same(one, other):
  assert jax.tree.structure(one) == jax.tree.structure(other)
  for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
    assert a.dtype == b.dtype and a.shape == b.shape and np.asarray(a).tobytes() == np.asarray(b).tobytes()


def test_what_is_packed_comes_out_again_compiled_and_not_and_with_axes_in_front():
  packed = packing.pack(TREE)
  assert [(leaf.shape, leaf.dtype) for leaf in packed] == [((2,), np.float32), ((4,), np.int32)]
  same(packing.unpack(packed, LIKE), TREE)
  same(jax.jit(lambda tree: packing.unpack(packing.pack(tree), LIKE))(TREE), TREE)
  many = jax.tree.map(lambda leaf: jnp.stack([leaf] * 3), TREE)
  same(packing.unpack(jax.vmap(packing.pack)(many), LIKE), many)
  same(packing.unpack(packing.pack((jnp.int32(3),)), (0,)), (jnp.int32(3),))


@pytest.mark.parametrize(("pacer", "kind", "arrays"), [
    (jaxpace.pace_early_ranks(), EarlyOwn, 6), (jaxpace.pace_early_ranks(unshared=1e-3), None, 4),
    (jaxpace.guard(jaxpace.pace_early_ranks()), Own, 8)], ids=["early", "unshared", "guard"])
def test_a_pacers_state_is_few_arrays_that_can_be_read_by_name(pacer, kind, arrays):
  state = pacer.init(4)
  assert len(jax.tree.leaves(state)) == arrays
  assert kind is None or isinstance(state.own, kind)
  # As made, field by field: the template has the state's own order and types.
  same(packing.pack(state.own), state.packed)
