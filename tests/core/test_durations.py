"""Arrivals of one step against their definitions, in float64."""

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpace.core import durations

NAN = np.nan
SECONDS = st.floats(0, 10, width=32)
RANKS = st.sampled_from([1, 2, 9]).flatmap(
    lambda n: st.lists(st.tuples(SECONDS, st.floats(0, 0.5, width=32)), min_size=n, max_size=n))
EARLINESS, LATENESS, TRANSFER, TRANSFERS_NOW = map(
    jax.jit, (durations.earliness, durations.lateness, durations.transfer, durations.transfers_now))


def f32(*values):
  return jnp.asarray(values, jnp.float32)


@hypothesis.given(RANKS, st.floats(0, 1, width=32))
def test_definitions(ranks, own_time):
  a, d = np.asarray(ranks, np.float32).T
  wide_a, wide_d = a.astype(np.float64), d.astype(np.float64)
  np.testing.assert_allclose(EARLINESS(jnp.asarray(a)), wide_a.max() - wide_a, atol=1e-6)
  late = (wide_a + wide_d).max() - wide_a.max()
  found = float(LATENESS(jnp.asarray(a), jnp.asarray(d)))
  np.testing.assert_allclose(found, late, atol=1e-6)
  assert 0 <= found <= d.max()
  rank = len(a) // 2
  wait = (wide_a + wide_d).max() - (wide_a + wide_d)[rank] + own_time
  transfer = TRANSFER(jnp.float32(wait), jnp.asarray(a), jnp.asarray(d), jnp.int32(rank))
  np.testing.assert_allclose(transfer, own_time, atol=3e-6)


@hypothesis.given(RANKS, st.floats(0, 1, width=32), st.floats(0, 1, width=32))
def test_means_of_waits_say_what_the_transfers_took(ranks, own_time, second):
  """Each rank waits for the last one, delayed as they all are, and then for the transfer."""
  a, d = np.asarray(ranks, np.float32).T
  entered = a.astype(np.float64) + d
  waits = f32((entered.max() - entered + own_time).mean(), second, NAN)
  np.testing.assert_allclose(TRANSFERS_NOW(waits, jnp.asarray(a), jnp.asarray(d)),
                             [own_time, second, NAN], atol=3e-6)
  unknown = TRANSFERS_NOW(waits, jnp.asarray(a).at[0].set(NAN), jnp.asarray(d))
  np.testing.assert_allclose(unknown, [NAN, second, NAN], rtol=1e-6)


@pytest.mark.parametrize("junk", [NAN, np.inf, -np.inf, -1e-3, 1e30])
def test_missing_ranks(junk):
  a, d = f32(10e-3, junk, 15e-3), f32(0, 0, 1e-3)
  np.testing.assert_allclose(durations.earliness(a), [5e-3, NAN, 0], rtol=1e-5)
  np.testing.assert_allclose(durations.latest(a), 15e-3)
  assert not durations.all_known(a, d)
  assert np.isnan(durations.lateness(a, d))
  assert np.isnan(durations.lateness(d, a))
  assert np.isnan(durations.transfer(jnp.float32(1e-3), a, d, jnp.int32(0)))
  whole = f32(10e-3, 15e-3)
  assert np.isnan(durations.transfer(jnp.float32(junk), whole, f32(0, 0), jnp.int32(0)))
  assert np.isnan(durations.transfer(jnp.float32(1), whole, f32(0, 0), jnp.int32(2)))
  nobody = f32(junk, junk)
  assert np.isnan(durations.latest(nobody)) and np.isnan(durations.earliness(nobody)).all()


def test_own():
  values = f32(1, 2, 3)
  assert [float(durations.own(values, jnp.int32(r))) for r in range(3)] == [1, 2, 3]
  assert all(np.isnan(durations.own(values, jnp.int32(r))) for r in (-1, 3, -2**31, 2**31 - 1))
