"""Arithmetic on uint32 pairs, held against Python integers."""

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from jaxpace.observation.clocks import words

TWO_64 = 2**64
EDGES = [0, 1, 2**32 - 1, 2**32, 2**32 + 1, 2**63 - 1]
TIMES = st.one_of(st.sampled_from(EDGES), st.integers(0, 2**63 - 1))


def pair(value: int) -> np.ndarray:
  value %= TWO_64
  return np.array([value >> 32, value & 0xFFFFFFFF], np.uint32)


def integer(array: jax.Array) -> int:
  high, low = np.asarray(array)
  return (int(high) << 32) | int(low)


@given(TIMES, TIMES)
def test_add_and_subtract_are_those_of_the_integers_modulo_2_to_64(a, b):
  assert integer(words.add(jnp.asarray(pair(a)), jnp.asarray(pair(b)))) == (a + b) % TWO_64
  assert integer(words.subtract(jnp.asarray(pair(a)), jnp.asarray(pair(b)))) == (a - b) % TWO_64


@given(TIMES, st.one_of(
    st.sampled_from([0, 1, -1, 2**32, -(2**32)]), st.integers(-(10**12), 10**12),
    st.integers(-(2**62), 2**62)))
def test_seconds_between_is_exact_to_two_units_in_the_last_place(start, difference):
  end = max(0, min(start + difference, 2**63 - 1))
  seconds = words.seconds_between(jnp.asarray(pair(start)), jnp.asarray(pair(end)))
  assert seconds.dtype == jnp.float32
  expected = (end - start) / 10**9  # correctly rounded to float64
  assert abs(float(seconds) - expected) <= 2 * float(np.spacing(np.float32(abs(expected))))


@given(st.lists(TIMES, min_size=1, max_size=5))
def test_to_ns_inverts_from_ns(values):
  packed = words.from_ns(np.array(values, np.int64))
  assert packed.dtype == np.uint32 and packed.shape == (len(values), 2)
  np.testing.assert_array_equal(packed, np.stack([pair(value) for value in values]))
  np.testing.assert_array_equal(words.to_ns(packed), np.array(values, np.int64))


def test_leading_dimensions_are_element_by_element_and_compile():
  starts = np.array([[5, 2**32 - 1], [7 * 10**9, 0]], np.int64)
  ends = np.array([[6, 2**32 + 9], [10**9, 3]], np.int64)
  seconds = jax.jit(words.seconds_between)(jnp.asarray(words.from_ns(starts)),
                                           jnp.asarray(words.from_ns(ends)))
  np.testing.assert_allclose(seconds, (ends - starts) * 1e-9, rtol=3e-7)
