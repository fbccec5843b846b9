"""Packing: what goes in comes out, on devices and on the host, axes in front stay, and a layout is
told from others."""

from typing import NamedTuple

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings

import jaxpace
from jaxpace.core import pace as pace_state
from jaxpace.core import packing
from tests.quick import examples


class Pair(NamedTuple):
  one: object
  other: object


class Twin(NamedTuple):
  left: object
  right: object


PACKED = [np.float32, np.int32, np.uint32, np.bool_]
OTHERS = [np.float16, np.int8, np.uint16]
@st.composite
def arrays(draw):
  """Any bits at all, of the kinds that are packed and of some that are not; scalars, vectors, empty
  ones."""
  kind = np.dtype(draw(st.sampled_from(PACKED + OTHERS)))
  shape = tuple(draw(st.lists(st.integers(0, 3), max_size=2)))
  size = int(np.prod(shape))
  if kind == np.bool_:
    return np.array(draw(st.lists(st.booleans(), min_size=size, max_size=size)),
                    kind).reshape(shape)
  data = draw(st.binary(min_size=size * kind.itemsize, max_size=size * kind.itemsize))
  return np.frombuffer(data, kind).reshape(shape)


TREES = st.recursive(
    arrays(), lambda inner: st.one_of(
        st.lists(inner, max_size=4).map(tuple), st.builds(Pair, inner, inner),
        st.dictionaries(st.sampled_from("abcd"), inner, max_size=4)), max_leaves=12)


def same(one, other):
  assert jax.tree.structure(one) == jax.tree.structure(other)
  for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
    assert (a.dtype == b.dtype and np.shape(a) == np.shape(b)
            and np.asarray(a).tobytes() == np.asarray(b).tobytes())


@given(TREES, st.integers(0, 2))
@settings(max_examples=examples(60), deadline=None)
def test_every_bit_of_any_tree_comes_out_again_on_the_host_and_with_axes_in_front(tree, axes):
  lead = (3, 2)[:axes]
  many = jax.tree.map(lambda leaf: np.broadcast_to(leaf, (*lead, *leaf.shape)).copy(), tree)
  packed = packing.pack(many, lead=lead, xp=np)
  assert packed.words.dtype == np.uint32 and packed.words.ndim == 1 + axes
  same(packing.unpack(packed), many)
  same(packing.pack(packing.unpack(packed), packed.layout, lead, np), packed)
  assert packed.layout == packing.layout_of(tree), ("the layout is that of the tree without axes "
                                                    "in front")


@given(TREES)
@settings(max_examples=examples(15), deadline=None)
def test_every_bit_of_any_tree_comes_out_again_on_a_device(tree):
  tree = jax.tree.map(jnp.asarray, tree)
  packed = packing.pack(tree)
  same(packed, packing.pack(jax.tree.map(np.asarray, tree), xp=np))
  same(packing.unpack(packed), tree)


def test_what_is_large_or_of_another_kind_stays_by_itself():
  large = np.arange(packing.LARGEST + 1, dtype=np.float32)
  packed = packing.pack({"large": large, "half": np.float16(2), "small": large[1:]}, xp=np)
  assert [np.shape(leaf) for leaf in packed.others] == [(), large.shape]
  assert packed.words.shape == (1 + packing.LARGEST,)


@pytest.mark.parametrize("other", [
    Twin(np.float32(1), np.int32(2)), Pair(np.int32(1), np.float32(2)),
    Pair(np.zeros(2, np.float32), np.int32(2)), (np.float32(1), np.int32(2)),
    Pair(np.float32(1), np.bool_(True))])
def test_the_mark_tells_layouts_apart_by_names_shapes_and_kinds(other):
  here = packing.layout_of(Pair(np.float32(1), np.int32(2)))
  assert here == packing.layout_of(jax.eval_shape(lambda: Pair(jnp.float32(5), jnp.int32(6))))
  assert here.mark != packing.layout_of(other).mark


PACERS = {
    "early": jaxpace.pace_early_ranks(),
    "guard": jaxpace.guard(jaxpace.pace_early_ranks()), "interleave": jaxpace.interleave_jobs(),
    "all": jaxpace.steerable(jaxpace.chain(jaxpace.guard(jaxpace.pace_early_ranks()),
                                           jaxpace.interleave_jobs()))}


@pytest.mark.parametrize("name", PACERS)
def test_a_pacers_state_is_one_array_of_the_pace_state_whatever_the_pacer(name):
  pace = pace_state.fresh(4, 16, PACERS[name])
  assert len(jax.tree.leaves(pace)) == 11 and len(jax.tree.leaves(pace.pacer)) == 1
  same(packing.unpack(pace.pacer), PACERS[name].init(4))
